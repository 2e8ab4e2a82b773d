"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3).

Column: the output features are cut, the input is whole. Row: the input features are cut, the output
is whole. One after the other they need one sum over the group in each direction. The group is an
argument; how initial values are drawn is the caller's affair: `init` maps the full shape to the
full matrix, so that any cut has the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ds.parallel.collectives import copy_to_group, reduce_from_group
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import ShardSpec, sharded_parameter

Init = Callable[[tuple[int, ...]], torch.Tensor]
"""Full shape to full fp32 tensor of initial values."""


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W cut over the group: [..., in] -> [..., sum(sections) /
    size].
    """

    def __init__(
        self,
        in_features: int,
        sections: tuple[int, ...],
        *,
        bias: bool,
        group: Group,
        init: Init,
    ) -> None:
        """sections: sizes of the fused parts of the output, e.g. (q, k, v); each is cut evenly."""
        super().__init__()
        self.group = group
        spec, out_features = ShardSpec(0, sections), sum(sections)
        full = init((out_features, in_features))
        self.weight = sharded_parameter(full, spec, group.rank, group.size)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = sharded_parameter(torch.zeros(out_features), spec, group.rank, group.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(copy_to_group(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W cut over the group: [..., in / size] -> [..., out]; the
    bias is whole.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, group: Group, init: Init
    ) -> None:
        super().__init__()
        self.group = group
        full = init((out_features, in_features))
        self.weight = sharded_parameter(full, ShardSpec(1, (in_features,)), group.rank, group.size)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = reduce_from_group(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias
