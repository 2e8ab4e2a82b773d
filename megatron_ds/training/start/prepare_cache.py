"""Build the index caches of a run ahead, on one node without devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.data.blend.usage_report import summary
from megatron_ds.data.build_datasets import BlendProgress
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import TrainState
from megatron_ds.training.run import complete_settings
from megatron_ds.training.start import preflight
from megatron_ds.training.start.run_data import build_phase_data


@dataclass(frozen=True)
class Options:
    """Builds the index caches of a run on one node, before the run.

    A run with the same flags, on any layout, then starts without building them.

        python tools/prepare_cache.py --world-size 64 FLAGS OF pretrain_gpt.py

    Accepts all flags of pretrain_gpt.py. Needs no device, and starts no run.
    """

    PROGRAM: ClassVar[str] = "prepare_cache.py"

    world_size: int = option_field(1, minimum=1)
    """Number of processes of the run."""


def main(argv: Sequence[str]) -> int:
    training: list[str] = []
    return cli.run(Options, lambda options: prepare(options, training), argv, unknown=training)


def prepare(options: Options, training: Sequence[str]) -> None:
    """Builds the caches of the flags of pretrain_gpt.py.

    Raises:
        UserError: If the data is damaged, or no folder for the caches is writable.
    """
    plans: list[LoadPlan] = []
    opened: list[preflight.RunInputs] = []

    def complete(
        config: Config, size: int, warn: Callable[[Problem], None]
    ) -> tuple[Config, list[Problem]]:
        config, plan, problems = complete_settings(config, size, warn)
        plans.append(plan)
        return config, problems

    def check(
        config: Config, size: int, is_sound: bool, warn: Callable[[Problem], None]
    ) -> list[Problem]:
        dp_size = config.parallel.data_parallel_size(size) if is_sound else None
        tokenizer, problems = preflight.check_tokenizer(config, is_sound)
        data, data_errors = preflight.check_data(config, plans[0], dp_size, tokenizer, warn)
        if tokenizer is not None:
            opened.append(preflight.RunInputs(plans[0], tokenizer, data))
        return [*problems, *data_errors]

    config = arguments.parse(
        training,
        world_size=options.world_size,
        complete=complete,
        check=check,
        program="prepare_cache.py",
    )
    (inputs,) = opened
    for files in inputs.data:
        files.opens_all = True
    phases = RunPhases(config, config.parallel.data_parallel_size(options.world_size))
    saved = None if config.checkpoint.is_new_run else plans[0].saved
    state, history = (TrainState(), None) if saved is None else (saved.run.state, saved.run.data)
    progress: BlendProgress | None = None
    for before in phases.starts(phases.entered(state)):
        if progress is not None:
            history = progress.history_after(before.consumed_samples)
        data = build_phase_data(config, inputs, phases.dp_size, before, history)
        progress = data.progress
        for line in summary(data.usage, None):
            print(line)
    print("the index caches are complete")
