"""Training time of the loop, on a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from torch._dynamo.utils import counters

from megatron_ds.config import (
    CheckpointConfig,
    Config,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.engine.protocol import LossSum
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from megatron_ds.training.metrics import Metrics, ThroughputModel
from megatron_ds.training.records import IntervalRecord, Logger
from megatron_ds.training.trainer import Trainer

FIRST_STEP, STEP, EVALUATION, SAVE = 60.0, 2.0, 1000.0, 500.0


class World:
    """A clock and the parts of a run that advance it."""

    def __init__(self, compiles_in: int | None = None) -> None:
        self.now, self.taken, self.compiles_in = 0.0, 0, compiles_in
        self.saves: list[int] = []

    def clock(self) -> float:
        return self.now

    def train_step(self, batches: Iterator[Any], plan: StepPlan) -> StepResult:
        self.taken += 1
        self.now += FIRST_STEP if self.taken == 1 else STEP
        if plan.iteration == self.compiles_in:
            self.now += FIRST_STEP
            counters["stats"]["unique_graphs"] += 1
        return StepResult(1.0, 1.0)

    def eval_loss(self, batches: object, count: int) -> LossSum:
        self.now += EVALUATION
        return LossSum(1.0, 1.0)

    def save(self, engine: object, state: TrainState, data: object) -> None:
        self.now += SAVE
        self.saves.append(state.iteration)

    def close(self) -> None:
        return None


def run(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    state: TrainState | None = None,
    *,
    compile: bool = False,
) -> list[IntervalRecord]:
    """Six iterations with an evaluation after every second and a save after every third."""
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    logger, anything = MagicMock(spec=Logger), cast(Any, world)
    exits = MagicMock()
    exits.after_step.return_value = exits.external_stop.return_value = None
    Trainer(
        config=Config(
            model=ModelConfig(seq_length=8),
            optimizer=OptimizerConfig(lr=1.0),
            schedule=ScheduleConfig(micro_batch_size=4, global_batch_size=4, train_iters=6),
            checkpoint=CheckpointConfig(save=str(Path("nowhere")), save_interval=3),
            logging=LoggingConfig(log_interval=2, eval_interval=2, eval_iters=1),
            runtime=RuntimeConfig(compile=compile),
        ),
        mesh=Mesh.single(),
        engine=anything,
        data=Datasets(train=anything, valid={"": anything}),
        metrics=Metrics(
            ThroughputModel(flops_per_sample=lambda tokens: 10**12, seq_length=8, world_size=1),
            log_interval=2,
            total_iterations=6,
            mean_over_dp=lambda losses: losses,
            loggers=[logger],
        ),
        checkpoints=anything,
        exits=exits,
        state=state or TrainState(),
        total_iterations=6,
        eod=None,
        report=MagicMock(),
        clock=world.clock,
    ).run()
    return [call.args[0] for call in logger.log_interval.call_args_list]


def test_warm_up_evaluations_and_saves_are_not_training_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    records = run(monkeypatch, world)
    assert world.saves == [3, 6]
    assert world.now > 2 * SAVE + 3 * EVALUATION + FIRST_STEP
    assert [record.seconds_per_iteration for record in records] == [STEP, STEP, STEP]
    assert [record.samples_per_second for record in records] == [2.0, 2.0, 2.0]


def test_a_resumed_run_warms_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainState(iteration=3, consumed_samples=12, consumed_tokens=96)
    first, second = run(monkeypatch, World(), state)
    assert (first.seconds_per_iteration, first.samples_per_second) == (FIRST_STEP, None)
    assert (second.seconds_per_iteration, second.samples_per_second) == (STEP, 2.0)
    assert (first.last.consumed_samples, first.last.consumed_tokens) == (16, 128)


def test_a_step_that_compiles_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    records = run(monkeypatch, World(compiles_in=4), compile=True)
    assert [record.seconds_per_iteration for record in records] == [STEP, STEP, STEP]
