"""The programs of the package by name, and the file of the repository that starts each of them.

Knows their modules by name, and imports none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A program for the command line."""

    file: str
    """File in the repository."""
    module: str
    """Module with the function `main`, which takes the arguments and returns the exit status, and
    with `Options`, or `COMMANDS` if the program has several commands."""
    has_ranks: bool = False
    """Whether several processes may run it together."""


CONSOLE = "megatron-ds"
"""The command of an installed package."""
PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent
PROGRAMS = {
    "build-ops": Program("tools/build_ops.py", "megatron_ds.planning.build_ops"),
    "check-step": Program("tools/check_step.py", "megatron_ds.training.replay.step_command"),
    "client": Program("tools/text_generation_cli.py", "megatron_ds.inference.client"),
    "completion": Program("tools/completion.py", "megatron_ds.cli.completion"),
    "convert": Program("tools/convert_checkpoint.py", "megatron_ds.loading.programs.convert"),
    "data-usage": Program("tools/data_usage.py", "megatron_ds.usage.command"),
    "demo": Program("tools/demo.py", "megatron_ds.demo.command"),
    "doctor": Program("tools/doctor.py", "megatron_ds.doctor.command"),
    "ds-config": Program("tools/ds_config.py", "megatron_ds.engine.ds_config.command"),
    "evaluate": Program("tools/evaluate.py", "megatron_ds.evaluation.evaluate", has_ranks=True),
    "export-tokens": Program(
        "tools/export_tokens.py", "megatron_ds.data.foreign_tokens.export_program"
    ),
    "fork": Program("tools/fork.py", "megatron_ds.loading.programs.fork"),
    "generate": Program(
        "tools/generate_samples_gpt.py", "megatron_ds.inference.samples.command", has_ranks=True
    ),
    "import-tokens": Program(
        "tools/import_tokens.py", "megatron_ds.data.foreign_tokens.import_program"
    ),
    "inspect-checkpoint": Program(
        "tools/inspect_checkpoint.py", "megatron_ds.conversion.inspect.command"
    ),
    "inspect-dataset": Program(
        "tools/inspect_dataset.py", "megatron_ds.data.token_files.inspect_pair"
    ),
    "ladder": Program("tools/ladder.py", "megatron_ds.ladder.command"),
    "make-corpus": Program("tools/make_corpus.py", "megatron_ds.demo.corpus"),
    "merge-checkpoints": Program(
        "tools/merge_checkpoints.py", "megatron_ds.loading.programs.merge"
    ),
    "merge-datasets": Program(
        "tools/merge_datasets.py", "megatron_ds.data.token_files.merge_program"
    ),
    "plan": Program("tools/plan.py", "megatron_ds.planning.command"),
    "plot-loss": Program("tools/plot_loss.py", "megatron_ds.reports.plot_loss"),
    "prepare-cache": Program("tools/prepare_cache.py", "megatron_ds.training.start.prepare_cache"),
    "preprocess": Program("tools/preprocess_data.py", "megatron_ds.preprocess.command"),
    "report": Program("tools/report.py", "megatron_ds.reports.report"),
    "serve": Program(
        "tools/run_text_generation_server.py", "megatron_ds.server.command", has_ranks=True
    ),
    "slurm": Program("tools/slurm.py", "megatron_ds.slurm.command"),
    "train": Program("pretrain_gpt.py", "megatron_ds.training.run", has_ranks=True),
    "train-tokenizer": Program(
        "tools/train_tokenizer.py", "megatron_ds.preprocess.train_tokenizer"
    ),
    "unigram-loss": Program("tools/unigram_loss.py", "megatron_ds.evaluation.unigram_loss"),
    "verify-run": Program("tools/verify_run.py", "megatron_ds.training.replay.command"),
    "watch": Program("tools/watch.py", "megatron_ds.reports.watch"),
}


def summary(name: str) -> str:
    """The first sentence of the module of a program, which is not imported."""
    path = PACKAGE.joinpath(*PROGRAMS[name].module.split(".")[1:]).with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def is_installed() -> bool:
    """Whether this package is without its repository, as pip installs it."""
    return not (REPOSITORY / PROGRAMS["train"].file).is_file()


def start_words(name: str) -> list[str]:
    """The words after `python` that start a program from any folder.

    Its file, or without the repository its name, by which Python finds the installed package.
    """
    file = REPOSITORY / PROGRAMS[name].file
    return [str(file)] if file.is_file() else ["-m", "megatron_ds", name]


def training_words(launcher: Sequence[str]) -> list[str]:
    """The command of a training, as a message shows it: `torchrun ... pretrain_gpt.py`.

    Of an installed package, which has no such file: `torchrun ... -m megatron_ds train`.

    Args:
        launcher: The words before the program.
    """
    if not is_installed():
        return [*launcher, PROGRAMS["train"].file]
    is_deepspeed = Path(launcher[0]).name == "deepspeed"
    return [*launcher, "--module" if is_deepspeed else "-m", *start_words("train")[1:]]


def shown_name(file: str) -> str:
    """The name of a program in messages: its file's, or `megatron-ds NAME` if it was started so.

    Args:
        file: Name of the program's file; with a command, if it has several: `slurm.py status`.
    """
    path = Path(sys.argv[0])
    name = "".join(sys.argv[1:2])
    is_console = path.name == CONSOLE or path.resolve() == PACKAGE / "__main__.py"
    if not is_console or name not in PROGRAMS:
        return file
    _, _, command = file.partition(" ")
    return f"{CONSOLE} {name} {command}".rstrip()
