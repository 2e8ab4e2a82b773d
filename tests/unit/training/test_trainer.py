"""Training time of the loop, on a simulated clock, and the samples that each rank reads."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from megatron_ds.config import Config
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.data.sample import NO_MARKS
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.evaluation.in_training import Result, Stopped
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.train_state import LossSum, StepPlan, StepResult, TrainState
from megatron_ds.training import skipped_steps
from megatron_ds.training.exit_conditions import StopDecision
from megatron_ds.training.metrics import Metrics, ThroughputModel
from megatron_ds.training.records import IntervalRecord, Logger
from megatron_ds.training.trainer import Trainer

FIRST_STEP = 60.0
STEP = 2.0
EVALUATION = 1000.0
SAVE = 500.0
SETTINGS = {
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 6,
    "lr": 1.0,
    "num_workers": 0,
    "save": "nowhere",
    "save_interval": 3,
    "log_interval": 2,
}


class World:
    """A clock and the parts of a run that advance it."""

    def __init__(self, compiles_in: int | None = None) -> None:
        self.now = 0.0
        self.taken = 0
        self.compiles_in = compiles_in
        self.saves: list[int] = []
        self.saves_after_skip: list[int] = []
        self.skipped: frozenset[int] = frozenset()
        self.diverges_in = 10
        self.evaluations = 0

    def clock(self) -> float:
        return self.now

    def train_step(self, batches: Iterator[Any], plan: StepPlan) -> StepResult:
        self.taken += 1
        self.now += FIRST_STEP if self.taken == 1 else STEP
        if plan.iteration == self.compiles_in:
            self.now += FIRST_STEP
            counters["stats"]["unique_graphs"] += 1
        skipped = plan.iteration in self.skipped
        return StepResult(1.0, math.inf if skipped else 1.0, skipped=skipped)

    def has_finite_weights(self) -> bool:
        return self.taken < self.diverges_in

    def first_nonfinite_weight(self) -> str | None:
        return None if self.has_finite_weights() else "final_norm.bias"

    def eval_loss(self, batches: object, count: int) -> LossSum:
        self.now += EVALUATION
        self.evaluations += 1
        return LossSum(1.0, 1.0)

    def save(
        self,
        engine: object,
        state: TrainState,
        data: object,
        *,
        in_background: bool,
        after_skip: bool,
    ) -> None:
        self.now += SAVE
        self.saves.append(state.iteration)
        self.saves_after_skip += [state.iteration] * after_skip

    def advance(self, *, wait: bool) -> None:
        return None

    def close(self) -> None:
        return None


def make_trainer(
    parts: Any,
    logger: Logger,
    *,
    data: Datasets | None = None,
    mesh: Mesh | None = None,
    mean_over_dp: Callable[[list[float]], list[float]] = lambda values: values,
    state: TrainState | None = None,
    tasks: Any = None,
    token_bytes: torch.Tensor | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer of six iterations that saves after every third.

    Args:
        parts: Engine, checkpoint manager and clock in one.
        logger: Receives the records.
        changes: Changed fields of the configuration.
    """
    exits = MagicMock()
    exits.after_step.return_value = None
    exits.external_stop.return_value = None
    return Trainer(
        config=Config().with_values({**SETTINGS, **changes}),
        mesh=mesh or Mesh.single(),
        engine=parts,
        data=data or Datasets(train=parts, valid={"": parts}),
        metrics=Metrics(
            ThroughputModel(flops_per_sample=lambda tokens: 10**12, seq_length=8, world_size=1),
            log_interval=2,
            total_iterations=6,
            mean_over_dp=mean_over_dp,
            loggers=[logger],
        ),
        checkpoints=SimpleNamespace(saving=parts, newest="global_step3"),
        exits=exits,
        state=state or TrainState(),
        total_iterations=6,
        report=MagicMock(),
        clock=parts.clock,
        tasks=tasks,
        token_bytes=token_bytes,
    )


def run(
    monkeypatch: pytest.MonkeyPatch, world: World, state: TrainState | None = None, **changes: Any
) -> list[IntervalRecord]:
    """Six iterations with an evaluation after every second and a save after every third."""
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    logger = MagicMock(spec=Logger)
    make_trainer(world, logger, state=state, eval_interval=2, eval_iters=1, **changes).run()
    return [call.args[0] for call in logger.log_interval.call_args_list]


