"""Mixture of experts: a router, and feed-forward networks; each token uses a few.

The experts are distributed over the expert-parallel ranks, to which their tokens are sent by
all-to-all, and from which the outputs come back in the same way. The width of each expert is
sharded over the tensor-parallel group, or its ranks have different experts, to which each sends its
part of the sequence; they all route the tokens of the complete sequence. Sequence-parallel ranks of
DeepSpeed-Ulysses route the tokens of their slices, and so do context-parallel ranks; the load and
the capacity count all slices.

Shapes: S sequence, B micro-batch, H hidden, T = S x B tokens, E experts, e experts of this rank,
K experts per token, A assignments of a token to an expert, at most T x K, R rows that this rank's
experts receive.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.model.declaration.experts import ExpertsSpec
from megatron_ds.model.experts.exchange import Exchange
from megatron_ds.model.experts.grouped import Experts
from megatron_ds.model.experts.permutation import combine, permute, sort_assignments
from megatron_ds.model.experts.router import Router, Routing, accepted_experts
from megatron_ds.model.experts.router_log import RouterLog
from megatron_ds.model.kernels.elementwise import EAGER, Elementwise, activate
from megatron_ds.model.mlp import MLP
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.collectives import gather_slices, take_slice
from megatron_ds.parallel.linear import ReplicatedLinear
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.sharding import declared_parameter
from megatron_ds.parallel.weights import Partial


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
        self.moe = moe
        self.log = log
        self.group = mesh.tp
        self.mesh = mesh
        self.ep_group = mesh.experts
        self.is_whole = mesh.has_whole_experts
        self.alone = Group((mesh.rank,), 0, None)
        spec = ExpertsSpec(config, moe)
        name = f"layers.{layer}.mlp"

        def linear(part: str) -> ReplicatedLinear | None:
            weights = spec.layer(name, part)
            if mesh.has_whole_experts:  # it computes this rank's tokens only
                weights = [replace(weight, partial_over=Partial.SEQUENCE) for weight in weights]
            parameters = [declared_parameter(weight, mesh.tp, init) for weight in weights]
            return ReplicatedLinear(*parameters) if parameters else None

        weights = spec.named(name)
        router = weights["router.weight"], weights.get("router.bias")
        self.router = Router(*router, moe, mesh, init=init, log=log)
        self.router.declare_states(weights.values())
        self.experts = Experts(spec, name, mesh, init)
        self.latent_in = linear("latent_in")
        self.latent_out = linear("latent_out")
        self.shared = None
        if spec.shared is not None:
            options: dict[str, Any] = {"spec": spec.shared, "part": "mlp.shared"}
            self.shared = MLP(config, layer, group=mesh.tp, init=init, **options)
        self.shared_gate = linear("shared_gate")
        self.use_eager()

    def forward(self, x_SBH: Tensor) -> Tensor:
        # All ranks route all tokens, so that their gradients are already the complete ones.
        if not self.group.sequence_parallel:
            y_SBH = self._mix(x_SBH, x_SBH)
        elif self.is_whole:
            y_SBH = self._mix(x_SBH, gather_slices(x_SBH, self.group), self.group)
        else:
            all_SBH = gather_slices(x_SBH, self.group)
            y_SBH = take_slice(self._mix(all_SBH, all_SBH), self.group)
        return y_SBH if self.shared is None else self._shared_part(x_SBH, y_SBH)

    def use_elementwise(self, functions: Elementwise) -> None:
        """Set the functions that compute the elementwise parts."""
        if self.ep_group.size == 1:
            # With further ranks they would be compiled again for each number of tokens.
            self.experts.elementwise = functions
        if self.shared is not None:
            self.shared.elementwise = functions

    def compile_parts(self, *, dynamic: bool | None) -> None:
        """Compile what is computed between the exchanges of rows, on its first call.

        Args:
            dynamic: Passed to torch.compile.
        """
        # With further ranks each micro-batch has another number of rows.
        of_rows = dynamic if self.ep_group.size == 1 else True
        self.experts.elementwise = Elementwise(activate=torch.compile(activate, dynamic=of_rows))
        self._shared_part = torch.compile(self._shared, dynamic=dynamic)
        self.router.compile_parts(dynamic=dynamic)
        self._sort = torch.compile(sort_assignments, dynamic=dynamic)
        self._permute = torch.compile(permute, dynamic=dynamic)
        self._combine = torch.compile(combine, dynamic=dynamic)

    def use_eager(self) -> None:
        """Undo `compile_parts`."""
        self.experts.elementwise = EAGER
        self._shared_part = self._shared
        self.router.use_eager()
        self._sort = sort_assignments
        self._permute = permute
        self._combine = combine

    def _shared(self, x_SBH: Tensor, y_SBH: Tensor) -> Tensor:
        """Adds the output of the shared expert."""
        assert self.shared is not None
        shared_SBH: Tensor = self.shared(x_SBH)
        if self.shared_gate is not None:
            shared_SBH = shared_SBH * self.shared_gate(x_SBH).sigmoid()
        return y_SBH + shared_SBH

    def _mix(self, x_SBH: Tensor, all_SBH: Tensor, part: Group | None = None) -> Tensor:
        """The outputs for the tokens that this rank sends to the experts.

        Args:
            x_SBH: The tokens.
            all_SBH: The tokens that are routed.
            part: Group of whose ranks each sends a slice of them. None: this rank sends all.
        """
        part = part or self.alone
        x_TH = x_SBH.flatten(0, 1)
        all_TH = all_SBH.flatten(0, 1)
        routing: Routing = self.router(all_TH, x_SBH.shape[1])
        capacity = self._capacity(len(all_TH) * self.mesh.sequence.size)
        experts_A, dropped = accepted_experts(routing, capacity, self.moe, self.mesh, part)
        order_A, place_A, counts_E = self._sort(experts_A, self.moe.experts, self.ep_group)
        if self.latent_in is not None:
            x_TH = self.latent_in(x_TH)
        x_AH = self._permute(x_TH, order_A, place_A, self.moe.moe_router_topk)
        y_AH = self._run_experts(x_AH, counts_E)
        weights_TK = take_slice(routing.weights_TK, part)
        accepted_A = None if capacity is None else experts_A < self.moe.experts
        out_TH = self._combine(y_AH, weights_TK, order_A, place_A, accepted_A)
        if self.latent_out is not None:
            out_TH = self.latent_out(out_TH)
        losses = {"load_balancing_loss": routing.aux_loss, "z_loss": routing.z_loss}
        loads = {"load": routing.load_E, "largest": routing.load_E.max()}
        self.log.record({**losses, "dropped": dropped, **loads})
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
        """The outputs for rows that are in the order of `sort_assignments`.

        Rows without an expert are not sent; their outputs are any expert's, or zero.
        """
        if self.ep_group.size == 1:
            y_AH: Tensor = self.experts(x_AH, counts_E)
            return y_AH
        exchange = Exchange.plan(counts_E, self.ep_group)
        # Tensor-parallel ranks send slices of one micro-batch.
        by_micro_batch = exchange.counts_pe.unflatten(0, (self.mesh.ep.size, -1)).sum(1)
        y_RH = self.experts(exchange.to_experts(x_AH), by_micro_batch.t())
        return exchange.from_experts(y_RH, len(x_AH))
