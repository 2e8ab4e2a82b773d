"""DeepSpeed's JSON: generate, explain, validate and migrate it, without starting a run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron_ds import cli
from megatron_ds.cli import arguments
from megatron_ds.cli.command import print_warning, table_of
from megatron_ds.cli.subcommands import Command, Commands, run_command
from megatron_ds.config import Config
from megatron_ds.config.deepspeed_file import DeepSpeedFile, Json
from megatron_ds.config.devices import is_host
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config import explain
from megatron_ds.engine.ds_config import migrate as migration
from megatron_ds.engine.ds_config.file import parse_file
from megatron_ds.engine.ds_config.generate import build_ds_config, value_origins
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.engine.optimizers.adam_kernels import available_on, only_torch
from megatron_ds.launch import device
from megatron_ds.launch.output import columns
from megatron_ds.tokenizer import build_tokenizer

PROGRAM = "ds_config.py"
FILE_FLAGS = {"deepspeed_config": "FILE"}
UNKNOWN_SHAPE = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 1 << 20,
    "micro_batch_size": 1, "lr": 1e-4, "train_iters": 1 << 40, "data_path": ("unknown",),
}  # fmt: skip
"""Values that complete a file which is validated without the flags of a run."""


@dataclass(frozen=True)
class Generate(Command, program=PROGRAM):
    """Prints the complete DeepSpeed JSON of a run's command line.

    The JSON goes to the standard output; the origins of its values that are not defaults, and the
    warnings, go to the standard error. The run writes the same JSON as ds_config.json into --save;
    it can be given to --deepspeed_config, except with Muon and 8-bit Adam.

        python tools/ds_config.py generate --world-size 8 FLAGS OF pretrain_gpt.py > ds.json

    Accepts all flags of pretrain_gpt.py. The word "generate" may be left out.
    """

    world_size: int = option_field(1, minimum=1)
    """Number of processes of the run."""


@dataclass(frozen=True)
class Explain(Command, program=PROGRAM):
    """Explains the DeepSpeed JSON of a run's command line, or single keys.

    For every key of the JSON: its value, its origin (a flag, a line of a file, a default, or what
    it is derived from) and what it does. With names of keys or blocks and no flags, what is known
    of them: type, flags and DeepSpeed's default.

        python tools/ds_config.py explain --world-size 8 FLAGS OF pretrain_gpt.py

        python tools/ds_config.py explain zero_optimization.stage gradient_clipping

    Accepts all flags of pretrain_gpt.py.
    """

    keys: tuple[str, ...] = option_field((), nargs="*", metavar="KEY", positional=True)
    """Keys or blocks (default: all of the JSON)."""
    world_size: int = option_field(1, minimum=1)
    """Number of processes of the run."""
    print_json: bool = option_field(False, flag="json")
    """Print JSON."""


@dataclass(frozen=True)
class Validate(Command, program=PROGRAM):
    """Reports all problems of a DeepSpeed file, with their lines.

    With the flags of a run also what contradicts them; without, what is wrong for every run. The
    exit status is 2 if there are problems. Keys without effect are warnings.

        python tools/ds_config.py validate ds.json --world-size 8 FLAGS OF pretrain_gpt.py

    Accepts all flags of pretrain_gpt.py.
    """

    FIELD_FLAGS: ClassVar[dict[str, str]] = FILE_FLAGS
    file: str = option_field("", metavar="FILE", positional=True, required=True)
    """DeepSpeed file."""
    world_size: int | None = option_field(None, minimum=1)
    """Number of processes of the run (default: 1, or what the file implies)."""


@dataclass(frozen=True)
class Migrate(Command, program=PROGRAM):
    """Rewrites a file for an earlier version of DeepSpeed, 0.5 or later, with the same meaning.

    The new file goes to the standard output, the list of changes to the standard error: translated
    keys, removed features with their successor, and absent keys whose default has changed, which
    are written with their former default if training would differ.

        python tools/ds_config.py migrate old.json --from-version 0.9 > ds.json
    """

    FIELD_FLAGS: ClassVar[dict[str, str]] = FILE_FLAGS
    file: str = option_field("", metavar="FILE", positional=True, required=True)
    """DeepSpeed file."""
    from_version: str | None = option_field(None, metavar="VERSION")
    """Version of DeepSpeed that the file was written for, such as 0.9 (default: the oldest one with
    all of its keys)."""
    output: str | None = option_field(None, metavar="FILE")
    """New file, which must not exist (default: standard output)."""
    new_defaults: bool = option_field(False)
    """Leave defaults that have changed as they are now, instead of writing former ones."""


def generate(options: Generate, training: Sequence[str]) -> None:
    config, generated = _generated(training, options.world_size)
    print(json.dumps(generated, indent=2))
    for line in columns(value_origins(config).items()):
        print(line, file=sys.stderr)


def explain_keys(options: Explain, training: Sequence[str]) -> None:
    names = [key for name in options.keys for key in explain.find(name)]
    if options.keys and not training:
        facts = [explain.facts(key) for key in dict.fromkeys(names)]
        print(json.dumps(facts, indent=1) if options.print_json else "\n".join(map(_lines, facts)))
        return
    config, generated = _generated(training, options.world_size)
    rows = [row for row in explain.rows(config, generated) if not options.keys or row.key in names]
    if options.print_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        shown = [(row.key, json.dumps(row.value), row.origin, row.description) for row in rows]
        _print_table(("key", "value", "origin", "what it does"), shown)


def validate(options: Validate, training: Sequence[str]) -> None:
    file = parse_file(options.file)
    argv = [*training, "--deepspeed_config", options.file]
    if training:
        arguments.parse(
            argv, world_size=options.world_size or 1, complete=merge_file, program=Validate.PROGRAM
        )
    else:
        table = table_of(Validate)
        _, problems = arguments.build_config(
            argv,
            world_size=options.world_size or _implied_world_size(file),
            warn=lambda warning: print_warning(warning, table),
            complete=lambda file, *of_run: merge_file(file.with_values(UNKNOWN_SHAPE), *of_run),
        )
        about_file = [problem for problem in problems if options.file in problem]
        if about_file:
            cli.fail(about_file, table)
    print(f"{options.file}: valid{'' if training else ' (without the flags of a run)'}")


def migrate(options: Migrate, _: Sequence[str]) -> None:
    result = migration.migrate(
        options.file, options.from_version, new_defaults=options.new_defaults
    )
    print(migration.text(result, options.file), end="", file=sys.stderr)
    text = json.dumps(result.values, indent=2) + "\n"
    if options.output is None:
        print(text, end="")
    else:
        with Path(options.output).open("x", encoding="utf-8") as output:
            output.write(text)


COMMANDS: Commands = {
    "generate": (Generate, generate),
    "explain": (Explain, explain_keys),
    "validate": (Validate, validate),
    "migrate": (Migrate, migrate),
}


def _generated(training: Sequence[str], world_size: int) -> tuple[Config, Json]:
    """The configuration of a command line and its DeepSpeed configuration."""
    config = arguments.parse(training, world_size=world_size, complete=merge_file, program=PROGRAM)
    config = _with_vocabulary(config)
    dp_size = config.parallel.data_parallel_size(config.runtime.dry_run or world_size)
    device_type = device.kind()
    is_available = only_torch if is_host(device_type) else available_on(device_type)
    return config, build_ds_config(config, dp_size, device_type, is_available)


def _with_vocabulary(config: Config) -> Config:
    """The configuration with the vocabulary size; the model size bounds the buckets."""
    try:
        tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size or None)
    except (ValueError, OSError) as error:
        warning = Problem("vocabulary-size-unknown", error=error)
        print(f"WARNING: {warning.render()}", file=sys.stderr)
        return config
    return config.with_vocab(tokenizer.vocab_size)


def _implied_world_size(file: DeepSpeedFile) -> int:
    """The number of processes that the batch sizes of a file imply, or else its hpZ groups."""

    def size(key: str) -> int:
        value = file.get(key)
        return value if type(value) is int and value > 0 else 1

    per_rank = size("train_micro_batch_size_per_gpu") * size("gradient_accumulation_steps")
    ranks = size("train_batch_size") // per_rank
    if file.get("train_batch_size") is None:
        ranks = size("zero_optimization.zero_hpz_partition_size")
    return max(1, ranks)


def _lines(fact: dict[str, Any]) -> str:
    """Formats the facts about a key as the JSON has them."""
    known = {name: value for name, value in fact.items() if value not in (None, [])}
    shown = (value if isinstance(value, str) else json.dumps(value) for value in known.values())
    return "".join(f"{name}: {value}\n" for name, value in zip(known, shown, strict=True))


def _print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table that fills a terminal; without one, a line for each row."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*titles, box=None, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    for line in columns([titles, *rows]) if rows else ():
        print(line)


def main(argv: Sequence[str]) -> int:
    with_training = COMMANDS.keys() - {"migrate"}
    return run_command(PROGRAM, COMMANDS, argv, with_training=with_training, default="generate")
