"""Causal self-attention with heads sharded over the tensor-parallel group.

Owns the projections and the random stream of attention dropout. How positions and masks act comes
in with the rotation and the core.

Shapes: S sequence, B micro-batch, H hidden, n this rank's query heads, k its key-value heads, D
head size, L keys (cached ones included).
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Protocol

from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention.cores import AttentionCore
from megatron_ds.model.declaration.parts import AttentionSpec
from megatron_ds.model.kernels.elementwise import EAGER
from megatron_ds.model.norm import build_norm
from megatron_ds.model.position_embedding import Rotation
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import declared_parameter


class KeyValueCache(Protocol):
    """Keys and values of the tokens that a generator has already fed."""

    @property
    def length(self) -> int:
        """Tokens stored before this forward pass, of the longest text; read once, before the first
        layer."""
        ...

    @property
    def positions_BS(self) -> Tensor | None:
        """Positions of the new tokens, where the texts have different lengths; None where all
        have `length` tokens and `is_wider` is False."""
        ...

    @property
    def num_keys(self) -> int:
        """L: `length` + S or, with `positions_BS`, more."""
        ...

    @property
    def is_wider(self) -> bool:
        """Whether the keys are in fp32 and the activations of a CPU are not."""
        ...

    def positions_of(self, window: int | None) -> Tensor | None:
        """Positions [B or 1, L] of the keys of layers with a window; None: 0 to `num_keys` - 1."""
        ...

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, k, S, D] keys and values of a layer; return those that queries may attend to,
        [B, k, L, D]."""
        ...


class Attention(nn.Module):
    """The parts of attention, which a block runs in order: project, attend, output.

    Args:
        config: Architecture.
        layer: Number of the layer, from 0.
        group: Tensor-parallel group over which the heads are sharded.
        rng: Random streams; dropout on sharded heads draws from the sharded one.
        init: Draws the initial weights.
        checkpointing: Recomputes the attention core (selective recomputation). None: it is stored.
    """

    spec_type: ClassVar[type[AttentionSpec]] = AttentionSpec
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        group: Group,
        rng: RngStreams,
        init: Initializer,
        checkpointing: ActivationCheckpointing | None,
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout
        self.group = group
        self.rng = rng
        self.checkpointing = checkpointing
        self.elementwise = EAGER
        spec = self.spec_type.of(config, layer)
        self.rule = spec.rule
        self.local_sizes = [size // group.size for size in spec.sections]
        self.gate_size = config.gate_size // group.size
        kv_heads = config.kv_heads // group.size
        self.local_heads = [config.num_attention_heads // group.size, kv_heads, kv_heads]
        name = f"layers.{layer}.attention"
        self._add_projections(spec, name, init)
        self.proj = RowParallelLinear(*spec.layer(name, "proj"), group=group, init=init)
        self.has_norms = bool(spec.norms)
        for key, norm in spec.norms.items():
            self.add_module(key, build_norm(norm, f"{name}.{key}", group))
        self.norms_all_heads = any(norm.is_sharded for norm in spec.norms.values())
        self.has_sinks = config.softmax_type != "vanilla"
        weight = spec.named(name).get("sinks")
        self.sinks = None if weight is None else declared_parameter(weight, group, init)

    @property
    def is_traceable(self) -> bool:
        """Whether torch.compile can include dropout and an SDPA core in a graph.

        Random states cannot be exchanged inside a graph, nor activations checkpointed.
        """
        return self.checkpointing is None and not self._has_own_stream

    def project(self, x_SBH: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Projects like `project_gated`, for layers without output gates; returns q, k, v."""
        assert not self.gate_size
        return self.project_gated(x_SBH, rotation)[:3]

    def project_gated(
        self, x_SBH: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Normalized, rotated queries [B, n, S, D] and keys [B, k, S, D], values, as keys, and
        the logits of the gates, [S, B, n] or [S, B, n x D], if the outputs have gates."""
        sizes = self.local_sizes
        heads = self.local_heads
        gate = None
        projected = self.qkv(x_SBH)
        if self.gate_size:
            projected, gate = projected.split([sum(sizes), self.gate_size], dim=-1)
        if self.has_norms:
            q, k, v = projected.split(sizes, dim=-1)
            if self.norms_all_heads:
                q = self.q_norm(q)
                k = self.k_norm(k)
            q, k, v = map(_heads, (q, k, v), heads)
            if not self.norms_all_heads:
                q = self.q_norm(q)
                k = self.k_norm(k)
            if rotation is not None:
                q, k = (self.elementwise.rotate(part, rotation) for part in (q, k))
        elif rotation is None:
            q, k, v = map(_heads, projected.split(sizes, dim=-1), heads)
        else:
            parts = projected.split([sizes[0] + sizes[1], sizes[2]], dim=-1)
            qk = _heads(parts[0], heads[0] + heads[1])
            v = _heads(parts[1], heads[2])
            q, k = self.elementwise.rotate(qk, rotation).split(heads[:2], dim=2)
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), gate

    def attend(self, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
        """Run the core, with dropout in training: [B, n, S, D]."""
        return self._run(q, k, v, core)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
        inputs = [q, k, v]
        if self.has_sinks:
            inputs.append(q.new_zeros(self.local_heads[0]) if self.sinks is None else self.sinks)
        if self.checkpointing is None:
            return self._attend(core, *inputs)
        return self.checkpointing.run(partial(self._attend, core), *inputs)

    def output(self, attended_BnSD: Tensor, gate: Tensor | None = None) -> Tensor:
        """[B, n, S, D] to [S, B, H]; `gate` as `project_gated` returns it."""
        attended = attended_BnSD.permute(2, 0, 1, 3)
        if gate is not None:
            attended = attended * gate.sigmoid().view(*attended.shape[:3], -1)
        out_SBH: Tensor = self.proj(attended.flatten(2))
        return out_SBH

    def _add_projections(self, spec: AttentionSpec, name: str, init: Initializer) -> None:
        """Build what `project_gated` multiplies by."""
        self.qkv = ColumnParallelLinear(*spec.layer(name, "qkv"), group=self.group, init=init)

    @property
    def _has_own_stream(self) -> bool:
        """Whether the ranks must draw different masks, because the heads are sharded over them."""
        return self.dropout > 0.0 and self.group.size > 1

    def _attend(
        self, core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, *sinks_n: Tensor
    ) -> Tensor:
        if not self.training:
            return core.attend(q, k, v, 0.0, *sinks_n)
        if not self._has_own_stream:
            return core.attend(q, k, v, self.dropout, *sinks_n)
        with self.rng.fork_tp_rng():
            return core.attend(q, k, v, self.dropout, *sinks_n)


def _heads(x: Tensor, count: int) -> Tensor:
    """[S, B, n x D] to [S, B, n, D]."""
    return x.view(*x.shape[:-1], count, -1)
