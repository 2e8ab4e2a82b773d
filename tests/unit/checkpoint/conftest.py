"""Fixtures: a configuration and its checkpoint manager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.config import GROUPS, CheckpointConfig, Config, ModelConfig, ScheduleConfig
from megatron_ds.parallel.mesh import Mesh


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = str(tmp_path / "run")
    return Config(
        model=ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4),
        schedule=ScheduleConfig(micro_batch_size=1, global_batch_size=4),
        checkpoint=CheckpointConfig(save=folder, load=folder),
    )


@pytest.fixture
def folder(config: Config) -> Path:
    return Path(config.checkpoint.save)


@pytest.fixture
def manager(
    one_process: None, config: Config, logged: list[str]
) -> Callable[..., CheckpointManager]:
    """manager(**options): of the configuration with other groups or checkpoint options.

    `stored` is a tokenizer that it stores, and `lock` that of its folder.
    """

    def make(stored: Any = None, lock: Any = None, **options: Any) -> CheckpointManager:
        groups = {name: options.pop(name) for name in GROUPS.keys() & options.keys()}
        changed = dataclasses.replace(config.with_values(options), **groups)
        mesh = Mesh.build(1)
        folders = RunFolders.local(changed.checkpoint)
        run = RunCheckpoints(changed, mesh, logged.append, CollectiveIO(), folders, stored)
        return CheckpointManager(run, lock)

    return make


@pytest.fixture
def checkpoints(manager: Callable[..., CheckpointManager]) -> CheckpointManager:
    return manager()
