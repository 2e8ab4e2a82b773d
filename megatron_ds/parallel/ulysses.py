"""DeepSpeed-Ulysses sequence parallelism (Jacobs et al. 2023).

Each rank of a sequence-parallel group has a slice of every sequence. Attention needs the complete
sequence, so around it the ranks exchange slices of all heads for all slices of some heads, in two
all-to-all calls. Everything else is computed for the slice alone.

Shapes: B micro-batch, S sequence, p size of the group, s = S / p, n query heads before the
exchange, k key-value heads, h heads after it, D head size, which may differ between keys and
values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ds.parallel.collectives import all_to_all, in_graph, sum_over_group
from megatron_ds.parallel.mesh import Group


def local_slice(length: int, group: Group) -> slice:
    """The part of a dimension of `length` elements that this rank has."""
    assert length % group.size == 0, f"{length} is not divisible by {group.size}"
    size = length // group.size
    return slice(group.rank * size, (group.rank + 1) * size)


def _times_size(x: Tensor, group: Group) -> Tensor:
    return x * group.size


sum_of_slices = in_graph(sum_over_group, _times_size)
"""Sum over the group; every rank then computes the same loss.

The engine averages gradients over these ranks too, but the gradient of the sum is the sum of the
ranks' gradients. So the backward pass multiplies by the size of the group."""


def gather_sequence(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
    """Exchange a slice of the sequence for some of the heads, in one all-to-all.

    A key-value head that several ranks need is sent to each of them.

    Args:
        q: Queries [B, n, s, D].
        k: Keys [B, k, s, D]; p divides k, or k divides p.
        v: Values [B, k, s, D].
        group: Sequence-parallel group.

    Returns:
        Queries [B, n / p, S, D], keys and values [B, max(k / p, 1), S, D].
    """
    if group.size == 1:
        return q, k, v
    parts = [_by_destination(x, group.size) for x in (q, k, v)]
    received = _exchange(torch.cat(parts, dim=3), group).flatten(0, 1)
    heads_SBC = received.split([part.shape[3] for part in parts], dim=2)
    pairs = zip(heads_SBC, (q, k, v), strict=True)
    return tuple(x.unflatten(2, (-1, sent.shape[3])).permute(1, 2, 0, 3) for x, sent in pairs)


def gather_heads(x: Tensor, group: Group) -> Tensor:
    """Exchange some of the heads for a slice of the sequence: [B, n / p, S, D] to [B, n, s, D]."""
    if group.size == 1:
        return x
    x_psBhD = x.permute(2, 0, 1, 3).unflatten(0, (group.size, -1))
    received = _exchange(x_psBhD, group)  # dimension 0: ranks by their heads
    x_sBnD = received.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return x_sBnD.permute(1, 2, 0, 3)


def _by_destination(x_BnsD: Tensor, size: int) -> Tensor:
    """[B, n, s, D] to [p, s, B, heads per rank x D]."""
    if x_BnsD.shape[1] < size:
        x_BnsD = x_BnsD.repeat_interleave(size // x_BnsD.shape[1], dim=1)
    x_sBpC: Tensor = x_BnsD.permute(2, 0, 1, 3).flatten(2).unflatten(2, (size, -1))  # type: ignore[no-untyped-call]
    return x_sBpC.permute(2, 0, 1, 3)


def _exchange(x: Tensor, group: Group) -> Tensor:
    """Sends x[i] to rank i and receives its own index of every rank's, in rank order."""
    sizes = [1] * group.size
    return all_to_all(x, sizes, sizes, group)
