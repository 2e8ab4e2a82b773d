"""One transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.config.devices import is_host
from megatron_ds.model.attention.latent import LatentAttention
from megatron_ds.model.attention.logits import LargestLogits
from megatron_ds.model.attention.self_attention import Attention, KeyValueCache
from megatron_ds.model.declaration.parts import NormSpec
from megatron_ds.model.declaration.residual import Residual, residual_form
from megatron_ds.model.kernels.elementwise import EAGER, Elementwise
from megatron_ds.model.mlp import MLP
from megatron_ds.model.moe import MoE
from megatron_ds.model.norm import build_norm
from megatron_ds.model.position_embedding import AttentionContext, Rotation
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams

Segment = Callable[..., Any]
"""A part of a layer that is one graph if it is compiled."""
OVERLAP: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}
"""Options of torch's compiler: collectives start as early, and are awaited as late as possible."""
TORCH_RANDOM: dict[str, Any] = {"fallback_random": True}
"""Option of torch's compiler: dropout draws the masks of eager layers, by a kernel of torch. On a
CPU the compiler's own numbers take several times as long as that kernel."""
COMBINED: dict[str, Any] = {"combo_kernels": True}
"""Option of torch's compiler: kernels that do not depend on each other are launched as one. Casts
to fp8 of activations and of gradients do not, and those that are summed over tokens take several
kernels each."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or another form: [S, B, H] to [S, B, H].

    With sequence parallelism, [S / TP, B, H] to [S / TP, B, H].

    Args:
        config: Architecture.
        layer: Number of the layer, from 0.
        group: Tensor-parallel group.
        rng: Random streams of dropout.
        init: Draws the initial weights.
        mlp: The feed-forward layer, [S, B, H] to [S, B, H].
        checkpoint_core: Recomputes the attention core. None: it is stored.
        residual: How attention and the feed-forward layer add to the residual stream. None: as in
            the options.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        group: Group,
        rng: RngStreams,
        init: Initializer,
        mlp: nn.Module,
        checkpoint_core: ActivationCheckpointing | None,
        residual: Residual | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = config.hidden_dropout
        self.group = group
        self.residual = residual_form(config) if residual is None else residual
        form = self.residual

        def norm(key: str) -> nn.Module:
            name = f"layers.{layer}.{key}"
            return build_norm(NormSpec(config), name, group) if form.norms[key] else nn.Identity()

        self.attention_norm = norm("attention_norm")
        attention_type = LatentAttention if config.multi_latent_attention else Attention
        self.attention = attention_type(
            config, layer, group=group, rng=rng, init=init, checkpointing=checkpoint_core
        )
        self.rule = self.attention.rule
        self.largest: LargestLogits | None = None
        """Records the attention logits in training. None: they are not measured."""
        self.attention_post_norm = norm("attention_post_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = mlp
        self.mlp_post_norm = norm("mlp_post_norm")
        self.elementwise = EAGER
        self.use_eager()

    def forward(
        self, x_SBH: Tensor, context: AttentionContext, cache: KeyValueCache | None = None
    ) -> Tensor:
        y_SBH: Tensor = self._layer(x_SBH, context, cache)
        return y_SBH

    def _all(self, x_SBH: Tensor, context: AttentionContext, cache: KeyValueCache | None) -> Tensor:
        """The layer."""
        q, k, v, gate, normed_SBH = self._before_core(x_SBH, context.rotation)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        core = context.core
        if self.largest is not None and self.training:
            core = self.largest.measuring(core, self.rule)
        attended_BnSD = self.attention.attend(q, k, v, core)
        y_SBH: Tensor = self._after_core(x_SBH, attended_BnSD, gate, normed_SBH)
        return y_SBH

    def use_elementwise(self, functions: Elementwise) -> None:
        """Set the functions that compute the elementwise parts."""
        self.elementwise = functions
        self.attention.elementwise = functions
        if isinstance(self.mlp, MLP):
            self.mlp.elementwise = functions
        elif isinstance(self.mlp, MoE):
            self.mlp.use_elementwise(functions)

    def compile_parts(self, *, is_core_traceable: bool, dynamic: bool | None) -> list[str]:
        """Compile the layer with torch.compile, on its first call.

        It becomes one graph or, where the attention core cannot be in a graph, the graphs before
        and after the core. Experts exchange rows whose number the host reads: the graphs of a layer
        end before its core and before its experts, and begin again after them. Hooks of this module
        are in no graph.

        Args:
            is_core_traceable: Whether the core can be in a graph.
            dynamic: Passed to torch.compile.

        Returns:
            The parts that are in no graph.
        """
        options = dict[str, Any]()
        if self.group.size > 1:
            # As in eager layers, other products are computed while sums are exchanged.
            options |= OVERLAP
        if is_host(next(self.parameters()).device.type):
            options |= TORCH_RANDOM
        elif any(getattr(module, "training_product", None) for module in self.modules()):
            options |= COMBINED

        def compiled(function: Segment) -> Segment:
            graph: Segment = torch.compile(function, dynamic=dynamic, options=options)
            return graph

        if isinstance(self.mlp, MoE):
            self._before_core = compiled(self._before)
            self._before_mlp = compiled(self._add_attention)
            self._after_mlp = compiled(self._add_mlp)
            self.mlp.compile_parts(dynamic=dynamic)
            return ["attention", "experts"]
        if is_core_traceable and self.attention.is_traceable:
            self._layer = compiled(self._all)
            return []
        self._before_core = compiled(self._before)
        self._after_core = compiled(self._after)
        return ["attention"]

    def use_eager(self) -> None:
        """Undo `compile_parts`."""
        self._layer = self._all
        self._before_core = self._before
        self._after_core = self._after
        self._before_mlp = self._add_attention
        self._after_mlp = self._add_mlp
        if isinstance(self.mlp, MoE):
            self.mlp.use_eager()

    def _before(
        self, x_SBH: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Queries, keys, values, the gates of the output, and a norm that is needed after
        attention, if the form has one."""
        normed_SBH = self.attention_norm(x_SBH)
        form = self.residual
        projected = self.attention.project_gated(normed_SBH, rotation)
        if form.separate:
            normed_SBH = self.mlp_norm(x_SBH)
        return *projected, normed_SBH if form.parallel or form.to_norm else None

    def _after(
        self,
        x_SBH: Tensor,
        attended_BnSD: Tensor,
        gate: Tensor | None,
        normed_SBH: Tensor | None,
    ) -> Tensor:
        """The stream after the layer."""
        residual_SBH, normed_SBH = self._before_mlp(x_SBH, attended_BnSD, gate, normed_SBH)
        out_SBH: Tensor = self._after_mlp(residual_SBH, self.mlp(normed_SBH))
        return out_SBH

    def _add_attention(
        self,
        x_SBH: Tensor,
        attended_BnSD: Tensor,
        gate: Tensor | None,
        normed_SBH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What the output of the feed-forward layer is added to, and its input."""
        form = self.residual
        attended_SBH = self.attention.output(attended_BnSD, gate)
        if form.to_norm and normed_SBH is not None:
            x_SBH = normed_SBH
            normed_SBH = None
        x_SBH = self._add(x_SBH, attended_SBH, self.attention_post_norm)
        if normed_SBH is None:
            normed_SBH = self.mlp_norm(x_SBH)
        return normed_SBH if form.to_norm else x_SBH, normed_SBH

    def _add_mlp(self, residual_SBH: Tensor, out_SBH: Tensor) -> Tensor:
        return self._add(residual_SBH, out_SBH, self.mlp_post_norm)

    def _add(self, residual: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
        """The stream with the output of attention or of the feed-forward layer."""
        form = self.residual
        if form.post:
            x = norm(x)
        if form.scale != 1.0:
            x = x * form.scale
        # Every tensor-parallel rank has all of x, so the mask equals the replicated stream's.
        if self.training and self.dropout > 0.0:
            x = self.elementwise.add_dropout(residual, x, self.dropout, self.group)
        else:
            x = residual + x
        return norm(x) if form.after else x
