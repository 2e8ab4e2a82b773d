"""Builds configurations of flags and DeepSpeed files. Has no tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config_merge import merge_file

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-4 --adam-beta2 0.95 --weight-decay 0.1 --train-iters 10"
)
WORLD_SIZE = 2


class Merged(NamedTuple):
    config: Config
    problems: list[Problem]
    warnings: list[Problem]


Merge = Callable[..., Merged]


def config_of(flags: str = "") -> Config:
    """The configuration of FLAGS and further flags, without its DeepSpeed file."""
    argv = f"{FLAGS} {flags}".split()
    return build_config(argv, world_size=WORLD_SIZE, warn=lambda _: None)[0]


def merged(flags: str) -> Merged:
    warnings: list[Problem] = []
    config, problems = merge_file(config_of(flags), WORLD_SIZE, warnings.append)
    return Merged(config, problems, warnings)


@pytest.fixture
def merge(tmp_path: Path) -> Merge:
    """Merges a file, as text or as an object, into FLAGS and further flags."""
    path = tmp_path / "ds.json"

    def merge(file: Any, flags: str = "") -> Merged:
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        return merged(f"{flags} --deepspeed_config {path}")

    return merge