def test_warm_up_evaluations_and_saves_are_not_training_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    records = run(monkeypatch, world)
    assert world.saves == [3, 6]
    assert world.now == 2 * SAVE + 3 * EVALUATION + FIRST_STEP + 5 * STEP
    assert [record.seconds_per_iteration for record in records] == [STEP, STEP, STEP]
    assert [record.samples_per_second for record in records] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("skipped", "saved_after_skip", "code"),
    [
        ({3, 4}, [3], ExitCode.FINISHED),
        ({1, 2, 6}, [6], ExitCode.FINISHED),
        (set(range(1, 7)), [3, 6], ExitCode.SKIPPED_STEPS),
    ],
)
def test_a_save_knows_that_the_last_step_was_skipped(
    monkeypatch: pytest.MonkeyPatch, skipped: set[int], saved_after_skip: list[int], code: ExitCode
) -> None:
    """A run all of whose steps were skipped is no success."""
    world = World()
    world.skipped = frozenset(skipped)
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    assert make_trainer(world, MagicMock(spec=Logger)).run() == code
    assert world.saves == [3, 6]
    assert world.saves_after_skip == saved_after_skip


def test_weights_that_are_not_finite_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim (non-finite): weights that are not finite are neither loaded nor saved, and no
    checkpoint is removed after a skipped step"""
    world = World()
    world.diverges_in = 5
    monkeypatch.setattr(skipped_steps, "gather_objects", lambda value: [value])
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    expected = r"\(final_norm.bias of rank 0\).*Resume from global_step3.*\[training-diverged\]"
    with pytest.raises(RunAborted, match=expected) as end:
        make_trainer(world, MagicMock(spec=Logger)).run()
    assert end.value.code == ExitCode.SKIPPED_STEPS
    assert world.saves == [3]


@pytest.mark.parametrize(
    ("iteration", "skip_train", "warns"), [(6, False, True), (6, True, False), (5, False, False)]
)
def test_a_complete_run_warns_that_nothing_is_trained(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    iteration: int,
    skip_train: bool,
    warns: bool,
) -> None:
    world = World()
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    state = TrainState(iteration=iteration)
    make_trainer(world, MagicMock(spec=Logger), state=state, skip_train=skip_train).run()
    assert world.taken == 6 - iteration
    assert ("[run-complete]" in capsys.readouterr().out) == warns


def test_the_last_validation_is_computed_once_and_logged_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []

    def log_eval(metrics: Metrics, state: TrainState, split: str, label: str, *_: object) -> None:
        logged.append(label)

    monkeypatch.setattr(Metrics, "log_eval", log_eval)
    world = World()
    run(monkeypatch, world)
    assert logged == [
        "iteration 2",
        "iteration 4",
        "iteration 6",
        "the end of training for val data",
    ]
    assert world.evaluations == 3


class Tasks:
    """Tasks that are evaluated in two batches."""

    def __init__(self) -> None:
        self.evaluations = 0

    def run(self, is_stopped: Callable[[], bool]) -> list[Result]:
        self.evaluations += 1
        if is_stopped() or is_stopped():
            raise Stopped
        return [Result("choice", {"acc": 0.5}), Result("wiki", {"loss": 2.0}, is_perplexity=True)]


@pytest.mark.parametrize(
    ("interval", "start", "evaluated"), [(None, 0, [2, 4, 6]), (4, 0, [4, 6]), (None, 3, [4, 6])]
)
def test_tasks_are_evaluated_at_their_interval_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, interval: int | None, start: int, evaluated: list[int]
) -> None:
    """Claim (serving): tasks are evaluated at the same iterations after a resume, and a request to
    stop interrupts them"""
    world = World()
    logger = MagicMock(spec=Logger)
    tasks = Tasks()
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    intervals = {"eval_interval": 2, "eval_tasks_interval": interval}
    data = Datasets(cast("Any", world))
    state = TrainState(iteration=start)
    make_trainer(world, logger, data=data, state=state, tasks=tasks, **intervals).run()
    records = [call.args[0] for call in logger.log_task.call_args_list]
    assert [(each.iteration, each.task, each.metrics) for each in records] == [
        (iteration, "choice", {"acc": 0.5}) for iteration in evaluated
    ]
    groups = [call.args[0] for call in logger.log_eval.call_args_list]
    losses = [(each.iteration, each.loss) for each in groups if each.group == "wiki"]
    assert losses == [(iteration, 2.0) for iteration in evaluated]


def test_a_request_to_stop_interrupts_the_evaluation_of_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim (serving): tasks are evaluated at the same iterations after a resume, and a request to
    stop interrupts them"""
    world = World()
    logger = MagicMock(spec=Logger)
    tasks = Tasks()
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    data = Datasets(cast("Any", world))
    trainer = make_trainer(world, logger, data=data, tasks=tasks, eval_interval=2)
    stop = StopDecision("asked to stop", urgent=True)
    # At the start, and between the batches of the first evaluation.
    cast("MagicMock", trainer.exits.external_stop).side_effect = [None, None, stop]
    trainer.run()
    assert (world.taken, world.saves, tasks.evaluations) == (2, [2], 1)
    logger.log_task.assert_not_called()


