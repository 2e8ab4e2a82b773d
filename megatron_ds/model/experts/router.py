"""The router of a mixture of experts: the experts of each token, and their weights.

Shapes: T tokens, H hidden, E experts, K experts per token, A assignments of a token to an expert,
at most T x K, G sequences whose loads are balanced, or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config import MoEConfig
from megatron_ds.model.experts.router_log import RouterLog
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.collectives import all_gather
from megatron_ds.parallel.context.slices import in_rank_order, in_sequence_order
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.sharding import StatefulModule, declared_parameter
from megatron_ds.parallel.weights import Weight

SMALLEST_SUM = 1e-20
"""Added to sums of sigmoid scores against division by 0, as in Megatron and DeepSeek-V3."""


class Routing(NamedTuple):
    """Assignment of the tokens of a micro-batch to experts."""

    experts_TK: Tensor
    weights_TK: Tensor
    """Factors of the experts' outputs, in the router's data type."""
    load_E: Tensor
    """Fraction of the assignments of all slices of the sequences."""
    aux_loss: Tensor
    """E x the sum over experts of load and mean probability; 1 if both are uniform (Fedus et al.
    2021, equation 4). The mean over slices is the loss of the sequences."""
    z_loss: Tensor
    """Mean square of the logarithm of the softmax's denominator (Zoph et al. 2022, equation 5)."""


