"""Fixtures: a process group of one rank, a configuration and its checkpoint manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.config import CheckpointConfig, Config, ModelConfig, ScheduleConfig
from megatron_ds.parallel.mesh import Mesh


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    assert config.checkpoint.save is not None
    return Path(config.checkpoint.save)


@pytest.fixture
def checkpoints(config: Config, logged: list[str]) -> CheckpointManager:
    return CheckpointManager(config, Mesh.build(1), logged.append)
