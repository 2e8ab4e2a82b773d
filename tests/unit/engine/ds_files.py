"""Builds configurations of flags and DeepSpeed files. Has no tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.merge import merge_file

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))
FLAGS_OF = {"zero3_nvme": "--nvme-path /tmp", "zero3_hpz": "--zero-hpz-partition-size 2"}
"""What a file leaves to flags."""
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


def merged(flags: str, *, without: str = "", given: Mapping[str, Any] | None = None) -> Merged:
    """Merges the file of --deepspeed_config into FLAGS.

    Args:
        flags: Further flags.
        without: Flag of FLAGS that is not given.
        given: Values of fields that flags could give.
    """
    argv = f"{FLAGS.replace(without, '')} {flags}".split()
    config = build_config(argv, world_size=WORLD_SIZE, warn=lambda _: None)[0]
    config = config.with_values(dict(given or {}))
    config = dataclasses.replace(config, given=config.given | frozenset(given or ()))
    warnings: list[Problem] = []
    return Merged(*merge_file(config, WORLD_SIZE, warnings.append), warnings)
