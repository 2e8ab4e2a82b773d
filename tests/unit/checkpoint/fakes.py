"""An engine that writes two small files, helpers that save and load it, and a disk that fails."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ds.checkpoint.files.native_reader import SavedStates
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.config import CheckpointConfig, Config, ModelConfig
from megatron_ds.engine.deepspeed.checkpoint_io import DeepSpeedSnapshot
from megatron_ds.engine.deepspeed.partitions import FlatPartition, ParameterPlace
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.parallel.weights import GATE_UP, ShardSpec
from megatron_ds.train_state import TrainState

Managers = Callable[..., CheckpointManager]
"""The fixture `manager`."""


class Crash(Exception):
    """The end of the process."""


class FakeSnapshot(DeepSpeedSnapshot):
    """Has a file in a folder below. Without a copy it has the content of the time of the write."""

    shared: FakeEngine | None = None

    def write(self, folder: Path) -> dict[str, FileRecord]:
        (folder / "below").mkdir()
        if self.shared is not None:
            self.states = {**self.states, "model_states.pt": {"content": self.shared.content}}
        return super().write(folder)


class FakeEngine:
    """Saves and restores `content`; records what it was asked to load."""

    def __init__(self) -> None:
        self.content = ""
        self.offset = 0
        self.loaded: tuple[Path, str] | None = None
        self.resharded: SavedStates | None = None
        self.ds_config: dict[str, Any] = {}

    def parameter_count(self) -> int:
        return 30

    def sharded_experts(self) -> tuple[str, ...]:
        return ()

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(0, (3, 3), GATE_UP)}

    def partitions(self) -> list[FlatPartition]:
        return [FlatPartition(30, (ParameterPlace("weight", (6, 5), self.offset),))]

    def snapshot(self, *, copy: bool) -> DeepSpeedSnapshot:
        states: dict[str, Any] = {"model_states.pt": {"content": self.content}}
        states["below/optim_states.pt"] = torch.zeros(3)
        snapshot = FakeSnapshot(states)
        snapshot.shared = None if copy else self
        return snapshot

    def load(self, folder: Path, tag: str) -> None:
        self.loaded = folder, tag
        self.content = read_tensors(folder / tag / "model_states.pt")["content"]

    def reshard(self, source: SavedStates) -> None:
        self.resharded = source


def state_at(iteration: int) -> TrainState:
    return TrainState(
        iteration, 3 * iteration, 12 * iteration, 3 * iteration, iteration, skipped_iterations=0
    )


def save(
    checkpoints: CheckpointManager, *iterations: int, in_background: bool = False
) -> FakeEngine:
    """Saves one after the other, and waits for the end of each."""
    engine = FakeEngine()
    for iteration in iterations:
        begin(checkpoints, iteration, engine, in_background=in_background)
        checkpoints.saving.advance(wait=True)
    return engine


def begin(
    checkpoints: CheckpointManager,
    iteration: int,
    engine: FakeEngine,
    *,
    in_background: bool = True,
) -> None:
    engine.content = f"of iteration {iteration}"
    checkpoints.saving.save(engine, state_at(iteration), in_background=in_background)


def load(checkpoints: CheckpointManager) -> tuple[TrainState | None, FakeEngine]:
    engine = FakeEngine()
    found = checkpoints.restoring.select()
    if found is None:
        return None, engine
    return checkpoints.restoring.load(engine, found), engine


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def watch_disk(
    patch: pytest.MonkeyPatch, inside: Path, before: Callable[[str, Path], None]
) -> None:
    """Calls before(kind, path) before each open for writing, fsync and rename below a folder."""
    open_file = builtins.open
    fsync = os.fsync

    def call(kind: str, path: Any) -> None:
        if Path(path).is_relative_to(inside):
            before(kind, Path(path))

    def opening(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode[0] in "wx":
            call("open", path)
        return open_file(path, mode, *args, **kwargs)

    def syncing(descriptor: int) -> None:
        call("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def moving(move: Callable[[Any, Any], None], source: Any, target: Any) -> None:
        call("rename", target)
        move(source, target)

    patch.setattr(builtins, "open", opening)
    patch.setattr(os, "fsync", syncing)
    patch.setattr(os, "rename", functools.partial(moving, os.rename))
    patch.setattr(os, "replace", functools.partial(moving, os.replace))


def fail_at(
    number: int, error: Exception, patch: pytest.MonkeyPatch, inside: Path, kinds: str = ""
) -> None:
    """Raises an error before the n-th of these operations of `watch_disk` (by default all)."""
    numbers = itertools.count()

    def before(kind: str, path: Path) -> None:
        if kind in (kinds or kind) and next(numbers) == number:
            raise error

    watch_disk(patch, inside, before)


def records_of(folder: Path) -> dict[str, FileRecord]:
    """The records of the files below a folder, by path relative to it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): FileRecord.of(path.read_bytes()) for path in files}


def flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def flip_a_bit(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes(), random.Random(0)))


def truncated(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def run_of(load: object, **options: Any) -> Config:
    """A configuration that loads; other options of checkpoints, or of the model if it has them."""
    names = {item.name for item in dataclasses.fields(CheckpointConfig)}
    model = {name: value for name, value in options.items() if name not in names}
    checkpoint = {name: value for name, value in options.items() if name in names}
    return Config(
        model=ModelConfig(**model),
        checkpoint=CheckpointConfig(load=None if load is None else str(load), **checkpoint),
        given=frozenset(options),
    )
