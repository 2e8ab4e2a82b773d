#!/usr/bin/env python
"""Print the complete DeepSpeed JSON of a run's command line, without starting anything."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

import json
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ds import cli
from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.generate import build_ds_config, value_origins
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.engine.optimizers.adam_kernels import available_on, only_torch
from megatron_ds.launch import device
from megatron_ds.tokenizer import build_tokenizer


@dataclass(frozen=True)
class Options:
    """Prints the complete DeepSpeed JSON of a run's command line, without starting anything.

    The JSON goes to the standard output; the origins of its values that are not defaults, and the
    warnings, go to the standard error. The run writes the same JSON as ds_config.json into --save;
    it can be given to --deepspeed_config.

        python tools/ds_config.py --world-size 8 FLAGS OF pretrain_gpt.py > ds_config.json

    All other flags are those of pretrain_gpt.py.
    """

    world_size: int = option_field(1, "number of processes of the run", minimum=1)


def _with_vocabulary(config: Config) -> Config:
    """The configuration with the vocabulary size; the model size bounds the buckets."""
    try:
        tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size or None)
    except (ValueError, OSError) as error:
        warning = Problem("vocabulary-size-unknown", error=error)
        print(f"WARNING: {warning.render()}", file=sys.stderr)
        return config
    return config.with_vocab(tokenizer.vocab_size)


def main(argv: Sequence[str]) -> None:
    training: list[str] = []
    world_size = cli.parse(Options, argv, unknown=training).world_size
    config = arguments.parse(
        training, world_size=world_size, complete=merge_file, program="ds_config.py"
    )
    config = _with_vocabulary(config)
    dp_size = config.parallel.data_parallel_size(world_size)
    kind = device.kind()
    is_available = only_torch if kind == "cpu" else available_on(kind)
    generated = build_ds_config(config, dp_size, kind, is_available)
    print(json.dumps(generated, indent=2))
    rows = value_origins(config)
    width = max((len(key) for key in rows), default=0)
    for key, source in rows.items():
        print(f"{key:<{width}}  {source}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
