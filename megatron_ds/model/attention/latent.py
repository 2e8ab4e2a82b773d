"""Multi-latent attention (DeepSeek-V2, 2024) with heads sharded over the tensor-parallel group.

A cache stores the latent vectors and the rotated keys that the heads share. Attention to it
multiplies the queries by the key projection and the result by the value projection, instead of all
cached latent vectors by both.

Shapes: S sequence, B micro-batch, H hidden, n this rank's heads, L keys (cached ones included),
C latent vector, P rotated part of a head, K the other part of its queries and keys, V its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.model.attention.context import ContextAttention, KeyGradients
from megatron_ds.model.attention.cores import AttentionCore
from megatron_ds.model.attention.self_attention import Attention
from megatron_ds.model.declaration.latent import MLASpec
from megatron_ds.model.declaration.parts import AttentionSpec
from megatron_ds.model.position_embedding import Rotation
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.collectives import copy_to_group, gather_sequence
from megatron_ds.parallel.linear import ColumnParallelLinear, multiply
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import declared_parameter
from megatron_ds.parallel.weights import Weight


class LatentAttention(Attention):
    """The parts of multi-latent attention, which a block runs in order: project, attend, output."""

    q: ColumnParallelLinear
    q_up: ColumnParallelLinear
    kv_up: _Up

    spec_type = MLASpec

    def _add_projections(self, spec: AttentionSpec, name: str, init: Initializer) -> None:
        assert isinstance(spec, MLASpec)
        model = spec.model
        group = self.group
        named = spec.named(name)
        self.ranks = spec.ranks
        self.sizes = model.qk_head_dim, model.qk_pos_emb_head_dim
        if "q" not in self.ranks:
            self.q = ColumnParallelLinear(*spec.layer(name, "q"), group=group, init=init)
        for key in self.ranks:
            self.add_module(f"{key}_down", _Down(named[f"{key}_down.weight"], group, init))
            up = _Up(*spec.layer(name, f"{key}_up"), group=group, init=init)
            self.add_module(f"{key}_up", up)

    def project_gated(
        self, x_SBH: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Rotated queries [B, n, S, K + P], latent vectors [B, 1, S, C] and the shared keys
        [B, 1, S, P]; None."""
        parts = []
        for name, rank in self.ranks.items():
            down: Tensor = self.get_submodule(f"{name}_down")(x_SBH)
            latent, shared = down.split([rank, down.shape[-1] - rank], dim=-1)
            if self.has_norms:
                latent = self.get_submodule(f"{name}_norm")(latent)
            parts += [latent, shared]
        sizes = [part.shape[-1] for part in parts]
        enter = gather_sequence if self.group.sequence_parallel else copy_to_group
        *query_latents, latent, shared = enter(torch.cat(parts, dim=-1), self.group).split(
            sizes, dim=-1
        )
        q = self.q_up(query_latents[0]) if query_latents else self.q(x_SBH)
        q = q.unflatten(-1, (self.local_heads[0], -1))
        plain, rotated = q.split(self.sizes, dim=-1)
        shared = shared.unsqueeze(2)
        if rotation is not None:
            rotated, shared = (
                self.elementwise.rotate(part, rotation) for part in (rotated, shared)
            )
            q = torch.cat([plain, rotated], dim=-1)
        latent = latent[:, :, None].permute(1, 2, 0, 3)
        shared = shared.permute(1, 2, 0, 3)
        return q.permute(1, 2, 0, 3), latent, shared, None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
        """Run the core, with dropout in training: [B, n, S, V].

        Args:
            q: Queries [B, n, S, K + P].
            k: Latent vectors [B, 1, L, C]; cached ones may be of a wider type than the queries.
            v: Rotated keys [B, 1, L, P].
            core: Computes attention.
        """
        latent = k
        shared = v
        size = self.sizes[0]
        up = self.kv_up
        if isinstance(core, ContextAttention):
            return self._run(q, latent, shared, _LatentContext(core, up, size))
        if up.product is None and q.shape[2] < latent.shape[2]:
            to_k, to_v = up.weight.unflatten(0, (q.shape[1], -1)).tensor_split([size], dim=1)
            q = torch.cat([q[..., :size] @ to_k, q[..., size:]], dim=-1)
            attended = super().attend(q, torch.cat([latent, shared], dim=-1), latent, core)
            return torch.matmul(attended, to_v.transpose(1, 2))
        latent_LBC = latent.squeeze(1).transpose(0, 1).to(q.dtype)
        kv = up(latent_LBC).unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3)
        plain, v = kv.tensor_split([size], dim=-1)
        k = torch.cat([plain, shared.to(q.dtype).expand(-1, q.shape[1], -1, -1)], dim=-1)
        return super().attend(q, k, v, core)


@dataclass(frozen=True)
class _LatentContext:
    """Attention of context-parallel ranks, which exchange latent vectors and shared keys."""

    core: ContextAttention
    up: _Up
    size: int
    """K."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        """As in `AttentionCore`, of latent vectors [B, 1, S, C] and shared keys [B, 1, S, P]."""
        exchanged = torch.cat([k, v], dim=-1)
        expansion = LatentKeys(q.shape[1], self.size, k.shape[-1], self.up.weight.shape[0])

        def attend(weight: Tensor) -> Tensor:
            return self.core.attend_to(q, exchanged, expansion, (weight,), dropout, *sinks_n)

        attended: Tensor = self.up(exchanged, attend)
        return attended


@dataclass(frozen=True)
class LatentKeys:
    """Keys and values of latent vectors and the keys that heads share, an `Expansion`."""

    heads: int
    """n"""
    size: int
    """K"""
    latent: int
    """C"""
    features: int
    """Rows of the projection, n (K + V)."""

    @property
    def value_size(self) -> int:
        return self.features // self.heads - self.size

    def keys_and_values(self, exchanged: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared = exchanged.tensor_split([self.latent], dim=-1)
        projected = F.linear(latent.squeeze(1), *weights)
        plain, v = projected.unflatten(-1, (self.heads, -1)).tensor_split([self.size], dim=-1)  # type: ignore[no-untyped-call]
        shared = shared.expand(-1, self.heads, -1, -1)
        return torch.cat([plain.transpose(1, 2), shared], dim=-1), v.transpose(1, 2)

    def differentiating(self, exchanged: Tensor, *weights: Tensor) -> KeyGradients:
        leaves = [x.detach().requires_grad_() for x in (exchanged, *weights)]
        with torch.enable_grad():
            k, v = self.keys_and_values(*leaves)
        k_grad, v_grad = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))

        def finish() -> Sequence[Tensor]:
            grads = [grad.to(k.dtype) for grad in (k_grad, v_grad)]
            return torch.autograd.grad((k, v), leaves, grads)

        return KeyGradients(k, v, k_grad, v_grad, finish)


class _Down(nn.Module):
    """The product with a replicated weight."""

    def __init__(self, weight: Weight, group: Group, init: Initializer) -> None:
        super().__init__()
        self.weight = declared_parameter(weight, group, init)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Up(ColumnParallelLinear):
    """The product with this rank's rows, of what has entered tensor parallelism."""

    def forward(self, x: Tensor, compute: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the product, or what a function computes with the weight.

        The weight of a partitioned parameter is there during calls of its module only.
        """
        if compute is not None:
            return compute(self.weight)
        return multiply(x, self.weight, self.bias, self.product)
