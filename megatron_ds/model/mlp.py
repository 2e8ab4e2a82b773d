"""The feed-forward layer, plain or gated, with its width sharded over the tensor-parallel group."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ds.config import ModelConfig
from megatron_ds.model.declaration.parts import FeedForwardSpec
from megatron_ds.model.kernels.elementwise import EAGER
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.chunks import num_tiles
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group


class MLP(nn.Module):
    """The feed-forward layer: [S, B, H] to [S, B, H].

    fc_out(act(fc_in(x))), or gated fc_out(act(gate) * up) with [gate; up] = fc_in(x).

    Args:
        config: Architecture.
        layer: Number of the layer, from 0.
        group: Tensor-parallel group.
        init: Draws the initial weights.
        spec: Declaration of its weights. None: a dense layer.
        part: Canonical name below the layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        group: Group,
        init: Initializer,
        spec: FeedForwardSpec | None = None,
        part: str = "mlp",
    ) -> None:
        super().__init__()
        self.activation = config.activation_arguments
        self.elementwise = EAGER
        spec = spec or FeedForwardSpec(config)
        name = f"layers.{layer}.{part}"
        self.fc_in = ColumnParallelLinear(*spec.layer(name, "fc_in"), group=group, init=init)
        self.fc_out = RowParallelLinear(*spec.layer(name, "fc_out"), group=group, init=init)

    def forward(self, x_SBH: Tensor) -> Tensor:
        inner = self.elementwise.activate(self.fc_in(x_SBH), *self.activation)
        out_SBH: Tensor = self.fc_out(inner)
        return out_SBH


class TiledMLP(MLP):
    """The feed-forward layer, computed in tiles of the sequence (Bekman et al. 2025, ALST).

    The backward pass computes each tile's inner activations again when it needs them, so that only
    one tile's exist at a time. The tiles' gradients of a weight are summed inside the graph: its
    hooks run once. A tile has as many tokens as the stream has features, and at most half of them.
    """

    def forward(self, x_SBH: Tensor) -> Tensor:
        length, batch, hidden = x_SBH.shape
        tiles = min(length, num_tiles(length * batch, hidden))
        parts = [self._tile(part) for part in x_SBH.split(-(-length // tiles))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tile(self, x_SBH: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x_SBH)
        # There is no dropout inside, hence no random state.
        part: Tensor = checkpoint(
            super().forward, x_SBH, use_reentrant=False, preserve_rng_state=False
        )
        return part
