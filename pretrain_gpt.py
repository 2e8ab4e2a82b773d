#!/usr/bin/env python
"""Pretrain a GPT: read the settings, put the run together, train."""

from __future__ import annotations

import sys

from megatron_ds import arguments, runtime
from megatron_ds.engine import ds_config
from megatron_ds.extensions import stale_locks


def main() -> None:
    config = arguments.parse(
        sys.argv[1:],
        world_size=runtime.world_size(),
        rank=runtime.rank(),
        complete=ds_config.complete,
    )
    runtime.refuse_stale_locks(stale_locks(runtime.prepare_environment()))
    from megatron_ds.training.trainer import pretrain  # after the settings: torch takes seconds

    with runtime.errors_in_words():
        pretrain(config)


if __name__ == "__main__":
    main()
