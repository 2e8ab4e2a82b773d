"""Exchange of keys and values between context-parallel ranks, and of their gradients.

Each rank has two chunks of every sequence (`layout`). Queries stay where they are. Their
rank receives the chunks of keys that they see and returns to each owner the gradients of its
chunks, which the owner adds in fp32.

Knows no attention. Shapes: N ranks, `chunk` the shape of the keys and values of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config.options.parallel import ALL_GATHER, P2P
from megatron_ds.parallel.collectives import start_all_gather, wait
from megatron_ds.parallel.context.layout import CHUNKS
from megatron_ds.parallel.mesh import Group

Needs = Callable[[int, int], Sequence[int]]
"""The chunks of a rank, 0 or 1 in ascending order, that another one needs; called with the ranks of
the receiver and the owner in their group."""


class Received(NamedTuple):
    """Keys and values of one rank."""

    owner: int
    """Rank of the group that has them."""
    chunks: Sequence[int]
    """Which of its chunks they are."""
    values: Tensor
    """[len(chunks), *chunk]"""


class Exchange(Protocol):
    """The keys of a pass and, in a backward pass, their gradients. Each pass has a new one."""

    def receive(self) -> Iterator[Received]:
        """What this rank needs of each rank of the group, in an order that begins with itself."""
        ...

    def give_back(self, received: Received, grads: Tensor) -> None:
        """Return the gradients of received keys to their owner.

        Called after each iteration of `receive`, also where no chunk was received.

        Args:
            received: What `receive` returned.
            grads: Their gradients in fp32, changed in place; of no chunks, whatever their type.
        """
        ...

    def collect(self) -> Tensor:
        """The sum of all gradients of this rank's own keys, [2, *chunk] in fp32."""
        ...


class PairwiseExchange:
    """Messages between pairs of ranks: in step j each rank sends to the rank j places after it, and
    receives from the rank j places before it, what the receiver needs.

    The messages of a step are under way during the computation with what the step before brought.
    A chunk goes to each rank that needs it, once. A ring, in which ranks pass on what they receive,
    would bring each rank also the chunks that its queries do not see: a third more, and with a
    window nearly all.

    Args:
        keys: Keys and values [2, *chunk] of this rank's chunks, contiguous.
        group: Context-parallel group.
        needs: What ranks need of each other.
    """

    def __init__(self, keys: Tensor, group: Group, needs: Needs) -> None:
        self._keys = keys
        self._group = group
        self._needs = needs
        self._total = keys
        self._returning: tuple[Sequence[int], Tensor, list[dist.Work]] | None = None

    def receive(self) -> Iterator[Received]:
        size = self._group.size
        coming = self._start(1)
        yield Received(self._group.rank, range(CHUNKS), self._keys)
        for step in range(1, size):
            received, works = coming
            for work in works:
                work.wait()
            if step + 1 < size:
                coming = self._start(step + 1)
            yield received

    def give_back(self, received: Received, grads: Tensor) -> None:
        group = self._group
        if received.owner == group.rank:
            self._total = grads
            return
        step = (group.rank - received.owner) % group.size
        user = (group.rank + step) % group.size
        chunks = self._needs(user, group.rank)
        buffer = self._keys.new_empty(len(chunks), *self._keys.shape[1:])
        sent = grads.to(self._keys.dtype)
        works = _send_and_receive(sent, received.owner, buffer, user, group)
        self._add_returned()
        self._returning = chunks, buffer, works

    def collect(self) -> Tensor:
        self._add_returned()
        return self._total

    def _start(self, step: int) -> tuple[Received, list[dist.Work]]:
        """Start the messages of a step."""
        group = self._group
        user = (group.rank + step) % group.size
        owner = (group.rank - step) % group.size
        wanted = self._needs(user, group.rank)
        needed = self._needs(group.rank, owner)
        buffer = self._keys.new_empty(len(needed), *self._keys.shape[1:])
        sent = self._keys[wanted[0] : wanted[-1] + 1] if wanted else self._keys[:0]
        works = _send_and_receive(sent, user, buffer, owner, group)
        return Received(owner, needed, buffer), works

    def _add_returned(self) -> None:
        """Add the gradients of the step before, which have come meanwhile."""
        if self._returning is None:
            return
        chunks, buffer, works = self._returning
        for work in works:
            work.wait()
        for chunk, grads in zip(chunks, buffer, strict=True):
            self._total[chunk] += grads
        self._returning = None


class GatheredExchange:
    """All keys of the group by one all-gather, their gradients by one all-to-all.

    Args:
        keys: Keys and values [2, *chunk] of this rank's chunks, contiguous.
        group: Context-parallel group.
        needs: What ranks need of each other; they receive everything.
    """

    def __init__(self, keys: Tensor, group: Group, needs: Needs) -> None:
        self._keys = keys
        self._group = group
        self._needs = needs
        self._total = keys
        self._grads: Tensor | None = None

    def receive(self) -> Iterator[Received]:
        group = self._group
        gathered = start_all_gather(self._keys, group)
        yield Received(group.rank, range(CHUNKS), self._keys)
        chunks = wait(gathered).unflatten(0, (group.size, CHUNKS))
        for step in range(1, group.size):
            owner = (group.rank - step) % group.size
            needed = self._needs(group.rank, owner)
            first, end = (needed[0], needed[-1] + 1) if needed else (0, 0)
            yield Received(owner, needed, chunks[owner, first:end])

    def give_back(self, received: Received, grads: Tensor) -> None:
        keys = self._keys
        if received.owner == self._group.rank:
            self._total = grads
            self._grads = keys.new_zeros(self._group.size, *keys.shape)
            return
        assert self._grads is not None
        for chunk, grad in zip(received.chunks, grads, strict=True):
            self._grads[received.owner, chunk] = grad

    def collect(self) -> Tensor:
        assert self._grads is not None
        returned = torch.empty_like(self._grads)
        dist.all_to_all_single(returned, self._grads, group=self._group.handle)
        for grads in returned:  # zeros at this rank's own place
            self._total += grads
        return self._total


EXCHANGES: dict[str, Callable[[Tensor, Group, Needs], Exchange]] = {
    P2P: PairwiseExchange,
    ALL_GATHER: GatheredExchange,
}
"""Kinds of exchange by the values of --cp-comm-type."""


def _send_and_receive(
    sent: Tensor, receiver: int, buffer: Tensor, sender: int, group: Group
) -> list[dist.Work]:
    """Start a message in each direction, unless it is empty. Receiver and sender are ranks of the
    group."""
    messages = []
    if sent.numel() > 0:
        messages.append(dist.P2POp(dist.isend, sent, group.ranks[receiver], group.handle))
    if buffer.numel() > 0:
        messages.append(dist.P2POp(dist.irecv, buffer, group.ranks[sender], group.handle))
    return dist.batch_isend_irecv(messages) if messages else []
