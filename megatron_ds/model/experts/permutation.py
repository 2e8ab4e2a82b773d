"""The order of assignments by expert, the rows in it, and the sums of the experts' outputs.

Nothing is accumulated: every row of an output or a gradient is read from where the order or its
inverse says. A CPU gathers and sums rows in one pass; a compiler, and a device without one, are
given a gather and a sum.

Shapes: T tokens, H hidden, E experts, K experts per token, A = T x K assignments of a token to an
expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.model.experts.exchange import expert_keys
from megatron_ds.model.experts.router import count_assignments
from megatron_ds.parallel.mesh import Group


def sort_assignments(
    experts_A: Tensor, experts: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort assignments by expert, as `Exchange` needs them; those without an expert are the last.

    Args:
        experts_A: Experts by number; `experts` is none.
        experts: Number of experts.
        group: Expert-parallel group.

    Returns:
        The assignments in their order, [A], the place of each in it, [A], and the number of each
        expert, [E].
    """
    order_A = expert_keys(experts_A, experts, group).argsort(stable=True)
    counts_E = count_assignments(experts_A, experts + 1)[:-1]
    return order_A, inverse_of(order_A), counts_E


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def sum_rows(rows: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over k of rows[index[t, k]], or of weights[t, k] x rows[index[t, k]]: [T, H].

    Args:
        rows: The rows, [A, H].
        index: Which of them are summed, [T, K].
        weights: Their factors, [T, K], in the type of the rows. None: 1.
    """
    if is_host(rows.device.type) and not torch.compiler.is_compiling():
        return F.embedding_bag(index, rows, mode="sum", per_sample_weights=weights)
    gathered = rows.index_select(0, index.flatten()).view(*index.shape, -1)
    return (gathered if weights is None else gathered * weights.unsqueeze(-1)).sum(1)


def permute(x_TH: Tensor, order_A: Tensor, place_A: Tensor, topk: int) -> Tensor:
    """The token of each assignment, in the order of the assignments: [A, H]."""
    x_AH: Tensor = _Permuted.apply(x_TH, order_A, place_A, topk)
    return x_AH


class _Permuted(torch.autograd.Function):
    """x[order // copies], for an order of `copies` of each row.

    The gradient's rows are gathered by the inverse order, and summed over the copies; the gradient
    of an index is accumulated row by row, for which devices sort the index.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return sum_rows(gradient, inverse.view(-1, ctx.copies)), None, None, None


def combine(
    y_AH: Tensor,
    weights_TK: Tensor,
    order_A: Tensor,
    place_A: Tensor,
    accepted_A: Tensor | None,
) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    Args:
        y_AH: Outputs in the order of the assignments.
        weights_TK: Their weights, rounded to the type of the outputs.
        order_A: The assignments in their order.
        place_A: The place of each assignment in it.
        accepted_A: Whether an expert accepts an assignment; else its weight is 0. None: all are
            accepted.
    """
    weights_TK = weights_TK.to(y_AH.dtype)
    if accepted_A is not None:
        weights_TK = weights_TK.where(accepted_A.view_as(weights_TK), 0)
    out_TH: Tensor = _Combined.apply(y_AH, weights_TK, order_A, place_A)
    return out_TH


class _Combined(torch.autograd.Function):
    """The sum over k of weights[t, k] x y[inverse[t x K + k]].

    The gradient of a row, and of its weight, is read from its token's.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order, inverse)
        return sum_rows(y, inverse.view_as(weights), weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, order, inverse = ctx.saved_tensors
        rows = gradient.index_select(0, order // weights.shape[1])
        dweights = (y * rows).sum(-1).index_select(0, inverse).view_as(weights)
        dy = rows.mul_(weights.flatten().index_select(0, order).unsqueeze(1))
        return dy, dweights, None, None
