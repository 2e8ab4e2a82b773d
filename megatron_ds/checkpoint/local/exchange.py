"""Sends files from rank to rank through the process group of `CollectiveIO`, in chunks.

All ranks go through the same list in its order and take part in their own transfers, so that no two
wait for each other. A rank whose disk fails continues to send or receive until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.fileio.atomic import FileRecord, fsync_file, name_in_errors

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
        transfers: Files to send, with their source and target ranks.
        folder: Folder of this rank's files, sent and received.
        ranks: All ranks.

    Raises:
        OSError: On every rank, if a disk fails or a file arrives with another checksum.
    """
    errors: list[OSError] = []
    buffer = torch.empty(CHUNK, dtype=torch.uint8)
    for transfer in transfers:
        if ranks.rank not in (transfer.source, transfer.target):
            continue
        sends = ranks.rank == transfer.source
        endpoint = _Endpoint(folder / transfer.name, transfer.record)
        with ExitStack() as files:
            endpoint.attempt(endpoint.open, "rb" if sends else "wb", files)
            for start in range(0, transfer.record.size, CHUNK):
                chunk = buffer[: min(CHUNK, transfer.record.size - start)]
                if sends:
                    endpoint.attempt(endpoint.read, chunk)
                    dist.send(chunk, transfer.target, group=ranks.group)
                else:
                    dist.recv(chunk, transfer.source, group=ranks.group)
                    endpoint.attempt(endpoint.write, chunk)
            if not sends:
                endpoint.attempt(endpoint.finish)
        if endpoint.error is not None:
            errors.append(endpoint.error)

    def report() -> None:
        if errors:
            raise errors[0]

    ranks.run_on_all(report)


class _Endpoint:
    """A rank's file of a transfer. After its first error it is left alone."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path = path
        self._record = record
        self._file: Any = None
        self.error: OSError | None = None

    def attempt(self, work: Callable[..., object], *arguments: Any) -> None:
        if self.error is None:
            try:
                with name_in_errors(self._path):
                    work(*arguments)
            except OSError as error:
                self.error = error

    def open(self, mode: str, files: ExitStack) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = files.enter_context(self._path.open(mode))

    def read(self, chunk: torch.Tensor) -> None:
        if self._file.readinto(chunk.numpy()) != len(chunk):
            raise OSError(f"{self._path} is shorter than {self._record.size} bytes")

    def write(self, chunk: torch.Tensor) -> None:
        self._file.write(chunk.numpy().data)

    def finish(self) -> None:
        fsync_file(self._file)
        if not self._record.matches(self._path):
            raise OSError(f"{self._path} arrived with another checksum than the sender's")
