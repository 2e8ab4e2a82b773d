"""Mixture of experts: a router, and feed-forward networks of which each token uses a few.

The experts are distributed over the expert-parallel ranks, to which their tokens are sent by
all-to-all, and from which the outputs come back in the same way. The width of each expert is
sharded over the tensor-parallel group, whose ranks all route the same tokens: those of the complete
sequence, also with sequence parallelism. Sequence-parallel ranks of DeepSpeed-Ulysses route the
tokens of their slices; the load and the capacity are those of all slices.

Shapes: S sequence, B micro-batch, H hidden, T = S x B tokens, E experts, e experts of this rank,
K experts per token, A assignments of a token to an expert, at most T x K, R rows that this rank's
experts receive.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.model.elementwise import EAGER
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
from megatron_ds.parallel.sharding import GATE_UP, ShardSpec, mark_experts, sharded_parameter


class Routing(NamedTuple):
    """Which experts the tokens of a micro-batch use."""

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
        name = f"layers.{layer}.mlp"
        self.router = Router(config, moe, mesh.sp, init, f"{name}.router")
        self.experts = Experts(config, moe.experts, mesh, init=init, name=f"{name}.experts")

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
        y_AH = self._run_experts(x_TH[order_A // self.moe.moe_router_topk], counts_E)
        total = routing.experts_TK.numel()
        # Where an expert has dropped a token, its output is zero.
        y_TKH = y_AH.new_zeros(total, x_TH.shape[1]).index_put((order_A,), y_AH)
        y_TKH = y_TKH.view(*routing.experts_TK.shape, -1)
        out_TH = (y_TKH * routing.weights_TK.to(y_TKH.dtype).unsqueeze(-1)).sum(1)
        self._record(routing, dropped=1.0 - len(order_A) / total)
        loss = self.moe.aux_loss_coeff * routing.aux_loss
        loss = loss + self.moe.moe_z_loss_coeff * routing.z_loss
        return self.log.add_gradient(out_TH, loss).view(x_SBH.shape)

    def _capacity(self, tokens: int) -> int | None:
        """Tokens that an expert accepts of a micro-batch; None: all."""
        factor = self.moe.capacity_factor(training=self.training)
        if factor is None:
            return None
        equal = tokens * self.moe.moe_router_topk / self.moe.experts
        return max(self.moe.moe_min_capacity, math.ceil(factor * equal))

    def _run_experts(self, x_AH: Tensor, counts_E: Tensor) -> Tensor:
        """The outputs for rows that are in the order of their experts."""
        ep_size = self.ep_group.size
        if ep_size == 1:
            y_AH: Tensor = self.experts(x_AH, counts_E.tolist())
            return y_AH
        to_ranks = counts_E.view(ep_size, -1)
        from_ranks = torch.empty_like(to_ranks)
        dist.all_to_all_single(from_ranks, to_ranks, group=self.ep_group.handle)
        # The one wait for the device.
        sent, received = torch.stack([to_ranks, from_ranks]).tolist()
        send, receive = ([sum(counts) for counts in each] for each in (sent, received))
        rows_RH = all_to_all(x_AH, send, receive, self.ep_group)
        # The rows are in the order of the ranks that sent them, each rank's by expert.
        numbers = torch.arange(to_ranks.shape[1], device=x_AH.device).repeat(ep_size)
        expert_R = numbers.repeat_interleave(from_ranks.flatten(), output_size=len(rows_RH))
        by_expert_R = expert_R.argsort(stable=True)
        counts = [sum(column) for column in zip(*received, strict=True)]
        y_RH = self.experts(rows_RH[by_expert_R], counts)[by_expert_R.argsort()]
        return all_to_all(y_RH, receive, send, self.ep_group)

    def _record(self, routing: Routing, dropped: float) -> None:
        load_E = routing.load_E
        self.log.record(
            {
                "load_balancing_loss": routing.aux_loss,
                "z_loss": routing.z_loss,
                "dropped": load_E.new_full((), dropped),
                "load": load_E,
                "largest": load_E.max(),
            }
        )


class Router(nn.Module):
    """Selects K experts for each token, by fp32 logits.

    Args:
        config: Architecture.
        moe: How experts are selected and weighed.
        sp_group: Group whose ranks have slices of the same sequences.
        init: Draws the initial weight.
        name: Canonical name.
    """

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, sp_group: Group, init: Initializer, name: str
    ) -> None:
        super().__init__()
        self.moe, self.sp_group = moe, sp_group
        shape = (moe.experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape))
        draw = init.normal(f"{name}.weight", config.init_method_std)
        with torch.no_grad():
            self.weight.copy_(draw(shape, 0, [range(moe.experts)]))

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


def count_assignments(experts: Tensor, size: int) -> Tensor:
    """Number of assignments of each of `size` experts; `bincount` would wait for the device."""
    return experts.new_zeros(size).scatter_add_(0, experts, torch.ones_like(experts))


def sort_assignments(
    routing: Routing, capacity: int | None, moe: MoEConfig, sp_group: Group
) -> tuple[Tensor, Tensor]:
    """Sort the assignments by expert, and drop those that exceed an expert's capacity.

    Args:
        routing: Selected experts.
        capacity: Tokens that an expert accepts of all slices. None: all.
        moe: Which tokens an expert keeps.
        sp_group: Group whose ranks have slices of the same sequences.

    Returns:
        Positions in [T x K] of the assignments that remain, [A], and their number for each expert,
        [E].
    """
    experts = routing.experts_TK.flatten()
    order = experts.argsort(stable=True)
    if capacity is not None:
        is_kept = _within_capacity(routing, capacity, moe, sp_group)
        order = order[is_kept[order]]
    return order, count_assignments(experts[order], moe.experts)


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
    place = torch.arange(len(order), device=order.device) - starts_E[experts[order]]
    is_kept = torch.empty_like(place, dtype=torch.bool)
    is_kept[order] = place < capacity
    return is_kept.view(sp_group.size, -1)[sp_group.rank]


class Experts(nn.Module):
    """The experts of this rank: feed-forward layers whose weights are stacked along dimension 0.

    Args:
        config: Architecture.
        num_experts: Experts of all ranks.
        mesh: Process groups; each expert-parallel rank has consecutive experts.
        init: Draws the initial weights, each expert's by its number.
        name: Canonical name.
    """

    def __init__(
        self, config: ModelConfig, num_experts: int, mesh: Mesh, *, init: Initializer, name: str
    ) -> None:
        super().__init__()
        self.group = group = mesh.tp
        self.activation, self.gelu_kind = config.activation, config.gelu_kind
        hidden, width, std = config.hidden_size, config.mlp_hidden_size, config.init_method_std
        local = num_experts // mesh.ep.size
        local_experts = range(mesh.ep.rank * local, (mesh.ep.rank + 1) * local)

        def stack(layer: str, shape: tuple[int, int], spec: ShardSpec, std: float) -> nn.Parameter:
            # Without the experts' dimension, in which the weights are drawn.
            dim = spec.dim - 1
            part = spec.ranges(group.rank, group.size)
            weights = [
                init.normal(f"{name}.{expert}.{layer}.weight", std)(shape, dim, part)
                for expert in local_experts
            ]
            return sharded_parameter(torch.stack(weights), spec)

        # Gate and up are sections of one matrix, so that each rank has its slice of both.
        parts = GATE_UP if config.is_gated else ()
        rows = ShardSpec(1, (width,) * max(1, len(parts)), parts)
        columns, size_in = ShardSpec(2, (width,)), sum(rows.sections)
        bias_in = bias_out = None
        if config.add_bias_linear:
            bias_in = sharded_parameter(torch.zeros(local, size_in // group.size), rows)
            bias_out = nn.Parameter(torch.zeros(local, hidden))
        out_std = std / (2.0 * config.num_layers) ** 0.5
        self.fc_in = _StackedLinear(stack("fc_in", (size_in, hidden), rows, std), bias_in)
        self.fc_out = _StackedLinear(
            stack("fc_out", (hidden, width), columns, out_std), bias_out, reduce_over=group
        )
        for parameter in self.parameters():
            mark_experts(parameter, mesh.ep.size)

    def forward(self, x_RH: Tensor, counts: list[int]) -> Tensor:
        """The experts' outputs for rows that are in the order of the experts.

        Args:
            x_RH: The rows, the same on all tensor-parallel ranks.
            counts: Number of rows of each expert.
        """
        inner = self.fc_in(copy_to_group(x_RH, self.group), counts)
        y_RH: Tensor = self.fc_out(EAGER.activate(inner, self.activation, self.gelu_kind), counts)
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
        self, weight: nn.Parameter, bias: nn.Parameter | None, reduce_over: Group | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.reduce_over = weight, bias, reduce_over

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        y: Tensor = _StackedProduct.apply(x, self.weight, counts)
        if self.reduce_over is not None:
            y = reduce_from_group_(y, self.reduce_over)
        if self.bias is None:
            return y
        # `unbind` sums the gradients once; indexing would make a full gradient for each expert.
        # An expert without rows takes part, so that its gradient is zero and not missing.
        outputs = zip(y.split(counts), self.bias.unbind(0), strict=True)
        return torch.cat([rows + bias for rows, bias in outputs])


class _StackedProduct(torch.autograd.Function):
    """x W^T of each expert's rows.

    The backward pass reads the parameter itself. Saved views of it would keep what ZeRO 3 has
    gathered for the forward pass, or name a buffer into which other weights are swapped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return torch.cat([F.linear(*each) for each in zip(x.split(counts), weight, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradients, inputs = gradient.split(ctx.counts), x.split(ctx.counts)
        dx = torch.cat([dy @ each for dy, each in zip(gradients, weight, strict=True)])
        dw = torch.stack([dy.t() @ rows for dy, rows in zip(gradients, inputs, strict=True)])
        return dx, dw, None
