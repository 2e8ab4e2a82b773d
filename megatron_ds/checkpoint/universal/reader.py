"""Weights and optimizer states of a universal checkpoint by canonical name.

Knows the files of DeepSpeed's format and no engines. Files are memory-mapped, and only the
requested values are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ds.checkpoint.files.native_reader import COUNTERS, SavedStates
from megatron_ds.checkpoint.metadata import Checkpoint
from megatron_ds.checkpoint.universal.folders import FP32, OPTIMIZER_STATE, STATES, STEP, ZERO
from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.engine.states.state_reader import MASTER, Columns, TensorReader, part_of

PARAM = "param"


def _read_mapped(path: Path) -> Any:
    return read_tensors(path, mmap=True)


class UniversalStates:
    """The states of one checkpoint; implements `StateReader`.

    Args:
        path: The folder.
        has_optimizer: Read the states of the optimizer, too, and not only the weights.
        read: Reads a file.

    Attributes:
        bytes_read: Bytes of all values that were read.
    """

    def __init__(
        self,
        path: Path,
        *,
        has_optimizer: bool = True,
        read: Callable[[Path], Any] = _read_mapped,
    ) -> None:
        self._path = path
        self._has_optimizer = has_optimizer
        self._read = read
        self._entries: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.bytes_read = 0

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        names = sorted(path.parent.name for path in (self._path / ZERO).glob(f"*/{FP32}.pt"))
        return {name: tuple(self.entry(name, FP32)[PARAM].shape) for name in names}

    @cached_property
    def counters(self) -> Mapping[str, int]:
        return {name: self.run[name] for name in COUNTERS}

    @property
    def loss_scaler(self) -> Any:
        return self.common.get("loss_scaler") if self._has_optimizer else None

    def state_names(self, name: str) -> tuple[str, ...]:
        if not self._has_optimizer:
            return ()
        stems = sorted(path.stem for path in (self._path / ZERO / name).glob("*.pt"))
        return tuple(stem for stem in stems if stem not in (FP32, STEP))

    def steps(self, name: str) -> int | None:
        if not self._has_optimizer:
            return None
        path = self._path / ZERO / name / f"{STEP}.pt"
        if path.is_file():
            return int(self._read(path))
        inner = self.common.get("optimizer_state_dict") or {}
        sources = [*self.common.get("param_groups", ()), *inner.get("state", {}).values()]
        return next((int(source[STEP]) for source in sources if STEP in source), None)

    def tensor(self, name: str, key: str) -> TensorReader:
        full = self.entry(name, FP32 if key == MASTER else key)[PARAM]
        return TensorReader(self.shapes[name], full.dtype, partial(self._read_part, full))

    def _read_part(self, full: Tensor, rows: range, columns: Columns | None) -> Tensor:
        part = part_of(full, rows, columns)
        self.bytes_read += part.nbytes
        return part

    @cached_property
    def run(self) -> Any:
        """DeepSpeed's file of the run."""
        path = next(iter(sorted(self._path.glob(STATES))), None)
        if path is None:
            raise user_error("checkpoint-file-missing", name=f"mp_rank_00{STATES[1:]}")
        return self._read(path)

    @cached_property
    def _flat_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters that DeepSpeed's converter has left flat, as from ZeRO 3."""
        groups = self.run.get("param_shapes") or []
        listed = groups if isinstance(groups, list) else [groups]
        return {name: tuple(shape) for group in listed for name, shape in group.items()}

    @cached_property
    def common(self) -> Any:
        """DeepSpeed's file of what the optimizer states have in common."""
        return self._read(self._path / ZERO / OPTIMIZER_STATE)

    def entry(self, name: str, stem: str) -> Mapping[str, Any]:
        """The content of a weight's file, with the full tensor, memory-mapped, as `PARAM`."""
        key = name, stem
        if key not in self._entries:
            path = self._path / ZERO / name / f"{stem}.pt"
            content = self._read(path)
            if isinstance(content, Tensor) and name in self._flat_shapes:
                content = {PARAM: content.view(self._flat_shapes[name])}
            if not isinstance(content, dict) or not isinstance(content.get(PARAM), Tensor):
                raise user_error("tensor-file-unreadable", path=path, error="it has no tensor")
            self._entries[key] = content
        return self._entries[key]


def open_states(
    checkpoint: Checkpoint, *, has_optimizer: bool = True
) -> SavedStates | UniversalStates:
    """The states of a checkpoint of either kind."""
    if checkpoint.is_universal:
        return UniversalStates(checkpoint.path, has_optimizer=has_optimizer)
    return SavedStates(checkpoint, has_optimizer=has_optimizer)
