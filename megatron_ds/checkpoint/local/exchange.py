"""Sends files from rank to rank through the process group of agreements, in chunks.

All ranks go through the same list in its order and take part in their own transfers, so that no two
wait for each other. A rank whose disk fails continues to send or receive until the end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from megatron_ds.checkpoint.collective_io import CollectiveIO
from megatron_ds.fileio.atomic import FileRecord, name_in_errors

CHUNK = 2**24
"""Bytes of a message."""


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another."""

    source: int
    target: int
    name: str
    """Path in the folders of both."""
    record: FileRecord


def exchange(transfers: Sequence[Transfer], folder: Path, ranks: CollectiveIO) -> None:
    """Sends and receives files. Collective: the list is the same on every rank.

    Transfers next to each other in the list whose ranks are different happen at the same time.

    Args:
        transfers: What is sent.
        folder: Folder of this rank's files, sent and received.
        ranks: All ranks.

    Raises:
        OSError: On every rank, if a disk fails or a file arrives with another checksum.
    """
    errors: list[OSError] = []
    buffer = torch.empty(CHUNK, dtype=torch.uint8)
    for transfer in transfers:
        if ranks.rank == transfer.source:
            work: _Endpoint = _Sender(folder / transfer.name)
        elif ranks.rank == transfer.target:
            work = _Receiver(folder / transfer.name, transfer.record)
        else:
            continue
        with ExitStack() as files:
            work.attempt(lambda: work.open(files))  # noqa: B023
            for start in range(0, transfer.record.size, CHUNK):
                chunk = buffer[: min(CHUNK, transfer.record.size - start)]
                work.move(chunk, transfer, ranks.group)
            work.attempt(work.finish)
        if work.error is not None:
            errors.append(work.error)

    def report() -> None:
        if errors:
            raise errors[0]

    ranks.run_on_all(report)


class _Endpoint:
    """One side of a transfer, which records its first error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None
        self.error: OSError | None = None

    def attempt(self, work: Any) -> None:
        if self.error is None:
            try:
                with name_in_errors(self.path):
                    work()
            except OSError as error:
                self.error = error

    def open(self, files: ExitStack) -> None:
        raise NotImplementedError

    def move(self, chunk: torch.Tensor, transfer: Transfer, group: Any) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Called after the last chunk."""


class _Sender(_Endpoint):
    def open(self, files: ExitStack) -> None:
        self.file = files.enter_context(self.path.open("rb"))

    def move(self, chunk: torch.Tensor, transfer: Transfer, group: Any) -> None:
        def read() -> None:
            assert self.file is not None
            if self.file.readinto(chunk.numpy()) != len(chunk):  # type: ignore[attr-defined]
                raise OSError(f"{self.path} is shorter than {transfer.record.size} bytes")

        self.attempt(read)
        dist.send(chunk, transfer.target, group=group)


class _Receiver(_Endpoint):
    def __init__(self, path: Path, record: FileRecord) -> None:
        super().__init__(path)
        self._record = record

    def open(self, files: ExitStack) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = files.enter_context(self.path.open("wb"))

    def move(self, chunk: torch.Tensor, transfer: Transfer, group: Any) -> None:
        dist.recv(chunk, transfer.source, group=group)

        def write() -> None:
            assert self.file is not None
            self.file.write(chunk.numpy().data)

        self.attempt(write)

    def finish(self) -> None:
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        if not self._record.matches(self.path):
            raise OSError(f"{self.path} arrived with another checksum than the sender's")
