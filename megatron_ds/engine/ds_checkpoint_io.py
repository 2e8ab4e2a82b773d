"""Writes and reads the files of DeepSpeed's checkpoints in place of DeepSpeed's own code.

A disk error on one rank is kept and raised after the collective save, so that no rank is left
waiting in a barrier. Files may contain only tensors and plain values: reading one never runs code.
Knows nothing of the folders and names of checkpoints.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed_patches import replace_checkpoint_engine
from megatron_ds.fileio.atomic import name_in_errors

SAFE_CLASSES = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""Classes that DeepSpeed stores in its files, in addition to tensors and plain values."""


class SafeCheckpointEngine(CheckpointEngine):
    """The `checkpoint_engine` of one DeepSpeed engine."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.name = "CheckpointFiles"
        self._error: OSError | None = None
        replace_checkpoint_engine(engine, self, self._attempt)

    @contextmanager
    def errors_at_the_end(self) -> Iterator[None]:
        """Raise the first OSError of the files written inside, after all of them were tried.

        Raises:
            OSError: If this rank's disk failed.
            RuntimeError: If an error interrupted a collective. This rank is then out of step with
                its peers and cannot continue.
        """
        self._error = None
        try:
            yield
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the save was interrupted: {error}") from error
        if self._error is not None:
            raise self._error

    def create(self, info: object) -> None:
        """Part of DeepSpeed's interface: needs no preparation."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._attempt(os.makedirs, path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        self._attempt(write_tensors, state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return read_tensors(Path(path), map_location=map_location)

    def commit(self, info: object) -> bool:
        """Part of DeepSpeed's interface: the caller completes the checkpoint."""
        return True

    def _attempt(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            work(*args, **kwargs)
        except OSError as error:
            self._error = self._error or error


class _ErrorKeepingFile:
    """A file that accepts all data, so that torch's writer completes, and keeps the first error."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        size = len(data)
        rest = memoryview(data)
        try:
            while len(rest) > 0 and self.error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def flush(self) -> None:
        """The file is unbuffered."""


def write_tensors(value: Any, path: Path) -> None:
    """Write a file for `read_tensors` and wait until it is on the disk.

    Raises:
        OSError: If the disk fails; names the file.
    """
    with name_in_errors(path), open(path, "wb", buffering=0) as file:
        sink = _ErrorKeepingFile(file)
        torch.save(value, sink)  # type: ignore[arg-type]
        if sink.error is not None:
            raise sink.error
        os.fsync(file.fileno())


def read_tensors(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read a file of tensors and plain values.

    Args:
        path: File of `write_tensors` or of DeepSpeed.
        map_location: Device of the tensors.
        mmap: Read the bytes of a tensor when it is used.

    Raises:
        UserError: If the file is damaged or contains other objects.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE_CLASSES)):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise user_error("tensor-file-unreadable", path=path, error=error) from error
