"""Writes and reads the files of DeepSpeed's checkpoints in place of DeepSpeed's own code.

DeepSpeed's collective save only collects the states. The files are written after it, so that no
rank waits in one of its barriers for a disk, and a disk error interrupts none. Files may contain
only tensors and plain values: reading one never runs code. Knows nothing of the folders and names
of checkpoints.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch.utils.serialization import config as serialization_config

from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed import zero_to_fp32
from megatron_ds.engine.deepspeed.expert_files import ExpertFiles
from megatron_ds.engine.deepspeed.patches import replace_checkpoint_engine
from megatron_ds.engine.deepspeed.tensor_files import OPTIMIZER_KEYS, read_tensors
from megatron_ds.engine.states.host_staging import HostStaging
from megatron_ds.fileio.atomic import FileRecord, name_in_errors, new_checksum, start_writeback

SHAPES = re.compile(r"size mismatch for (\S+): .*?Size\(\[(.*?)\]\).*?Size\(\[(.*?)\]\)")
"""Name and shapes in torch's message about weights of other shapes."""
SHOWN = 5
CHUNK = 2**24
"""Bytes that are written at once; a cancelled write ends after as many."""


class SafeCheckpointEngine(CheckpointEngine):
    """The `checkpoint_engine` of one DeepSpeed engine.

    Args:
        engine: Engine of `deepspeed.initialize`.
        experts: The experts of this rank.
        saves_optimizer: Save the states of the optimizer, too, and not only the weights with their
            master copy.
    """

    def __init__(self, engine: Any, experts: ExpertFiles, *, saves_optimizer: bool = True) -> None:
        super().__init__()
        self._saves_optimizer = saves_optimizer
        self._experts = experts
        self.name = "CheckpointFiles"
        self._pending: dict[str, Any] = {}
        self._scripts: list[Path] = []
        script = Path(zero_to_fp32.__file__)
        replace_checkpoint_engine(engine, self, lambda: self._scripts.append(script))

    def collect(self, save: Callable[[], object], copies: HostStaging | None) -> DeepSpeedSnapshot:
        """Collect the states of this rank's files in a collective save.

        Args:
            save: DeepSpeed's save, which writes nothing. Collective.
            copies: Copies the states. Without it they refer to the engine's tensors, and must be
                written before the next step.

        Raises:
            RuntimeError: If an error interrupted a collective. This rank is then out of step with
                its peers and cannot continue.
        """
        try:
            save()
            states = {**self._pending, **self._experts.own_files()}
            if copies is None:
                return DeepSpeedSnapshot(states, self._scripts)
            return DeepSpeedSnapshot(copies.copy(states), self._scripts, copies.nbytes)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the save was interrupted: {error}") from error
        finally:
            self._pending = {}
            self._scripts = []

    def create(self, info: object) -> None:
        """Part of DeepSpeed's interface: needs no preparation."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Part of DeepSpeed's interface: a snapshot creates its folder when it is written."""

    def save(self, state_dict: Any, path: str) -> None:
        state = self._experts.left_out(state_dict)
        self._pending[Path(path).name] = state if self._saves_optimizer else without_states(state)

    def load(self, path: str, map_location: Any = None) -> Any:
        # DeepSpeed opens the file of the weights twice, and holds what it has loaded in memory next
        # to the engine's states. Mapped tensors are only read, when they are copied.
        def read(name: str) -> Any:
            file = Path(path).with_name(name)
            return read_tensors(file, map_location=map_location, mmap=True)

        state = read(Path(path).name)
        self._experts.add_to(state, read)
        return state

    def commit(self, info: object) -> bool:
        """Part of DeepSpeed's interface: the caller completes the checkpoint."""
        return True