class Router(StatefulModule):
    """Selects K experts for each token.

    Args:
        weight: Matrix [experts, hidden].
        bias: Added to the logits. None: nothing is.
        moe: Options of the selection and weights of experts.
        mesh: Process groups.
        init: Draws the initial weight.
        log: Knows the loads of the step's earlier micro-batches.

    Attributes:
        expert_bias: Added to the scores by which experts are selected. None: nothing is.
        assigned_E: Assignments of this rank's tokens since the last update of the bias, if there is
            one.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None,
        moe: MoEConfig,
        mesh: Mesh,
        *,
        init: Initializer,
        log: RouterLog,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.log = log
        self.sequence_group = mesh.sequence
        self.replica_group = mesh.replicas
        self.weight = declared_parameter(weight, mesh.tp, init)
        self.bias = None if bias is None else declared_parameter(bias, mesh.tp, init)
        self.dtype = torch.float64 if moe.moe_router_dtype == "fp64" else torch.float32
        self.is_sigmoid = moe.moe_router_score_function == "sigmoid"
        balancing = moe.moe_router_load_balancing_type
        self.is_by_sequence = balancing == "seq_aux_loss"
        self.is_global = balancing == "global_aux_loss"
        self.register_buffer("expert_bias", None)  # until the states are declared
        self.assigned_E: Tensor | int = 0
        has_bias = moe.moe_router_enable_expert_bias
        self.is_restricted = has_bias or moe.moe_router_num_groups is not None
        self.use_eager()

    def forward(self, x_TH: Tensor, sequences: int = 1) -> Routing:
        """Route tokens [S, B]: the tokens at one position of all sequences are consecutive."""
        moe = self.moe
        if self.training and (eps := moe.moe_input_jitter_eps) is not None:
            x_TH = x_TH.to(self.dtype)
            x_TH = x_TH * torch.empty_like(x_TH).uniform_(1 - eps, 1 + eps)
        forced_TE = None
        if moe.moe_router_force_load_balancing:
            forced_TE = _random_logits(len(x_TH), moe.experts, self.dtype, x_TH.device)
        scores_TE, experts_TK, weights_TK, z_loss = self._choose(x_TH, forced_TE)
        counts_GE = self._count(experts_TK, sequences if self.is_by_sequence else 1)
        if self.expert_bias is not None and self.log.is_recording:
            self.assigned_E = self.assigned_E + counts_GE.sum(0)
        assignments = experts_TK.numel() * self.sequence_group.size // len(counts_GE)
        load_GE = counts_GE / assignments
        return Routing(
            experts_TK,
            weights_TK,
            load_GE.mean(0),
            aux_loss=self._balance(scores_TE, load_GE),
            z_loss=z_loss,
        )

    def compile_parts(self, *, dynamic: bool | None) -> None:
        """Compile the choice of experts, on its first call.

        Args:
            dynamic: Passed to torch.compile.
        """
        self._choose = torch.compile(self._chosen, dynamic=dynamic)

    def use_eager(self) -> None:
        """Undo `compile_parts`."""
        self._choose = self._chosen

    def _chosen(
        self, x_TH: Tensor, forced_TE: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores, the experts of each token, their weights, and the z-loss.

        Args:
            x_TH: The tokens.
            forced_TE: Logits that decide. None: those of the router.
        """
        moe = self.moe
        bias = None if self.bias is None else self.bias.to(self.dtype)
        logits_TE = F.linear(x_TH.to(self.dtype), self.weight.to(self.dtype), bias)
        z_loss = logits_TE.logsumexp(-1).square().mean()
        if forced_TE is not None:
            logits_TE = logits_TE + (forced_TE - logits_TE).detach()
        scores_TE = logits_TE.sigmoid() if self.is_sigmoid else logits_TE.softmax(-1)
        is_softmax_of_selected = not (self.is_sigmoid or moe.is_pre_softmax)
        ranked_TE = logits_TE if is_softmax_of_selected else scores_TE
        experts_TK = self._select(ranked_TE.detach())
        weights_TK = ranked_TE.gather(1, experts_TK)
        if is_softmax_of_selected:
            weights_TK = weights_TK.softmax(-1)
        elif self.is_sigmoid and moe.moe_router_topk > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + SMALLEST_SUM)
        if moe.moe_router_topk_scaling_factor is not None:
            weights_TK = weights_TK * moe.moe_router_topk_scaling_factor
        return scores_TE, experts_TK, weights_TK, z_loss

    def _select(self, ranked_TE: Tensor) -> Tensor:
        """The experts of each token."""
        if self.expert_bias is not None:
            ranked_TE = ranked_TE + self.expert_bias
        groups = self.moe.moe_router_num_groups
        size = self.moe.moe_router_topk
        if groups is not None:
            chosen = self.moe.moe_router_group_topk or groups
            grouped = ranked_TE.unflatten(1, (groups, -1))
            best = torch.topk(grouped, size // chosen).values.sum(-1)
            is_used = torch.zeros_like(best, dtype=torch.bool)
            is_used.scatter_(1, torch.topk(best, chosen).indices, value=True)
            ranked_TE = grouped.where(is_used.unsqueeze(-1), -torch.inf).flatten(1)
        return ranked_TE.topk(size).indices

    def _count(self, experts_TK: Tensor, groups: int) -> Tensor:
        """The number of assignments in all slices by sequence and expert, [G, E]."""
        size = self.moe.experts
        first = torch.arange(groups, device=experts_TK.device).unsqueeze(1) * size
        places = (experts_TK.unflatten(0, (-1, groups)) + first).flatten()
        counts = count_assignments(places, groups * size)
        if self.sequence_group.size > 1:
            dist.all_reduce(counts, group=self.sequence_group.handle)
        return counts.view(groups, size)

    def _balance(self, scores_TE: Tensor, load_GE: Tensor) -> Tensor:
        """The load-balancing loss. Its loads are computed from the scores without the bias, as in
        Megatron."""
        groups, size = load_GE.shape
        if self.is_sigmoid:
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + SMALLEST_SUM)
        if self.is_restricted:
            chosen_TK = torch.topk(scores_TE.detach(), self.moe.moe_router_topk).indices
            assignments = chosen_TK.numel() * self.sequence_group.size // groups
            load_GE = self._count(chosen_TK, groups) / assignments
        if self.is_global and self.training:
            load_GE = self.log.mean_so_far(self, load_GE, self.replica_group)
        mean_GE = scores_TE.unflatten(0, (-1, groups)).mean(0)
        loss: Tensor = size * (load_GE * mean_GE).sum(-1).mean()
        return loss


