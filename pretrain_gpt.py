#!/usr/bin/env python
"""Pretrain a GPT: read the settings, put the run together, train."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.engine.ds_config_merge import merge_file
from megatron_ds.launch import environment
from megatron_ds.launch.extension_locks import find_stale_locks
from megatron_ds.launch.lifecycle import process_lifecycle
from megatron_ds.launch.startup_timer import StartupTimer


def check(config: Config, world_size: int, warn: Callable[[str], None]) -> list[str]:
    """What the settings need of files and machine; loaded after --help has been answered."""
    from megatron_ds.training import preflight

    return preflight.check(config, world_size, warn)


def main() -> None:
    startup = StartupTimer()
    with process_lifecycle() as life:
        config = arguments.parse(
            sys.argv[1:],
            world_size=environment.world_size(),
            rank=environment.local_rank(),  # a file may be missing on one machine alone
            complete=merge_file,
            check=check,
        )
        startup.mark("settings")
        environment.require_no_stale_locks(find_stale_locks(environment.prepare_environment()))
        from megatron_ds.training.setup import pretrain  # after the settings: torch takes seconds

        startup.mark("libraries")
        code = pretrain(config, life, startup)
    sys.exit(code)


if __name__ == "__main__":
    main()
