"""The exchange of rows between ranks that have different experts.

Rows of a rank's own experts are in no message.

Shapes: A assignments of a token to an expert, E experts, e experts of this rank, R rows that they
receive, p ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.parallel.mesh import Group


@dataclass(frozen=True)
class Exchange:
    """Where the rows of a micro-batch are computed.

    The rows of a rank, [A, H], are in the order of `expert_keys`: those for other ranks by rank
    and expert, then those for its own experts, then those without an expert. The rows that its
    experts get, [R, H], are in the order of the experts, and of each expert in that of the ranks
    that they are from.
    """

    group: Group
    send: list[int]
    """Rows for each rank; none for this one."""
    receive: list[int]
    """Rows from each rank; none from this one."""
    kept: int
    """Rows that stay on this rank."""
    places_R: Tensor
    """Where in the order of the experts are the rows from other ranks, in the order of these, and
    the rows that stay."""
    counts_pe: Tensor
    """Rows from each of the p ranks for each expert of this one."""

    @classmethod
    def plan(cls, counts_E: Tensor, group: Group) -> Exchange:
        """Exchange the numbers of rows. Collective; the host waits for the device once.

        Args:
            counts_E: Rows of this rank for each expert of all ranks.
            group: Ranks of which each has consecutive experts.
        """
        to_ranks = counts_E.view(group.size, -1)
        from_ranks = torch.empty_like(to_ranks)
        dist.all_to_all_single(from_ranks, to_ranks, group=group.handle)
        send, receive = torch.stack([to_ranks, from_ranks]).sum(-1).tolist()
        rows = sum(receive)
        kept = send[group.rank]
        send[group.rank] = 0
        receive[group.rank] = 0
        # Where the rows of an expert from a rank begin: by expert and rank, and as they come.
        by_expert = from_ranks.t().flatten()
        starts = (by_expert.cumsum(0) - by_expert).view(-1, group.size).t()
        coming = _own_last(from_ranks, group.rank).flatten()
        moved = _own_last(starts, group.rank).flatten() - (coming.cumsum(0) - coming)
        places_R = torch.arange(rows, device=counts_E.device)
        places_R = places_R + moved.repeat_interleave(coming, output_size=rows)
        return cls(group, send, receive, kept, places_R, from_ranks)

    def to_experts(self, x_AH: Tensor) -> Tensor:
        """The rows for this rank's experts, [R, H]. Collective."""
        rows_RH: Tensor = _Exchanged.apply(x_AH, self, len(x_AH), True)
        return rows_RH

    def from_experts(self, y_RH: Tensor, rows: int) -> Tensor:
        """The rows [R, H] in the order before `to_experts`, [rows, H]. Collective.

        Those without an expert are zero.
        """
        y_AH: Tensor = _Exchanged.apply(y_RH, self, rows, False)
        return y_AH

    def _distribute(self, x_AH: Tensor) -> Tensor:
        sent = sum(self.send)
        received = x_AH.new_empty(sum(self.receive), x_AH.shape[1])
        work = self._start(received, x_AH[:sent], self.receive, self.send)
        rows_RH = x_AH.new_empty(len(self.places_R), x_AH.shape[1])
        remote, staying = self.places_R.split([len(received), self.kept])
        rows_RH.index_copy_(0, staying, x_AH[sent : sent + self.kept])
        work.wait()
        return rows_RH.index_copy_(0, remote, received)

    def _collect(self, y_RH: Tensor, rows: int) -> Tensor:
        sent = sum(self.send)
        remote, staying = self.places_R.split([sum(self.receive), self.kept])
        y_AH = y_RH.new_empty(rows, y_RH.shape[1])
        work = self._start(y_AH[:sent], y_RH.index_select(0, remote), self.send, self.receive)
        torch.index_select(y_RH, 0, staying, out=y_AH[sent : sent + self.kept])
        y_AH[sent + self.kept :].zero_()
        work.wait()
        return y_AH

    def _start(self, received: Tensor, sent: Tensor, receive: list[int], send: list[int]) -> Any:
        handle = self.group.handle
        return dist.all_to_all_single(received, sent, receive, send, group=handle, async_op=True)


class _Exchanged(torch.autograd.Function):
    """Rows to the experts, or from them; the gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, rows: int, is_to: bool) -> Tensor:
        ctx.exchange = exchange
        ctx.rows = rows
        ctx.is_to = is_to
        return exchange._distribute(x) if is_to else exchange._collect(x, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exchange: Exchange = ctx.exchange
        gradient = gradient.contiguous()
        if ctx.is_to:
            return exchange._collect(gradient, ctx.rows), None, None, None
        return exchange._distribute(gradient), None, None, None


def _own_last(by_rank: Tensor, rank: int) -> Tensor:
    """Rows of a matrix, that of a rank after all others."""
    return torch.cat([by_rank[:rank], by_rank[rank + 1 :], by_rank[rank : rank + 1]])


def expert_keys(experts_A: Tensor, experts: int, group: Group) -> Tensor:
    """Keys that sort assignments to this rank's experts after those to other ranks'.

    Args:
        experts_A: Experts by number; `experts` is none.
        experts: Number of experts.
        group: Ranks of which each has consecutive experts.
    """
    if group.size == 1:
        return experts_A
    is_last = experts_A // (experts // group.size) == group.rank
    return experts_A + experts * (is_last | (experts_A == experts))
