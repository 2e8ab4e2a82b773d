"""Mixture of experts: a router, and feed-forward networks; each token uses a few.

The experts are distributed over the expert-parallel ranks, to which their tokens are sent by
all-to-all, and from which the outputs come back in the same way. The width of each expert is
sharded over the tensor-parallel group, whose ranks all route the tokens of the complete sequence,
also with sequence parallelism. Sequence-parallel ranks of DeepSpeed-Ulysses route the tokens of
their slices; the load and the capacity count all slices.

Shapes: S sequence, B micro-batch, H hidden, T = S x B tokens, E experts, e experts of this rank,
K experts per token, A assignments of a token to an expert, at most T x K, R rows that this rank's
experts receive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import Problem
from megatron_ds.model.kernels.elementwise import EAGER, TOLERANCE
from megatron_ds.model.spec.parts import ExpertsSpec
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.collectives import (
    all_gather,
    all_to_all,
    copy_to_group,
    gather_slices,
    reduce_from_group_,
    take_slice,
)
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.router_log import RouterLog
from megatron_ds.parallel.sharding import StatefulModule, declared_parameter
from megatron_ds.parallel.weights import Weight


class Routing(NamedTuple):
    """Assignment of the tokens of a micro-batch to experts."""

    experts_TK: Tensor
    weights_TK: Tensor
    """Factors of the experts' outputs, in fp32."""
    load_E: Tensor
    """Fraction of the assignments of all slices of the sequences."""
    aux_loss: Tensor
    """E x the sum over experts of load and mean probability; 1 if both are uniform (Fedus et al.
    2021, equation 4). The mean over slices is the loss of the sequences."""
    z_loss: Tensor
    """Mean square of the logarithm of the softmax's denominator (Zoph et al. 2022, equation 5)."""


