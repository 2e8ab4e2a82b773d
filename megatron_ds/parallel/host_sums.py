"""Sums over the ranks of one machine, in memory that they share.

gloo sends every tensor through sockets and wakes three threads of each rank for it. Here ranks of
one machine write their summands to shared memory, tell each other by a few bytes on a socket, and
add the summands in the order of the ranks, so that all get the same bits. Owns the memory and the
sockets of one group, whose `Group` has them if its ranks can share memory.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SLOT_BYTES = 2**20
"""Bytes of a summand that are exchanged at a time: what the caches of a core hold."""
SLOTS = 2
"""Slots of a rank, used in turn. A rank that waits for the others' next summands knows that they
have read its last one."""
LARGEST = 8
"""Ranks of the largest group, of which each reads the summands of all."""
MESSAGE = struct.Struct("<QQ")
"""Number of a sum, and the bytes of its summands."""
MEMORY = Path("/dev/shm")
GatherAll = Callable[[Any], list[Any]]
"""Every rank's value, in the order of the ranks."""


class HostSum:
    """Sums tensors over the ranks of a group, all on this machine.

    Args:
        rank: This rank.
        memory: Memory that all ranks have mapped, of size x `SLOTS` x `SLOT_BYTES` bytes.
        peers: Connections to all other ranks.
        name: Name of the group, for the operator of compiled graphs.
    """

    def __init__(self, rank: int, memory: mmap.mmap, peers: list[socket.socket], name: str) -> None:
        size = len(peers) + 1
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, size, SLOT_BYTES)
        self._rank = rank
        self._peers = peers
        self._count = 0
        self._library = torch.library.Library("megatron_ds_host_sums", "FRAGMENT")
        operators = torch.ops.megatron_ds_host_sums
        unused = (f"sum_{name}_{index}_" for index in itertools.count())
        operator = next(unique for unique in unused if not hasattr(operators, unique))
        self._library.define(f"{operator}(Tensor(a!) x) -> ()")
        self._library.impl(operator, _calling(self), "CPU")
        self._library.impl(operator, _change_nothing, "Meta")
        self._operator: Callable[[Tensor], None] = getattr(operators, operator).default

    def sum_(self, x: Tensor) -> None:
        """Replace a contiguous tensor by the sum over the ranks. Collective.

        Raises:
            RuntimeError: If a rank ended, did not arrive in time or sums another tensor.
        """
        if torch.compiler.is_compiling():
            self._operator(x)
        else:
            self._sum_(x)

    def _sum_(self, x: Tensor) -> None:
        for piece in x.view(-1).split(SLOT_BYTES // x.element_size()):
            self._sum_piece(piece)

    def _sum_piece(self, x: Tensor) -> None:
        self._count += 1
        size = x.numel() * x.element_size()
        summands = self._slots[self._count % SLOTS, :, :size].view(x.dtype)
        summands[self._rank].copy_(x)
        message = MESSAGE.pack(self._count, size)
        try:
            for peer in self._peers:
                peer.sendall(message)
            for peer in self._peers:
                received = peer.recv(MESSAGE.size, socket.MSG_WAITALL)
                if received != message:
                    raise RuntimeError(_what_differs(received, message))
        except OSError as error:
            raise RuntimeError(f"a rank of this machine is missing in a sum: {error}") from error
        first, second, *others = summands
        torch.add(first, second, out=x)
        for other in others:
            x.add_(other)


def _calling(host_sum: HostSum) -> Callable[[Tensor], None]:
    """What an operator calls. torch keeps it, and must not keep the memory."""
    reference = weakref.ref(host_sum)

    def call(x: Tensor) -> None:
        known = reference()
        assert known is not None
        known._sum_(x)

    return call


def _change_nothing(x: Tensor) -> None:
    """What a sum does to a tensor without values."""


def _what_differs(received: bytes, expected: bytes) -> str:
    if len(received) < MESSAGE.size:
        return "a rank of this machine ended before a sum over the ranks"
    count, size = MESSAGE.unpack(received)
    own_count, own_size = MESSAGE.unpack(expected)
    return (
        f"ranks sum different tensors: one of {size} bytes as number {count}, "
        f"one of {own_size} bytes as number {own_count}"
    )


def connect(
    rank: int, size: int, gather: GatherAll, name: str, timeout: timedelta
) -> HostSum | None:
    """Connect the ranks of a group, if all are on this machine and can share memory. Collective.

    Args:
        rank: This rank.
        size: Ranks of the group.
        gather: Gathers values of the ranks of this group.
        name: Name of the group.
        timeout: How long a rank waits for another one.

    Returns:
        None on every rank if any cannot take part.
    """
    if not 1 < size <= LARGEST:
        return None
    with ExitStack() as files:
        folder = gather(_make_folder(files, size) if rank == 0 else None)[0]
        # A rank of another machine does not find the folder.
        opened = None if folder is None else _open(files, folder, rank, size)
        if not all(gather(opened is not None)) or folder is None or opened is None:
            return None
        memory, listener = opened
        peers = _meet(folder, listener, rank, size, timeout)
        gather(None)  # the folder is deleted when every rank has found the others
    return HostSum(rank, memory, peers, name)


def _make_folder(files: ExitStack, size: int) -> Path | None:
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    try:
        folder = Path(files.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        with (folder / "memory").open("wb") as file:
            # Allocated, because a write that finds the memory full would end the process.
            os.posix_fallocate(file.fileno(), 0, size * SLOTS * SLOT_BYTES)
    except (OSError, AttributeError):  # full; macOS has no such function
        return None
    return folder


def _open(
    files: ExitStack, folder: Path, rank: int, size: int
) -> tuple[mmap.mmap, socket.socket] | None:
    """The memory, and where this rank is called."""
    listener = files.enter_context(socket.socket(socket.AF_UNIX))
    try:
        with (folder / "memory").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size * SLOTS * SLOT_BYTES)
        listener.bind(str(folder / str(rank)))
        listener.listen(LARGEST)
    except OSError:
        return None
    return memory, listener


def _meet(
    folder: Path, listener: socket.socket, rank: int, size: int, timeout: timedelta
) -> list[socket.socket]:
    """Connections to all other ranks: this one connects to the lower ones."""
    seconds = timeout.total_seconds()
    peers = []
    for other in range(rank):
        peers.append(socket.socket(socket.AF_UNIX))
        peers[-1].connect(str(folder / str(other)))
    listener.settimeout(seconds)
    while len(peers) < size - 1:
        peers.append(listener.accept()[0])
    for peer in peers:
        peer.setblocking(True)
        limit = struct.pack("@ll", int(seconds), 0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return peers
