#!/usr/bin/env python
"""Print the complete DeepSpeed JSON of a run's command line, without starting anything.

The JSON goes to the output; where its values that are no defaults come from, and the warnings, go
to the error stream. It is what the run writes as ds_config.json into --save, and can be given to
--deepspeed_config.

    python tools/ds_config.py --world-size 8 FLAGS OF pretrain_gpt.py > ds_config.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.engine.ds_config import build_ds_config, merge_file, value_origins
from megatron_ds.tokenizer import build_tokenizer

NAME = Path(__file__).name


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=NAME,
        usage="%(prog)s [--world-size N] FLAGS OF pretrain_gpt.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size",
        "--world_size",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that the run would have (default: 1)",
    )
    own, flags = parser.parse_known_args(argv)
    if own.world_size < 1:
        parser.error(f"--world-size {own.world_size}: must be positive")
    config = arguments.parse(flags, world_size=own.world_size, complete=merge_file, program=NAME)
    config = _with_vocabulary(config)
    generated = build_ds_config(config, config.parallel.data_parallel_size(own.world_size))
    print(json.dumps(generated, indent=2))
    rows = value_origins(config)
    width = max((len(key) for key in rows), default=0)
    for key, source in rows.items():
        print(f"{key:<{width}}  {source}", file=sys.stderr)


def _with_vocabulary(config: Config) -> Config:
    """The size of the model, which bounds the buckets, depends on the tokenizer."""
    try:
        tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size)
    except (ValueError, OSError) as error:
        print(
            f"WARNING: the tokenizer cannot be read ({error}): zero_optimization."
            "reduce_bucket_size is not cut to the size of the model",
            file=sys.stderr,
        )
        return config
    return config.with_vocab(tokenizer.vocab_size)


if __name__ == "__main__":
    main(sys.argv[1:])
