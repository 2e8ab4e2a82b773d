"""The command that derives a ladder from a recipe and writes its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ds.cli import arguments
from megatron_ds.cli.command import print_warning, table_of
from megatron_ds.config import Config, yaml_file
from megatron_ds.config.problems import Problem, UserError, counted
from megatron_ds.fileio.atomic import write_atomically
from megatron_ds.ladder.options import Plan
from megatron_ds.ladder.records import RUN_NAME, LadderRecord, RunEntry
from megatron_ds.launch.output import columns
from megatron_ds.scaling.rungs import Ladder, Rung, ladder_of
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.training.run import complete_settings

FILES_OF_ONE_RUN = ("tensorboard_dir", "log_dir", "metrics_jsonl", "metrics_csv", "wandb_save_dir")
"""Options of files that the runs would overwrite for each other; each has those of its folder."""
SHORT = 100
"""Steps below which a run hardly leaves its warmup."""


def plan(options: Plan, training: Sequence[str]) -> None:
    """Writes FOLDER/ladder.json and the settings of the runs, and prints a table of the runs.

    Raises:
        UserError: If the settings have problems, or no ladder leads to the run.
    """
    warn = partial(print_warning, table=table_of(Plan))
    config, problems = _settings(training, options.ranks_per_run, warn)
    if problems:
        raise UserError(*problems)
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size or None)
    counted_config = config.with_vocab(tokenizer.vocab_size)
    ladder = ladder_of(counted_config, options.settings)
    for warning in _warnings(config, ladder):
        warn(warning)
    record = _write(options, config, ladder)
    print_table(record)
    print(f"wrote {counted(len(record.runs), 'run')}; train them by")
    print(f"    python tools/ladder.py run {options.folder}")


def _settings(training: Sequence[str], ranks: int, warn: Any) -> tuple[Config, list[Problem]]:
    """The configuration of flags of pretrain_gpt.py, and its problems."""

    def complete(
        config: Config, world_size: int, warn: arguments.Warn
    ) -> tuple[Config, list[Problem]]:
        config, _, problems = complete_settings(config, world_size, warn)
        return config, problems

    return arguments.build_config(training, world_size=ranks, warn=warn, complete=complete)


def _warnings(config: Config, ladder: Ladder) -> Iterator[Problem]:
    """Yields what makes the prediction of a ladder doubtful."""
    if not config.model.use_mup:
        yield Problem("ladder-without-mup", "use_mup")
    steps = min(rung.steps for rung in ladder.rungs)
    if steps < SHORT:
        yield Problem("ladder-of-short-runs", "budget", steps=steps)
    if config.evaluation.eval_iters == 0:
        yield Problem("ladder-without-evaluation", "eval_iters")


def _write(options: Plan, config: Config, ladder: Ladder) -> LadderRecord:
    """Writes the settings of the runs, then the list of them.

    Raises:
        UserError: If the settings of a run have problems.
    """
    folder = Path(options.folder)
    entries: list[RunEntry] = []
    texts: dict[Path, str] = {}
    for rung in ladder.rungs:
        for seed in range(options.seeds):
            name = f"{RUN_NAME}{len(entries)}"
            seeded = _for_folder(rung, str(folder / name), config.runtime.seed + seed)
            problems = seeded.config.problems(options.ranks_per_run)
            if problems:
                raise UserError(*(problem.with_prefix(f"{name}: ") for problem in problems))
            entries.append(RunEntry.of(name, seeded))
            texts[folder / f"{name}.yaml"] = yaml_file.dump(seeded.config)
    target = RunEntry.of("target", ladder.target)
    record = LadderRecord(folder, target, tuple(entries), options.ranks_per_run)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomically(path, text.encode())
    record.write()
    return record


def _for_folder(rung: Rung, save: str, seed: int) -> Rung:
    """A run with its seed and folders."""
    values = {"save": save, "load": save, "seed": seed, **dict.fromkeys(FILES_OF_ONE_RUN)}
    config = rung.config.with_values(values)
    config = dataclasses.replace(config, given=config.given | {"save", "load", "seed"})
    return dataclasses.replace(rung, config=config)


def print_table(record: LadderRecord) -> None:
    """Prints the runs, and the large run below them."""
    total = sum(run.operations for run in record.runs)
    share = total / record.target.operations
    for line in columns([HEADER, *map(row, (*record.runs, record.target))]):
        print(line)
    print(f"all runs: {total:.3g} operations, {share:.2%} of the large run's")


HEADER = (
    "run",
    "layers",
    "hidden",
    "parameters",
    "tokens",
    "per parameter",
    "batch",
    "steps",
    "operations",
)


def row(run: RunEntry) -> tuple[str, ...]:
    """The cells of a run in the order of `HEADER`."""
    return (
        run.name,
        str(run.layers),
        str(run.hidden_size),
        f"{run.parameters:,}",
        f"{run.tokens:,}",
        f"{run.ratio:.3g}",
        str(run.samples),
        f"{run.steps:,}",
        f"{run.operations:.3g}",
    )