def test_a_resumed_run_warms_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainState(iteration=3, consumed_samples=12, consumed_tokens=96)
    first, second = run(monkeypatch, World(), state)
    assert (first.seconds_per_iteration, first.samples_per_second) == (FIRST_STEP, None)
    assert (second.seconds_per_iteration, second.samples_per_second) == (STEP, 2.0)
    assert (first.last.consumed_samples, first.last.consumed_tokens) == (16, 128)


def test_a_step_that_compiles_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    records = run(monkeypatch, World(compiles_in=4), compile=True)
    assert [record.seconds_per_iteration for record in records] == [STEP, STEP, STEP]


GROUP = Mesh.single().tp


class Reader:
    """An engine that reads its micro-batches; the loss of each is its first sample's number."""

    clock = staticmethod(itertools.count(0.0).__next__)
    save = staticmethod(lambda *_, **__: None)
    close = save
    advance = save
    has_finite_weights = staticmethod(lambda: True)

    def __init__(self) -> None:
        self.device_batches = partial(DeviceBatches, device=torch.device("cpu"), sharing=GROUP)
        self.trained: list[int] = []
        self.evaluated: list[int] = []

    def train_step(self, batches: Iterator[Any], plan: StepPlan) -> StepResult:
        self.trained += (read := first_samples(batches, plan.num_micro_batches))
        return StepResult(sum(read) / len(read), 1.0)

    def eval_loss(self, batches: Iterator[Any], count: int) -> LossSum:
        self.evaluated += (read := first_samples(batches, count))
        return LossSum(float(sum(read)), float(count))


def first_samples(batches: Iterator[Any], count: int) -> list[int]:
    """The number of the first sample of each micro-batch."""
    return [int(next(batches).tokens_BS[0, 0]) for _ in range(count)]


class Numbers:
    """A dataset whose samples contain their position, plus `first`."""

    seq_length = 8
    vocab_size = 10_000
    cache = None
    marks = NO_MARKS

    def __init__(self, first: int) -> None:
        self._first = first

    def __len__(self) -> int:
        return 64

    def __getitem__(self, position: int) -> Any:
        return np.full(self.seq_length + 1, self._first + position)

    def read_into(self, position: int, ids: Any, marks: Any = None) -> None:
        ids[:] = self[position]

    def sample_id(self, position: int) -> str:
        return str(position)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_data_parallel_rank_reads_its_own_samples(rank: int) -> None:
    """And losses are means over the ranks, whatever this rank's are.

    Claim (parallel): evaluations read each rank's own samples and average over all ranks
    """
    reader = Reader()
    logger = MagicMock(spec=Logger)
    make_trainer(
        reader,
        logger,
        data=Datasets(
            train=Numbers(0),
            valid={"": Numbers(1000)},
            test={"": Numbers(2000)},
            progress=MagicMock(),
        ),
        mesh=dataclasses.replace(Mesh.single(), dp=Group((0, 1), rank, None)),
        mean_over_dp=lambda values: [3.0 * values[0], *values[1:]],
        state=TrainState(iteration=3, consumed_samples=12, consumed_tokens=96),
        eval_iters=3,
        eval_interval=5,
    ).run()
    # Micro-batches of two samples, two ranks; a rank has one micro-batch of an iteration.
    own = 2 * rank
    assert reader.trained == [12 + own, 16 + own, 20 + own]
    valid, test = ([first + own + 4 * k for k in range(3)] for first in (1000, 2000))
    # After iteration 5 and at the end, the same samples each time.
    assert reader.evaluated == [*valid, *valid, *test]
    evaluations = [call.args[0] for call in logger.log_eval.call_args_list]
    assert [(record.split, record.loss) for record in evaluations] == [
        *[("validation", 3.0 * (1004 + own))] * 2,
        ("test", 3.0 * (2004 + own)),
    ]
    (first, *_), *_ = (call.args[0] for call in logger.log_steps.call_args_list)
    assert first.lm_loss == 3.0 * (12 + own)


