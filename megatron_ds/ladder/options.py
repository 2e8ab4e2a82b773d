"""Options of the commands of tools/ladder.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.cli.subcommands import Command
from megatron_ds.config.checks import drawing_problems, output_problems
from megatron_ds.config.fields import option_field, when
from megatron_ds.config.problems import Problem
from megatron_ds.ladder.records import is_ladder
from megatron_ds.reports.history import run_problems
from megatron_ds.scaling.law import SEEDS_NOISE
from megatron_ds.scaling.rungs import BATCH_EXPONENT, DEFAULT_RUNS, SIZE_FACTOR, LadderSettings

PROGRAM = "ladder.py"
LAUNCHERS = ("process", "slurm", "ray")
SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class Plan(Command, program=PROGRAM):
    """Derives a ladder of small runs from the settings of a large one, and writes its files.

    The small models have fewer attention heads, and in proportion to them all sizes that grow with
    the width; with --mup-base-num-layers fewer layers as well. FOLDER/ladder.json lists the runs,
    and FOLDER/run-N.yaml has the settings of each.

        python tools/ladder.py plan ladders/first --config recipe.yaml --data-path corpus ...
        python tools/ladder.py run ladders/first

    Accepts all flags of pretrain_gpt.py.
    """

    folder: str = option_field("", metavar="FOLDER", positional=True, required=True)
    """New folder of the ladder."""
    runs: int = option_field(DEFAULT_RUNS, minimum=2)
    """Number of sizes."""
    size_factor: float = option_field(SIZE_FACTOR, above=1)
    """Ratio of the parameters of neighbouring sizes."""
    sizes: tuple[float, ...] = option_field((), nargs="*", metavar="PARAMETERS", above=0)
    """Sizes instead of --runs, such as 1e6 2e6 4e6: parameters that multiply each token, without
    the embedding. The nearest number of heads is taken."""
    budget: str | None = option_field(None, metavar="OPERATIONS")
    """Operations of all runs, or a percentage of the large run's such as 1% (the default), from
    which the sizes follow; next to --sizes the tokens do."""
    tokens_per_parameter: tuple[float, ...] = option_field((), nargs="*", above=0)
    """Tokens of each run divided by its parameters, or several, for each of which every size is
    trained (default: the large run's). Several are needed for a law of parameters and tokens."""
    batch_exponent: float = option_field(BATCH_EXPONENT, minimum=0, maximum=1)
    """The batch is that of the large run times this power of the ratio of the tokens; 0 keeps
    it."""
    seeds: int = option_field(1, minimum=1)
    """Runs of each size and length, with different seeds."""
    ranks_per_run: int = option_field(1, minimum=1)
    """Processes of each run, which are data-parallel."""

    @property
    def settings(self) -> LadderSettings:
        """What the ladder is derived from."""
        budget, share = (None, None) if self.budget is None else parse_budget(self.budget)
        return LadderSettings(
            runs=self.runs,
            sizes=self.sizes,
            budget=budget,
            share=share,
            tokens_per_parameter=self.tokens_per_parameter,
            batch_exponent=self.batch_exponent,
            size_factor=self.size_factor,
            replicas=self.ranks_per_run,
            seeds=self.seeds,
        )

    def problems(self) -> Iterator[Problem]:
        if self.budget is not None and not any(parse_budget(self.budget)):
            yield Problem("ladder-not-a-budget", "budget", value=self.budget)
        if self.folder and is_ladder(Path(self.folder)):
            yield Problem("ladder-exists", "folder", folder=self.folder)


def parse_budget(text: str) -> tuple[float | None, float | None]:
    """Operations of a budget such as 1e18, or the share of one such as 1%; None if it is neither.

    Args:
        text: The budget.
    """
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        return None, None
    if not 0 < value < float("inf"):
        return None, None
    return (None, value / 100) if text.endswith("%") else (value, None)


@dataclass(frozen=True)
class _OfLadder(Command, program=PROGRAM):
    """A command on a ladder that has been planned."""

    folder: str = option_field("", metavar="FOLDER", positional=True, required=True)
    """Folder of the ladder."""

    def problems(self) -> Iterator[Problem]:
        if self.folder and not is_ladder(Path(self.folder)):
            yield Problem("ladder-missing", "folder", folder=self.folder)


BY_SLURM = when(launcher="slurm")
BY_RAY = when(launcher="ray")


@dataclass(frozen=True)
class Run(_OfLadder, program=PROGRAM):
    """Trains the runs of a ladder that are not complete, and fits the law once all are.

    In this process one after the other, so that the libraries are loaded once; as a job array of
    Slurm; or as tasks of a Ray cluster. Called again, it continues with the first run that is not
    complete, from its newest checkpoint.
    """

    only: tuple[str, ...] = option_field((), nargs="*", metavar="RUN")
    """Names of the runs to train, such as run-0 (default: all)."""
    launcher: str = option_field("process", choices=LAUNCHERS)
    """Who starts the runs: this process, Slurm's job array, or Ray."""
    time: str | None = option_field(None, metavar="TIME", only_with=BY_SLURM)
    """Time limit of an attempt, as of sbatch (default: the partition's)."""
    sbatch: tuple[str, ...] = option_field(
        (), nargs="*", metavar="OPTION", repeatable=True, only_with=BY_SLURM
    )
    """Further options of sbatch without dashes, such as partition=gpu account=llm."""
    gpus_per_run: int | None = option_field(None, minimum=0, only_with=BY_SLURM)
    """GPUs that a run requests (default: one for each process)."""
    ray_address: str = option_field("auto", metavar="ADDRESS", only_with=BY_RAY)
    """Ray cluster: auto for the one of this machine, or HOST:PORT."""
    ray_cores: int = option_field(1, minimum=1, only_with=BY_RAY)
    """CPUs that a run occupies."""


@dataclass(frozen=True)
class Fit(_OfLadder, program=PROGRAM):
    """Fits the losses of a ladder, predicts that of the large run, and writes a report.

    FOLDER/fit.json has the laws and the prediction, which `judge` reads.
    """

    output: str | None = option_field(None, metavar="FILE")
    """HTML page with the curves (default: FOLDER/report.html)."""
    level: float = option_field(0.9, above=0, below=1)
    """Probability of the interval."""
    resamples: int = option_field(200, minimum=20)
    """Number of resampled laws."""
    noise: float = option_field(SEEDS_NOISE, above=0)
    """Least relative deviation of the loss that is assumed among seeds; more, if the runs differ
    more from the law."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.output is not None:
            yield from output_problems("output", self.output)
            yield from drawing_problems("output", self.output, SUFFIXES)


@dataclass(frozen=True)
class Judge(_OfLadder, program=PROGRAM):
    """Compares the final loss of the large run with its prediction; exits with 1 if it is outside.

    The prediction is that of FOLDER/fit.json, for the tokens that the run has consumed.
    """

    run: str = option_field("", metavar="RUN", positional=True, required=True)
    """--save folder of the large run, or its metrics.jsonl."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from run_problems("run", [self.run] if self.run else [])
