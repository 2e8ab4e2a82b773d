"""An engine that writes two small files, and helpers that save and load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.engine.ds_checkpoint_io import read_tensors, write_tensors
from megatron_ds.parallel.sharding import ShardSpec
from megatron_ds.train_state import TrainState


class FakeEngine:
    """Saves and restores `content`; records what it was asked to load."""

    def __init__(self) -> None:
        self.content = ""
        self.loaded: tuple[Path, str] | None = None
        self.ds_config: dict[str, Any] = {}

    def parameter_count(self) -> int:
        return 30

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(0, (6,))}

    def save(self, folder: Path, tag: str) -> None:
        write_tensors({"content": self.content}, folder / tag / "model_states.pt")
        (folder / tag / "below").mkdir()
        write_tensors(torch.zeros(3), folder / tag / "below" / "optim_states.pt")

    def load(self, folder: Path, tag: str) -> None:
        self.loaded = folder, tag
        self.content = read_tensors(folder / tag / "model_states.pt")["content"]


def state_at(iteration: int) -> TrainState:
    return TrainState(
        iteration, 3 * iteration, 12 * iteration, 3 * iteration, iteration, skipped_iterations=0
    )


def save(checkpoints: CheckpointManager, *iterations: int) -> FakeEngine:
    engine = FakeEngine()
    for iteration in iterations:
        engine.content = f"of iteration {iteration}"
        checkpoints.save(engine, state_at(iteration))  # type: ignore[arg-type]
    return engine


def load(checkpoints: CheckpointManager) -> tuple[TrainState | None, FakeEngine]:
    engine = FakeEngine()
    found = checkpoints.select()
    if found is None:
        return None, engine
    return checkpoints.load(engine, found), engine  # type: ignore[arg-type]