def logged_shapes(moe: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of what a layer records in its `RouterLog`; empty for a dense model."""
    scalars = dict.fromkeys(("load_balancing_loss", "z_loss", "dropped", "largest"), ())
    return {**scalars, "load": (moe.experts,)} if moe.is_used else {}


class MoE(nn.Module):
    """The feed-forward layer as a mixture of experts: [S, B, H] to [S, B, H].

    With sequence parallelism, [S / TP, B, H] to [S / TP, B, H].

    Args:
        config: Architecture; each expert is a feed-forward layer of it.
        moe: Number of experts, and how tokens are assigned to them.
        layer: Number of the layer, from 0.
        mesh: Process groups.
        init: Draws the initial weights.
        log: Receives the router's losses and loads.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        layer: int,
        mesh: Mesh,
        *,
        init: Initializer,
        log: RouterLog,
    ) -> None:
        super().__init__()
        self.moe, self.log = moe, log
        self.group, self.sp_group, self.ep_group = mesh.tp, mesh.sp, mesh.ep
        spec, name = ExpertsSpec(config, moe), f"layers.{layer}.mlp"
        weights = spec.named(name)
        self.router = Router(weights["router.weight"], moe, mesh, init)
        self.router.declare_states(weights.values())
        self.experts = Experts(spec, name, mesh, init)

    def forward(self, x_SBH: Tensor) -> Tensor:
        if not self.group.sequence_parallel:
            return self._mix(x_SBH)
        # All ranks route all tokens, so that their gradients are already the complete ones.
        return take_slice(self._mix(gather_slices(x_SBH, self.group)), self.group)

    def _mix(self, x_SBH: Tensor) -> Tensor:
        x_TH = x_SBH.flatten(0, 1)
        routing: Routing = self.router(x_TH)
        capacity = self._capacity(len(x_TH) * self.sp_group.size)
        order_A, counts_E = sort_assignments(routing, capacity, self.moe, self.sp_group)
        place_A = inverse_of(order_A)
        x_AH = _Reordered.apply(x_TH, order_A, place_A, self.moe.moe_router_topk)
        y_AH = self._run_experts(x_AH, counts_E)
        y_TKH = _Reordered.apply(y_AH, place_A, order_A).view(*routing.experts_TK.shape, -1)
        weights_TK = routing.weights_TK.to(y_TKH.dtype)
        if capacity is not None:
            is_kept = place_A < counts_E.sum()
            weights_TK = weights_TK.where(is_kept.view_as(weights_TK), 0)
        out_TH = (y_TKH * weights_TK.unsqueeze(-1)).sum(1)
        losses = {"load_balancing_loss": routing.aux_loss, "z_loss": routing.z_loss}
        loads = {"load": routing.load_E, "largest": routing.load_E.max()}
        self.log.record({**losses, "dropped": 1.0 - counts_E.sum() / len(order_A), **loads})
        loss = self.moe.aux_loss_coeff * routing.aux_loss
        loss = loss + self.moe.moe_z_loss_coeff * routing.z_loss
        return self.log.add_gradient(out_TH, loss).view(x_SBH.shape)

    def _capacity(self, tokens: int) -> int | None:
        """Tokens that an expert accepts of a micro-batch; None: all."""
        factor = self.moe.capacity_factor(training=self.training)
        if factor is None or self.log.keeps_all_tokens:
            return None
        equal = tokens * self.moe.moe_router_topk / self.moe.experts
        return max(self.moe.moe_min_capacity, math.ceil(factor * equal))

    def _run_experts(self, x_AH: Tensor, counts_E: Tensor) -> Tensor:
        """The outputs for rows that are in the order of their experts, then those without one.

        Rows without an expert are not sent; their outputs are any expert's, or zero.
        """
        ep_size = self.ep_group.size
        if ep_size == 1:
            y_AH: Tensor = self.experts(x_AH, counts_E)
            return y_AH
        to_ranks = counts_E.view(ep_size, -1)
        from_ranks = torch.empty_like(to_ranks)
        dist.all_to_all_single(from_ranks, to_ranks, group=self.ep_group.handle)
        # The one wait for the device.
        send, receive = torch.stack([to_ranks, from_ranks]).sum(-1).tolist()
        rows_RH = all_to_all(x_AH[: sum(send)], send, receive, self.ep_group)
        # The rows are in the order of the ranks that sent them, each rank's by expert.
        numbers = torch.arange(to_ranks.shape[1], device=x_AH.device).repeat(ep_size)
        expert_R = numbers.repeat_interleave(from_ranks.flatten(), output_size=len(rows_RH))
        order_R = expert_R.argsort(stable=True)
        place_R = inverse_of(order_R)
        y_RH = self.experts(_Reordered.apply(rows_RH, order_R, place_R), from_ranks.sum(0))
        y_AH = all_to_all(_Reordered.apply(y_RH, place_R, order_R), receive, send, self.ep_group)
        return F.pad(y_AH, (0, 0, 0, len(x_AH) - len(y_AH)))


