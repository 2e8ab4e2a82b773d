"""The feed-forward layer, plain or gated, with its width sharded over the tensor-parallel group."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.elementwise import EAGER
from megatron_ds.model.weight_init import Initializer
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
    """

    def __init__(self, config: ModelConfig, layer: int, *, group: Group, init: Initializer) -> None:
        super().__init__()
        self.activation = config.activation
        self.gelu_kind = config.gelu_kind
        self.elementwise = EAGER
        name, std = f"layers.{layer}.mlp", config.init_method_std
        self.fc_in = ColumnParallelLinear(
            config.hidden_size,
            # Gate and up are sections of one matrix, so that each rank has its slice of both.
            (config.mlp_hidden_size,) * (2 if config.is_gated else 1),
            bias=config.add_bias_linear,
            group=group,
            init=init.normal(f"{name}.fc_in.weight", std),
        )
        self.fc_out = RowParallelLinear(
            config.mlp_hidden_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            group=group,
            init=init.normal(f"{name}.fc_out.weight", std / (2.0 * config.num_layers) ** 0.5),
        )

    def forward(self, x_SBH: Tensor) -> Tensor:
        inner = self.elementwise.activate(self.fc_in(x_SBH), self.activation, self.gelu_kind)
        out_SBH: Tensor = self.fc_out(inner)
        return out_SBH