def routers_with_bias(model: nn.Module) -> list[Router]:
    """The routers whose biases `update_biases` corrects."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return [router for router in routers if router.expert_bias is not None]


@torch.no_grad()
def update_biases(routers: Sequence[Router], dp: Group, *, is_applied: bool) -> None:
    """Correct the biases by the assignments of a step (Wang et al. 2024, algorithm 1). Collective.

    Args:
        routers: Routers of this rank.
        dp: Group whose ranks have other samples.
        is_applied: Whether the step is not skipped; else its assignments are forgotten.
    """
    if routers and is_applied:
        counts = torch.stack([torch.as_tensor(router.assigned_E) for router in routers])
        if dp.size > 1:
            dist.all_reduce(counts, group=dp.handle)
        excess = counts * counts.shape[-1] - counts.sum(-1, keepdim=True)
        for router, sign_E in zip(routers, excess.sign(), strict=True):
            assert router.expert_bias is not None
            router.expert_bias -= router.moe.moe_router_bias_update_rate * sign_E
    for router in routers:
        router.assigned_E = 0


def _random_logits(tokens: int, experts: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same random logits on all tensor-parallel ranks, and when they are computed again."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand((tokens, experts), generator=generator, dtype=dtype, device=device)


def count_assignments(experts: Tensor, size: int) -> Tensor:
    """Number of assignments of each of `size` experts; `bincount` would wait for the device."""
    return experts.new_zeros(size).scatter_add_(0, experts, torch.ones_like(experts))


def accepted_experts(
    routing: Routing, capacity: int | None, moe: MoEConfig, mesh: Mesh, part: Group
) -> tuple[Tensor, Tensor]:
    """The experts that accept this rank's assignments.

    Args:
        routing: Selected experts.
        capacity: Tokens that an expert accepts of all slices. None: all.
        moe: Options of the tokens that an expert keeps.
        mesh: Mesh of the model, whose ranks have slices of the same sequences.
        part: Group of whose ranks each sends a slice of the tokens to the experts.

    Returns:
        The expert of each assignment of this rank's slice, [A], or E if it exceeds an expert's
        capacity, and the fraction of all that do.
    """
    experts = routing.experts_TK.flatten()
    dropped = torch.zeros((), device=experts.device)
    if capacity is not None:
        is_kept = _within_capacity(routing, capacity, moe, mesh)
        experts = experts.where(is_kept, moe.experts)
        dropped = (experts == moe.experts).float().mean()
    return experts.unflatten(0, (part.size, -1))[part.rank], dropped


def _within_capacity(routing: Routing, capacity: int, moe: MoEConfig, mesh: Mesh) -> Tensor:
    """Whether the experts accept each of this rank's assignments, [T x K]."""
    group = mesh.sequence
    cp_size = mesh.cp.size
    experts = in_sequence_order(all_gather(routing.experts_TK, group).flatten(), 0, cp_size)
    if moe.moe_token_drop_policy == "probs":
        weights = all_gather(routing.weights_TK.detach(), group).flatten()
        weights = in_sequence_order(weights, 0, cp_size)
        order = weights.argsort(descending=True, stable=True)
        order = order[experts[order].argsort(stable=True)]
    else:
        order = experts.argsort(stable=True)
    counts_E = count_assignments(experts, moe.experts)
    starts_E = counts_E.cumsum(0) - counts_E
    position = torch.arange(len(order), device=order.device) - starts_E[experts[order]]
    is_kept = torch.empty_like(position, dtype=torch.bool)
    is_kept[order] = position < capacity
    return in_rank_order(is_kept, 0, cp_size).view(group.size, -1)[group.rank]
