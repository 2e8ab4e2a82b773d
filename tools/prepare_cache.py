#!/usr/bin/env python
"""Build the index caches of a run ahead, on one node without devices."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ds import cli
from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.data.blend.usage_report import summary
from megatron_ds.data.build_datasets import BlendProgress
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.run_stages import RunStages
from megatron_ds.train_state import TrainState
from megatron_ds.training.run import complete_settings
from megatron_ds.training.start import preflight
from megatron_ds.training.start.run_data import build_stage_data


@dataclass(frozen=True)
class Options:
    """Builds the index caches of a run on one node, before the run.

    A run with the same flags, on any layout, then starts without building them.

        python tools/prepare_cache.py --world-size 64 FLAGS OF pretrain_gpt.py

    Accepts all flags of pretrain_gpt.py. Needs no device, and starts no run.
    """

    world_size: int = option_field(1, "number of processes of the run", minimum=1)


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
        data, of_data = preflight.check_data(config, plans[0], dp_size, tokenizer, warn)
        if tokenizer is not None:
            opened.append(preflight.RunInputs(plans[0], tokenizer, data))
        return [*problems, *of_data]

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
    stages = RunStages(config, config.parallel.data_parallel_size(options.world_size))
    saved = None if config.checkpoint.is_new_run else plans[0].saved
    state, history = (TrainState(), None) if saved is None else (saved.run.state, saved.run.data)
    progress: BlendProgress | None = None
    for before in stages.starts(stages.entered(state)):
        if progress is not None:
            history = progress.history_after(before.consumed_samples)
        data = build_stage_data(config, inputs, stages.dp_size, before, history)
        progress = data.progress
        for line in summary(data.usage, None):
            print(line)
    print("the index caches are complete")


if __name__ == "__main__":
    start_tool.run(main)
