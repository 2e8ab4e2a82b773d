"""How DeepSpeed's checkpoint files are written and read in place of DeepSpeed's own way.

An error of the disk on one rank is noted and raised when the collective save is through, so that
no rank is left waiting in a barrier. What is read can be tensors and plain values only: no file can
run code. It knows nothing of checkpoints' folders and names.
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

from megatron_ds.engine.deepspeed_patches import replace_checkpoint_engine
from megatron_ds.fileio.atomic import name_in_errors

HARMLESS = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""Classes that DeepSpeed stores in its files, beside tensors and plain values."""


class SafeCheckpointEngine(CheckpointEngine):
    """Writes and reads for one DeepSpeed engine, whose `checkpoint_engine` it becomes."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.name = "CheckpointFiles"
        self._error: OSError | None = None
        replace_checkpoint_engine(engine, self, self._attempt)

    @contextmanager
    def errors_at_the_end(self) -> Iterator[None]:
        """Raises the first OSError of what is written within, when all of it has been tried.

        An error that broke off a collective is no OSError: this rank has lost its place among
        the others, and cannot go on with them.
        """
        self._error = None
        try:
            yield
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the save broke off: {error}") from error
        if self._error is not None:
            raise self._error

    def create(self, info: object) -> None:
        """Part of DeepSpeed's protocol: nothing is to be prepared."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._attempt(os.makedirs, path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        self._attempt(write_tensors, state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return read_tensors(Path(path), map_location=map_location)

    def commit(self, info: object) -> bool:
        """Part of DeepSpeed's protocol: the caller makes the checkpoint complete."""
        return True

    def _attempt(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            work(*args, **kwargs)
        except OSError as error:
            self._error = self._error or error


class _ErrorKeepingFile:
    """A file that takes everything, so that torch's writer always comes to its end; the first
    error of the disk is kept in `error`.
    """

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
        """Nothing is held back."""


def write_tensors(value: Any, path: Path) -> None:
    """Writes a file that `read_tensors` reads, and waits until it is on the disk.

    Raises OSError that names the file.
    """
    with name_in_errors(path), open(path, "wb", buffering=0) as file:
        sink = _ErrorKeepingFile(file)
        torch.save(value, sink)  # type: ignore[arg-type]
        if sink.error is not None:
            raise sink.error
        os.fsync(file.fileno())


def read_tensors(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """A file of tensors and plain values.

    mmap: the tensors' bytes are read when they are used. Raises ValueError that names the file if
    it is damaged or holds anything else.
    """
    try:
        with torch.serialization.safe_globals(list(HARMLESS)):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as tensors and plain values: {error}") from error
