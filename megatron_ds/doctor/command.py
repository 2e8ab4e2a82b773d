"""Shows how a training script, command or configuration file of another program starts here."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from megatron_ds import cli
from megatron_ds.cli.doctor.commands import read_source
from megatron_ds.cli.doctor.diagnosis import Diagnosis, diagnose, flags_of, joined
from megatron_ds.cli.doctor.frameworks import TrainingCommand
from megatron_ds.cli.doctor.tiny import shrink
from megatron_ds.config import GROUP_OF_FIELD, Config, yaml_file
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.programs import start_words

LAUNCHER = ("-m", "torch.distributed.run", "--standalone")
DOCUMENTS = 64
"""Number of documents that --try makes up, and of tokens of each."""


@dataclass(frozen=True)
class Options:
    """Shows how a training script, command or configuration file of another program starts here.

    Reads a shell script or Slurm file, a command line, a YAML file of Primus, nanotron, gpt-neox or
    Megatron-LM's --yaml-cfg, a TOML file of torchtitan, or the settings or flags of Hugging Face's
    Trainer. The standard output is our command; what was not read, what has another meaning and
    what has no counterpart goes to the standard error. The exit status is 1 if anything has no
    counterpart.

        python tools/doctor.py train.sh [ARGUMENTS OF THE SCRIPT]

        python tools/doctor.py --try deepspeed --num_gpus 8 pretrain_gpt.py FLAGS

    Options come before a command. A script is read, and nothing of it executed, without --execute.
    """

    PROGRAM: ClassVar[str] = "doctor.py"

    source: tuple[str, ...] = option_field((), nargs="*", metavar="SCRIPT", positional=True)
    """File and its arguments, or a command."""
    variables: tuple[str, ...] = option_field(
        (), nargs="*", flag="set", metavar="NAME=VALUE", repeatable=True
    )
    """Environment variables."""
    world_size: int | None = option_field(None, minimum=1)
    """Number of processes, if the script leaves it open."""
    print_yaml: bool = option_field(False, flag="yaml")
    """Print a file for --config."""
    tries: bool = option_field(False, flag="try")
    """Train two steps on the CPU at a tiny size, with all features."""
    executes: bool = option_field(False, flag="execute")
    """EXECUTE it with stand-ins for launchers; all else in it takes effect."""


def doctor(options: Options, arguments: Sequence[str]) -> int:
    settings = list(itertools.takewhile(lambda word: "=" in word, options.variables))
    words = [*options.variables[len(settings) :], *options.source, *arguments]
    if not words:
        raise user_error("doctor-no-source")
    variables = dict(word.split("=", 1) for word in settings)
    commands = read_source(words, variables, options.world_size, executes=options.executes)
    status = 0
    for command in commands:
        _add_model(command)
        with tempfile.TemporaryDirectory() as name:
            result = diagnose(command, _complete, Path(name))
            print(result.report(), file=sys.stderr)
            text = yaml_file.dump(result.config) if options.print_yaml else result.command_text()
            print(text, end="", flush=True)
            status |= bool(result.lacking) | (options.tries and _train(result, Path(name)))
    return status


def _add_model(command: TrainingCommand) -> None:
    """Adds the flags of the model whose folder a command names."""
    if command.model is None:
        return
    from megatron_ds.conversion.huggingface.read_config import read_settings

    try:
        settings = read_settings(command.model).settings
    except (UserError, OSError) as error:
        command.lacking.append(f"the model {command.model}: {error}")
        return
    unchanged = Config()
    values = {
        name: value
        for name, value in {**settings.defaults, **settings.fixed}.items()
        if value not in (getattr(getattr(unchanged, GROUP_OF_FIELD[name]), name), ())
    }
    config = replace(unchanged.with_values(values), given=frozenset(values))
    command.flags[:0] = joined(f for f in flags_of(config) if f"--{f[0]}" not in command.flags)


def _train(diagnosis: Diagnosis, folder: Path) -> bool:
    """Trains the settings at a tiny size; returns whether that fails."""
    flags, processes = shrink(diagnosis.checked, diagnosis.world_size, folder)
    with pair_writer(folder / "data", "uint16") as writer:
        for start in range(DOCUMENTS):
            document = (np.arange(DOCUMENTS) * (start + 1) % 256).astype(np.uint16)
            writer.add_documents(document, [len(document)])
    print(f"trying {processes} processes: pretrain_gpt.py {shlex.join(flags)}", file=sys.stderr)
    launcher = [*LAUNCHER, "--nproc_per_node", str(processes)] if processes > 1 else []
    program = [sys.executable, *launcher, *start_words("train"), *flags]
    environment = ["env", "DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1"]
    return subprocess.call([*environment, *program], cwd=folder, stdout=sys.stderr) != 0


def _complete(
    config: Config, world_size: int, warn: Callable[[Problem], None]
) -> tuple[Config, list[Problem]]:
    """Fills in the DeepSpeed file, and the options of a Hugging Face model."""
    if "hf:" in f"{config.checkpoint.load} {config.checkpoint.pretrained_checkpoint}":
        from megatron_ds.training.run import complete_settings

        config, _, problems = complete_settings(config, world_size, warn)
        return config, problems
    return merge_file(config, world_size, warn)


def main(argv: Sequence[str]) -> int:
    arguments: list[str] = []  # of the script, or of the command
    return cli.run(Options, lambda options: doctor(options, arguments), argv, unknown=arguments)
