"""One transformer layer with pre-normalization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention import Attention, KeyValueCache
from megatron_ds.model.attention_rule import attention_rules
from megatron_ds.model.elementwise import EAGER, Elementwise
from megatron_ds.model.mlp import MLP
from megatron_ds.model.moe import MoE
from megatron_ds.model.norm import build_norm
from megatron_ds.model.position_embedding import AttentionContext, Rotation
from megatron_ds.model.spec.parts import NormSpec
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [S, B, H] to [S, B, H].

    With sequence parallelism, [S / TP, B, H] to [S / TP, B, H].

    Args:
        config: Architecture.
        layer: Number of the layer, from 0.
        group: Tensor-parallel group.
        rng: Random streams of dropout.
        init: Draws the initial weights.
        mlp: The feed-forward layer, [S, B, H] to [S, B, H].
        checkpoint_core: Recomputes the attention core. None: it is stored.
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
    ) -> None:
        super().__init__()
        self.layer = layer
        self.rule = attention_rules(config)[layer]
        self.dropout = config.hidden_dropout
        self.group = group
        norm, name = NormSpec(config), f"layers.{layer}"
        self.attention_norm = build_norm(norm, f"{name}.attention_norm", group)
        self.attention = Attention(
            config, layer, group=group, rng=rng, init=init, checkpointing=checkpoint_core
        )
        self.mlp_norm = build_norm(norm, f"{name}.mlp_norm", group)
        self.mlp = mlp
        self.elementwise = EAGER
        self._before_core, self._after_core = self._project, self._finish

    def forward(
        self, x_SBH: Tensor, context: AttentionContext, cache: KeyValueCache | None = None
    ) -> Tensor:
        q, k, v = self._before_core(x_SBH, context.rotation)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        attended_BnSD = self.attention.attend(q, k, v, context.core)
        return self._after_core(x_SBH, attended_BnSD)

    def use_elementwise(self, functions: Elementwise) -> None:
        """Set the functions that compute the elementwise parts."""
        self.elementwise = self.attention.elementwise = functions
        if isinstance(self.mlp, MLP):
            self.mlp.elementwise = functions
        elif isinstance(self.mlp, MoE) and self.mlp.ep_group.size == 1:
            # With further ranks they would be compiled again for each number of tokens.
            self.mlp.experts.elementwise = functions

    def compile_parts(self, *, is_core_traceable: bool, dynamic: bool | None) -> bool:
        """Compile the layer with torch.compile, on its first call.

        It becomes one graph or, where the attention core cannot be in a graph, the graphs before
        and after the core.

        Args:
            is_core_traceable: Whether the core can be in a graph.
            dynamic: Passed to torch.compile.

        Returns:
            Whether it becomes one graph.
        """
        is_graph = is_core_traceable and self.attention.is_traceable
        if is_graph:
            self.compile(dynamic=dynamic)
        else:
            self._before_core = torch.compile(self._project, dynamic=dynamic)
            self._after_core = torch.compile(self._finish, dynamic=dynamic)
        return is_graph

    def use_eager(self) -> None:
        """Undo `compile_parts`."""
        self._compiled_call_impl = None
        self._before_core, self._after_core = self._project, self._finish

    def _project(self, x_SBH: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(self.attention_norm(x_SBH), rotation)

    def _finish(self, x_SBH: Tensor, attended_BnSD: Tensor) -> Tensor:
        x = self._add(x_SBH, self.attention.output(attended_BnSD))
        return self._add(x, self.mlp(self.mlp_norm(x)))

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        # Every tensor-parallel rank has all of x, so the mask is that of the replicated stream.
        if self.training and self.dropout > 0.0:
            return self.elementwise.add_dropout(residual, x, self.dropout, self.group)
        return residual + x