class Router(StatefulModule):
    """Selects K experts for each token, by fp32 logits.

    Args:
        weight: Matrix [experts, hidden].
        moe: How experts are selected and weighed.
        mesh: Process groups.
        init: Draws the initial weight.
    """

    def __init__(self, weight: Weight, moe: MoEConfig, mesh: Mesh, init: Initializer) -> None:
        super().__init__()
        self.moe, self.sp_group = moe, mesh.sp
        self.weight = declared_parameter(weight, mesh.tp, init)

    def forward(self, x_TH: Tensor) -> Routing:
        size, num_selected = self.moe.experts, self.moe.moe_router_topk
        logits_TE = F.linear(x_TH.float(), self.weight.float())
        probabilities_TE = logits_TE.softmax(-1)
        if self.moe.is_pre_softmax:
            weights_TK, experts_TK = probabilities_TE.topk(num_selected)
        else:
            selected_TK, experts_TK = logits_TE.topk(num_selected)
            weights_TK = selected_TK.softmax(-1)
        counts_E = count_assignments(experts_TK.flatten(), size)
        if self.sp_group.size > 1:
            dist.all_reduce(counts_E, group=self.sp_group.handle)
        load_E = counts_E / (experts_TK.numel() * self.sp_group.size)
        return Routing(
            experts_TK,
            weights_TK,
            load_E,
            aux_loss=size * (load_E * probabilities_TE.mean(0)).sum(),
            z_loss=logits_TE.logsumexp(-1).square().mean(),
        )


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Reordered(torch.autograd.Function):
    """x[order // copies], for an order of `copies` of each row.

    The gradient's rows are gathered by the inverse order, and summed over the copies; the gradient
    of an index is accumulated row by row, for which devices sort the index.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies] if copies > 1 else x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradient[inverse]
        return rows.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def count_assignments(experts: Tensor, size: int) -> Tensor:
    """Number of assignments of each of `size` experts; `bincount` would wait for the device."""
    return experts.new_zeros(size).scatter_add_(0, experts, torch.ones_like(experts))


def sort_assignments(
    routing: Routing, capacity: int | None, moe: MoEConfig, sp_group: Group
) -> tuple[Tensor, Tensor]:
    """Sort the assignments by expert; those that exceed an expert's capacity are the last.

    Args:
        routing: Selected experts.
        capacity: Tokens that an expert accepts of all slices. None: all.
        moe: Which tokens an expert keeps.
        sp_group: Group whose ranks have slices of the same sequences.

    Returns:
        Positions in [T x K] of the assignments, [A], and the number that each expert accepts, [E].
    """
    experts = routing.experts_TK.flatten()
    if capacity is not None:
        is_kept = _within_capacity(routing, capacity, moe, sp_group)
        experts = experts.where(is_kept, moe.experts)
    return experts.argsort(stable=True), count_assignments(experts, moe.experts + 1)[:-1]


def _within_capacity(routing: Routing, capacity: int, moe: MoEConfig, sp_group: Group) -> Tensor:
    """Whether the experts accept each of this rank's assignments, [T x K]."""
    experts = all_gather(routing.experts_TK, sp_group).flatten()
    if moe.moe_token_drop_policy == "probs":
        weights = all_gather(routing.weights_TK.detach(), sp_group).flatten()
        order = weights.argsort(descending=True, stable=True)
        order = order[experts[order].argsort(stable=True)]
    else:
        order = experts.argsort(stable=True)
    counts_E = count_assignments(experts, moe.experts)
    starts_E = counts_E.cumsum(0) - counts_E
    position = torch.arange(len(order), device=order.device) - starts_E[experts[order]]
    is_kept = torch.empty_like(position, dtype=torch.bool)
    is_kept[order] = position < capacity
    return is_kept.view(sp_group.size, -1)[sp_group.rank]


