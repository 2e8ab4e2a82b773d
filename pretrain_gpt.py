#!/usr/bin/env python
"""Pretrains a GPT: reads the settings, checks them, builds the run and trains."""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_ds.launch import program_start

    program_start.begin()

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.launch import environment
from megatron_ds.launch.extension_locks import find_stale_locks
from megatron_ds.launch.lifecycle import process_lifecycle
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.loading.initial_load import merge_settings
from megatron_ds.loading.locations import stage
from megatron_ds.loading.options_from_checkpoint import with_saved_schedule

if TYPE_CHECKING:
    from megatron_ds.training.preflight import RunInputs


def main() -> None:
    startup = StartupTimer()
    opened: list[RunInputs | None] = []

    def complete(
        config: Config, world_size: int, warn: Callable[[str], None]
    ) -> tuple[Config, list[Problem]]:
        """Fills in the settings of the checkpoint to load and of the DeepSpeed file."""
        config, of_stores = stage(config)
        config, of_checkpoint = merge_settings(config, warn)
        config, of_file = merge_file(config, world_size, warn)
        config, of_schedule = with_saved_schedule(config, world_size, warn)
        return config, [*of_stores, *of_checkpoint, *of_file, *of_schedule]

    def check(
        config: Config, world_size: int, is_sound: bool, warn: Callable[[str], None]
    ) -> list[Problem]:
        """Checks files and machine; imported here, after --help has been answered."""
        from megatron_ds.training import preflight

        problems, inputs = preflight.check(config, world_size, is_sound, warn)
        opened.append(inputs)
        return problems

    with process_lifecycle() as life:
        environment.adopt_ranks()
        ops = environment.prepare_environment()  # before the checks import libraries
        config = arguments.parse(
            sys.argv[1:],
            world_size=environment.world_size(),
            rank=environment.local_rank(),  # a file may be missing on one machine only
            complete=complete,
            check=check,
        )
        startup.mark("settings")
        environment.require_no_stale_locks(find_stale_locks(ops))
        from megatron_ds.training.setup import pretrain  # torch takes seconds to import

        startup.mark("libraries")
        (inputs,) = opened
        assert inputs is not None
        code = pretrain(config, inputs, life, startup)
    sys.exit(code)


if __name__ == "__main__":
    main()