def test_an_evaluation_weights_every_token_of_all_ranks_equally() -> None:
    """With a loss of each token, ranks may have counted different numbers of them."""
    ranks = [LossSum(6.0, 3.0), LossSum(1.0, 1.0)]
    sent = list[list[float]]()

    def send(values: list[float]) -> list[float]:
        sent.append(values)
        return values

    def mean(_: list[float]) -> list[float]:
        return [sum(values) / len(ranks) for values in zip(*sent, strict=True)]

    for mean_over_dp in (send, mean):
        for own in ranks:
            trainer = make_trainer(
                MagicMock(eval_loss=lambda *_, own=own: own),
                MagicMock(spec=Logger),
                mean_over_dp=mean_over_dp,
                eval_iters=1,
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trainer, "_batches", lambda *_: MagicMock())
                loss = trainer._mean_loss(MagicMock())
            expected = own.total / own.weight if mean_over_dp is send else 7.0 / 4.0
            assert loss == (expected, {})


def test_a_bad_step_is_repeated_with_the_samples_of_the_next_rank() -> None:
    reader = Reader()
    mesh = dataclasses.replace(Mesh.single(), dp=Group((0, 1), 1, None))
    data = Datasets(train=Numbers(0), progress=MagicMock())
    trainer = make_trainer(cast(Any, reader), MagicMock(spec=Logger), data=data, mesh=mesh)
    read = [first_samples(trainer.rerun.batches_of(12, shift), 2) for shift in (0, 1)]
    assert read == [[14, 18], [12, 16]]


def test_bits_per_byte_are_those_of_the_counted_tokens_of_all_ranks() -> None:
    """Claim (parallel): evaluations log the bits per byte of the counted tokens of all ranks"""
    rows = torch.tensor([[0, 1, 2, 3]])

    def evaluate(batches: Iterator[DeviceBatch], count: int) -> LossSum:
        for _ in range(count):
            next(batches)
        return LossSum(1.0 * count, 1.0 * count, 14.0 * count)

    trainer = make_trainer(
        MagicMock(eval_loss=evaluate),
        MagicMock(spec=Logger),
        mean_over_dp=lambda values: [values[0], values[1], values[2], values[3] * 2],
        eval_iters=3,
        token_bytes=torch.tensor([9, 3, 4, 5]),
    )
    for mask, counted in ((None, 12), (torch.tensor([[1.0, 0.0, 1.0]]), 8)):
        batch = DeviceBatch(rows[:, :-1], rows[:, 1:], mask, 0)
        batches = MagicMock(__iter__=lambda *_, batch=batch: itertools.repeat(batch))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "_batches", lambda *_, batches=batches: batches)
            assert trainer._mean_loss(MagicMock()) == (
                1.0,
                {"bits_per_byte": pytest.approx(14.0 / (2 * counted) / math.log(2))},
            )


def test_samples_of_skipped_iterations_are_not_trained_on(capsys: Any) -> None:
    """Claim (non-finite): the samples of `--skip-train-iteration-range` are not trained on, and
    only the position in the data advances"""
    reader = Reader()
    logger = MagicMock(spec=Logger)
    data = Datasets(train=Numbers(0), progress=MagicMock())
    skipped = ("4-5", "1", "5-9")
    trainer = make_trainer(
        reader, logger, data=data, eval_iters=0, skip_train_iteration_range=skipped
    )
    trainer.run()
    # Micro-batches of two samples, two in each iteration.
    assert reader.trained == [4, 6, 8, 10]
    state = trainer.state
    assert (state.iteration, state.consumed_samples, state.applied_samples) == (6, 24, 8)
    assert (state.applied_iterations, state.skipped_iterations) == (2, 4)
    records = [record for call in logger.log_steps.call_args_list for record in call.args[0]]
    assert [(record.iteration, record.warm_up) for record in records] == [(2, True), (3, False)]
    out = capsys.readouterr().out
    assert out.count("[iterations-skipped]") == 2
    assert "skipped iteration 1 because" in out
    assert "skipped iterations 4 to 6 because" in out


def test_a_loss_spike_is_reported(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    spike = StepResult(9.0, 2.0, skipped=True, is_spike=True, compared=(9.0, 2.0))
    take = world.train_step
    monkeypatch.setattr(world, "train_step", lambda *step: take(*step) and spike)
    monkeypatch.setattr(Trainer, "_batches", lambda *_: world)
    data = Datasets(train=cast(Any, world), progress=MagicMock())
    logger = MagicMock(spec=Logger)
    trainer = make_trainer(world, logger, data=data, eval_iters=0, skip_loss_spikes=3.0)
    trainer.run()
    assert capsys.readouterr().out.count("[loss-spike-skipped]") == 6
    assert trainer.state.skipped_iterations == 6
    assert trainer.state.recent_losses == (9.0,) * 6