class DeepSpeedSnapshot:
    """One rank's part of a checkpoint: the states of one moment of the run.

    Args:
        states: Content of each file by name.
        scripts: Files that are copied to the folder of all checkpoints.
        copied_bytes: Bytes of the states if they are a copy.

    Attributes:
        states: The argument `states`.
    """

    def __init__(
        self, states: Mapping[str, Any], scripts: Sequence[Path] = (), copied_bytes: int = 0
    ) -> None:
        self.states = states
        self._scripts = scripts
        self.copied_bytes = copied_bytes
        self._is_cancelled = threading.Event()

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write the files of this rank and wait until they are on the disk. In any thread.

        Args:
            folder: Folder of the checkpoint.

        Returns:
            What was written, by path relative to the folder.

        Raises:
            OSError: If the disk failed, or the write was cancelled.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for script in self._scripts:
            shutil.copyfile(script, folder.parent / script.name)
        return {
            name: write_tensors(state, folder / name, self._is_cancelled)
            for name, state in self.states.items()
        }

    def cancel(self) -> None:
        """Let a write in another thread end soon, with an error."""
        self._is_cancelled.set()


def load_checkpoint(engine: Any, folder: Path, tag: str) -> tuple[str | None, Any]:
    """Let DeepSpeed load folder/tag.

    Raises:
        UserError: If names or shapes of weights differ from the model's.
    """
    try:
        loaded: tuple[str | None, Any] = engine.load_checkpoint(str(folder), tag=tag)
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        differing = [
            f"{name} is [{saved}], the model's [{shape}]"
            for name, saved, shape in SHAPES.findall(str(error))
        ]
        missing = [
            line.strip() for line in str(error).splitlines()[1:] if "size mismatch" not in line
        ]
        lines = [*differing, *missing]
        more = f", and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        differences = "; ".join(lines[:SHOWN]) + more
        raise user_error(
            "checkpoint-shapes-differ", path=folder / tag, differences=differences
        ) from None
    return loaded


def without_states(values: Any) -> Any:
    """The content of a file of DeepSpeed's without the states of its optimizer.

    Master weights remain: DeepSpeed stores them separately from the states.
    """
    if not isinstance(values, dict):
        return values
    if values.keys() >= {"state", "param_groups"}:
        return {**values, "state": {}}
    return {
        key: without_states(value) if key in OPTIMIZER_KEYS else value
        for key, value in values.items()
    }


class _HashingFile:
    """Accepts all data, so that torch's writer completes; hashes it and keeps the first error.

    torch writes to a Python object from the first byte to the last, without seeking.
    """

    def __init__(self, file: FileIO, is_cancelled: threading.Event | None) -> None:
        self._file = file
        self._is_cancelled = is_cancelled
        self.digest = new_checksum()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        unwritten = memoryview(data)
        try:
            while len(unwritten) > 0 and self.error is None:
                if self._is_cancelled is not None and self._is_cancelled.is_set():
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                written = self._file.write(unwritten[:CHUNK])
                self.digest.update(unwritten[:written])
                start_writeback(self._file, self.size, written)
                self.size += written
                unwritten = unwritten[written:]
        except OSError as error:
            self.error = error
        return len(data)

    def flush(self) -> None:
        """The file is unbuffered."""


class _Pickler(pickle.Pickler):
    """Stores a member of an Enum by its value, as later versions of Python do.

    Python 3.11.0 to 3.11.3 store a call of getattr, which torch refuses with `weights_only`.
    """

    def reducer_override(self, value: Any) -> Any:
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


_PICKLE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def write_tensors(
    value: Any, path: Path, is_cancelled: threading.Event | None = None
) -> FileRecord:
    """Write a file for `read_tensors` and wait until it is on the disk.

    Args:
        value: Tensors and plain values.
        path: The file.
        is_cancelled: Set by another thread, it ends the write with an error.

    Raises:
        OSError: If the disk fails; names the file.
    """
    with name_in_errors(path), open(path, "wb", buffering=0) as file:
        sink = _HashingFile(file, is_cancelled)
        # The file has a checksum of its own, and none of the readers uses the one inside.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch.save(value, sink, pickle_module=_PICKLE)  # type: ignore[arg-type]
        if sink.error is not None:
            raise sink.error
        os.fsync(file.fileno())
    return FileRecord(sink.size, sink.digest.hexdigest())