class Experts(nn.Module):
    """The experts of this rank: feed-forward layers whose weights are stacked along dimension 0.

    Args:
        spec: Their weights.
        prefix: Canonical name of the mixture of experts.
        mesh: Process groups; each expert-parallel rank has consecutive experts.
        init: Draws the initial weights, each expert's by its number.
    """

    def __init__(self, spec: ExpertsSpec, prefix: str, mesh: Mesh, init: Initializer) -> None:
        super().__init__()
        self.group = mesh.tp
        self.activation = spec.model.activation_arguments
        self.elementwise = EAGER

        def layer(name: str, reduce_over: Group | None = None) -> _StackedLinear:
            weights = spec.layer(prefix, f"experts.{name}")
            parts = [declared_parameter(weight, mesh.tp, init, mesh.ep) for weight in weights]
            return _StackedLinear(*parts, reduce_over=reduce_over)

        self.fc_in, self.fc_out = layer("fc_in"), layer("fc_out", reduce_over=mesh.tp)

    def forward(self, x_RH: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for rows that are in the order of the experts.

        Args:
            x_RH: The rows, the same on all tensor-parallel ranks.
            counts: Number of rows of each expert, [e]. The last one has all further rows, too.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        ends[-1] = len(x_RH)
        inner = self.fc_in(copy_to_group(x_RH, self.group), ends)
        inner = self.elementwise.activate(inner, *self.activation)
        y_RH: Tensor = self.fc_out(inner, ends)
        return y_RH


class _StackedLinear(nn.Module):
    """x W^T + b with a weight [e, out, in] and a bias [e, out] for each expert.

    Args:
        weight: Marked as it is sharded.
        bias: Marked as it is sharded.
        reduce_over: Sum the products over this group, before the bias is added. The outputs are
            then complete before they are weighed, and so is the gradient of the weights' router.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        reduce_over: Group | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.reduce_over = weight, bias, reduce_over
        self.shape = weight.shape
        self.multiply: Product = grouped_product

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = _StackedProduct.apply(x, self.weight, self.bias, ends, self)
        return y


Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A product for each group of rows, which end at `ends`: [R, in] and [e, in, out] to [R, out], or
[out, R] and [R, in] to [e, out, in]."""


def loop_over_products(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """One product after the other, for whose sizes the host waits."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if b.ndim == 3:
        return torch.cat([rows @ matrix for rows, matrix in zip(a.split(counts), b, strict=True)])
    pairs = zip(a.split(counts, dim=1), b.split(counts), strict=True)
    return torch.stack([columns @ rows for columns, rows in pairs])


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """All products by one call, if there are rows; torch before 2.10 has none."""
    if 0 in a.shape or not hasattr(F, "grouped_mm"):
        return loop_over_products(a, b, ends)
    return F.grouped_mm(a, b, offs=ends)


class _StackedProduct(torch.autograd.Function):
    """x W^T + b of each expert's rows, which end at `ends`.

    The backward pass reads the parameter itself. Saved views of it would keep what ZeRO 3 has
    gathered for the forward pass, or name a buffer into which other weights are swapped. An expert
    without rows has a gradient of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Tensor,
        layer: _StackedLinear,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.multiply, ctx.has_bias = layer.multiply, bias is not None
        y = layer.multiply(x, weight.mT, ends)
        if layer.reduce_over is not None:
            y = reduce_from_group_(y, layer.reduce_over)
        if bias is not None:
            rows = torch.arange(len(y), dtype=ends.dtype, device=ends.device)
            y += bias[torch.searchsorted(ends, rows, right=True)]
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        dx, dw = ctx.multiply(gradient, weight, ends), ctx.multiply(gradient.t(), x, ends)
        # A product, whose sums have a fixed order; kernels need rows of 16 bytes.
        ones = gradient.new_ones(len(gradient), 8)
        db = ctx.multiply(gradient.t(), ones, ends)[..., 0] if ctx.has_bias else None
        return dx, dw, db, None, None


def try_grouped_products(
    model: nn.Module, dtype: torch.dtype, device: torch.device
) -> Problem | None:
    """Let experts multiply one after the other on an accelerator without a kernel for all of them.

    It is tried, forward and backward, on the shapes of the experts, where one has no rows.

    Returns:
        Why the kernel is not used, if there are experts that would use it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _StackedLinear)]
    if is_host(device.type) or not layers:
        return None
    try:
        errors = [_product_error(shape, dtype, device) for shape in {x.shape for x in layers}]
        if all(error <= TOLERANCE for error in errors):  # not if one is nan
            return None
        reason = f"its relative error is {max(errors):.2g}"
    except Exception as refusal:  # devices raise any type
        reason = str(refusal).strip().partition("\n")[0] or type(refusal).__name__
    for layer in layers:
        layer.multiply = loop_over_products
    return Problem("experts-one-after-another", reason=reason)


def _product_error(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> float:
    """The largest error of outputs and gradients, relative to the norm."""
    ends = torch.arange(1, shape[0] + 1, dtype=torch.int32, device=device) * 33
    ends[:2] = ends[:2].max()
    generator = torch.Generator(device).manual_seed(0)
    rows = 33 * shape[0]
    x, weight, bias, gradient = (
        torch.randn(size, generator=generator, device=device, dtype=dtype).requires_grad_()
        for size in ((rows, shape[2]), shape, shape[:2], (rows, shape[1]))
    )
    layer, results = _StackedLinear(nn.Parameter(weight), nn.Parameter(bias)), []
    for layer.multiply in (grouped_product, loop_over_products):
        y = layer(x, ends)
        results.append([y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), gradient)])
    pairs = zip(*results, strict=True)
    return float(torch.stack([(one - other).norm() / other.norm() for one, other in pairs]).max())
