"""Computes the steps between two checkpoints of any trainer again, and compares the result.

Owns what one process is told in order to continue a checkpoint, and the gradients of micro-batches.
What the differences mean is `diagnosis`'.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.compatibility import config_of
from megatron_ds.config import Config, yaml_file
from megatron_ds.config.options.checkpoint import TRAINERS, split_location
from megatron_ds.config.problems import Problem, counted, ignore, raise_if_any, user_error
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, TensorReaders
from megatron_ds.loading.continued_steps import take_over, with_samples
from megatron_ds.loading.initial_load import merge_model
from megatron_ds.schedules import learning_rate, plan
from megatron_ds.train_state import TrainState
from megatron_ds.training.replay.diagnosis import KINDS, Diagnosis, Finding, Limits, Step
from megatron_ds.training.replay.given_samples import samples_problems
from megatron_ds.training.replay.one_process import Replay, Trust, one_process
from megatron_ds.training.replay.tensor_comparison import AdamStates, Results
from megatron_ds.training.replay.verification import TOLERANCES

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of Adam's states."""
NO_RATE = 1e-30
"""A learning rate that changes no weight."""
NEAR = 3
"""Iterations around the step whose learning rates are compared with that of an update."""
LONGEST = 1000
"""Steps between two checkpoints that are computed; more are most likely a mistake."""


@dataclass(frozen=True)
class Pair:
    """Two checkpoints of a run, and the settings of the steps between.

    Attributes:
        first: The checkpoint from which the steps start.
        second: The checkpoint after them.
        config: Settings of the run.
        samples: File of the samples of the steps. None: those that a run here reads.
    """

    first: SourceCheckpoint
    second: SourceCheckpoint
    config: Config
    samples: Path | None = None

    @property
    def start(self) -> int:
        """Iteration of the first checkpoint."""
        return self.first.iteration or 0

    @property
    def end(self) -> int:
        """Iteration of the second checkpoint."""
        return self.second.iteration or 0

    @property
    def steps(self) -> int:
        return self.end - self.start

    @property
    def rows(self) -> int:
        """Rows of the vocabulary tables, without padding."""
        return min(one.settings.model.vocab_size for one in (self.first, self.second))

    @property
    def state(self) -> TrainState:
        """Progress of the run at the first checkpoint."""
        if self.first.native is not None:
            return self.first.native.run.state
        run = self.first.run
        assert run is not None
        consumed = run.consumed_samples or 0
        applied = consumed if run.applied_samples is None else run.applied_samples
        tokens = self.config.model.seq_length
        return TrainState(
            iteration=run.iteration,
            consumed_samples=consumed,
            consumed_tokens=consumed * tokens,
            applied_samples=applied,
            applied_tokens=applied * tokens,
            applied_iterations=run.steps or run.iteration,
        )


@contextmanager
def open_pair(
    first: str,
    second: str,
    settings: Config,
    trust: Trust,
    warn: Callable[[str], None],
    samples: Path | None = None,
) -> Iterator[Pair]:
    """Opens two checkpoints.

    Args:
        first: Location of a checkpoint: a folder, with the name of its format or without.
        second: Location of a later one of the same run.
        settings: Settings of the command line; those of a checkpoint of this program are its own,
            which only `trust` replaces. Of another trainer's, what its files state is taken over.
        trust: Settings that the caller has given.
        warn: Called with each warning.
        samples: File of the samples of the steps, not of a run of this program, whose
            checkpoints name their dataset.

    Raises:
        UserError: If there are no steps between, one has no states of Adam, or the samples are of
            other steps.
    """
    model = {**dataclasses.asdict(settings.model), **dataclasses.asdict(settings.moe)}
    options = ReadOptions(warn=warn, optimizer=True, model=model, given=settings.given)
    source = _open(first, options)
    try:
        later = _open(second, options)
        try:
            raise_if_any(_pair_problems(source, later))
            config = settings
            if source.native is not None:
                recorded = config_of(source.native.run.config)
                config = recorded.with_values(trust.changes)
            elif source.format in TRAINERS:
                config, problems = merge_model(settings, source.settings, source.path, ignore)
                raise_if_any(problems)
                config = take_over(config, source, ignore)
                source = with_samples(source, config, 1)
            pair = Pair(source, later, config, samples)
            raise_if_any(_samples_problems(pair))
            yield pair
        finally:
            later.release()
    finally:
        source.release()


def _samples_problems(pair: Pair) -> Iterator[Problem]:
    if pair.samples is None:
        return
    if pair.first.native is not None:
        yield Problem("samples-of-own-run", path=pair.first.path)
        return
    size = plan(pair.config, pair.state, 1).global_batch_size
    count = pair.steps * size
    yield from samples_problems(pair.samples, pair.config.model.seq_length, count)


def _open(location: str, options: ReadOptions) -> SourceCheckpoint:
    name, folder = split_location(location)
    return open_source(Path(folder), name, options)


def _pair_problems(first: SourceCheckpoint, second: SourceCheckpoint) -> Iterator[Problem]:
    for field, source in (("first", first), ("second", second)):
        missing = [key for key in MOMENTS if not source.optimizer.get(key)]
        if missing:
            yield Problem("step-without-moments", field, path=source.path, states=missing)
    steps = (second.iteration or 0) - (first.iteration or 0)
    if not 0 < steps <= LONGEST:
        shown = {"first": first.iteration, "second": second.iteration, "longest": LONGEST}
        yield Problem("steps-not-between", "second", **shown)
    names = first.tensors.keys() ^ second.tensors.keys()
    if names:
        yield Problem("step-of-other-models", "second", names=", ".join(sorted(names)[:5]))


def check_step(
    pair: Pair,
    replay: Replay,
    say: Callable[[str], object],
    *,
    trust: Trust,
    tolerance: float | None,
) -> int:
    """Computes the steps, and returns the exit status: 0 if the result is equal, otherwise 1.

    Args:
        pair: The checkpoints.
        replay: Starts one process.
        say: Prints a line.
        trust: Settings of the caller, and what a record may name.
        tolerance: Largest accepted difference relative to a norm. None: that of the precision.

    Raises:
        UserError: If the steps cannot be computed.
    """
    limits = TOLERANCES[pair.config.precision.name]
    accepted = Limits(tolerance or limits["gradient"], tolerance or limits["update"])
    span = (
        f"iteration {pair.end}" if pair.steps == 1 else f"iterations {pair.start + 1} to {pair.end}"
    )
    say(f"computing {span} as one process from {pair.first.path}")
    with tempfile.TemporaryDirectory() as name:
        computed = _Computed(pair, Path(name), replay, trust)
        results, last = computed.steps()
        step = Step(
            norm=last["grad_norm"] if pair.steps == 1 else None,
            clip=pair.config.optimizer.clip_grad,
            applied=pair.first.run.steps or 0 if pair.first.run else 0,
            rates=_rates(pair),
            iteration=pair.end,
            parts=computed.micro_batches,
        )
        diagnosis = Diagnosis(results, step, accepted)
        finding = diagnosis.find()
    if finding is None:
        tensors = counted(len(diagnosis.tensors), "tensor")
        say(f"equal: weights, {' and '.join(MOMENTS)} of {tensors}")
        say("the largest differences, relative to norms, are")
        for key, (size, where) in diagnosis.largest.items():
            say(f"    {key}: {size:.1e}, {where}")
        return 0
    say(f"not equal: {finding.name}")
    say(_described(finding))
    return 1


def _described(finding: Finding) -> str:
    others = f", and so with {counted(finding.others, 'further tensor')}" if finding.others else ""
    return f"    {finding.kind} ({KINDS[finding.kind]}): {finding.text}{others}"


def _rates(pair: Pair) -> dict[int, float]:
    """Learning rates around the last step, by iteration."""
    state = pair.state
    size = plan(pair.config, state, 1).global_batch_size
    tokens = size * pair.config.model.seq_length
    rates = {}
    for ahead in range(pair.steps - NEAR, pair.steps + NEAR + 1):
        if state.iteration + ahead < 1:
            continue
        shifted = dataclasses.replace(
            state,
            iteration=state.iteration + ahead - 1,
            applied_samples=max(0, state.applied_samples + (ahead - 1) * size),
            applied_tokens=max(0, state.applied_tokens + (ahead - 1) * tokens),
        )
        rates[state.iteration + ahead] = learning_rate(pair.config, shifted, 1)
    return rates


class _Computed:
    """Runs of one process from the first checkpoint, in a temporary folder."""

    def __init__(self, pair: Pair, folder: Path, replay: Replay, trust: Trust) -> None:
        self._pair = pair
        self._folder = folder
        self._replay = replay
        self._trust = trust

    def steps(self) -> tuple[Results, Mapping[str, Any]]:
        """What the steps give, and the metrics of the last one."""
        pair = self._pair
        values = {"save_interval": pair.end, "exit_interval": pair.end}
        folder = self._run("steps", values)
        expected = _states_at(folder, pair.end, pair.rows)
        betas = (pair.config.optimizer.adam_beta1, pair.config.optimizer.adam_beta2)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = json.loads(lines[-1])
        return Results(
            before=_states_of(pair.first, pair.rows),
            run=_states_of(pair.second, pair.rows),
            expected=expected,
            steps=pair.steps,
            betas=betas,
            lr=last["learning_rate"],
        ), last

    def micro_batches(self) -> Sequence[TensorReaders]:
        """Gradient of each micro-batch of the step; none of several steps.

        One step for each: with beta1 = 0 the first moment is the gradient, and with almost no
        learning rate the weights stay.
        """
        pair = self._pair
        schedule = pair.config.schedule
        size = plan(pair.config, pair.state, 1).global_batch_size
        micro_batch = schedule.micro_batch_size
        count = size // micro_batch
        if pair.steps != 1 or count < 2:
            return []
        values: dict[str, Any] = {
            "save_interval": 1,
            "exit_interval": pair.start + count,
            "global_batch_size": micro_batch,
            "rampup_batch_size": None,
            "step_batch_size_schedule": None,
            "param_group": None,
            "lr": NO_RATE,
            "min_lr": 0.0,
            "decoupled_lr": None,
            "weight_decay": 0.0,
            "clip_grad": 0.0,
            "adam_beta1": 0.0,
        }
        values |= self._micro_batch_lengths(size, count)
        folder = self._run("micro_batches", values)
        return [
            _states_at(folder, iteration, pair.rows).exp_avg
            for iteration in range(pair.start + 1, pair.start + count + 1)
        ]

    def _micro_batch_lengths(self, size: int, count: int) -> dict[str, Any]:
        """Lengths of a run of micro-batches, of as many samples and therefore the same order.

        Args:
            size: Samples of a step.
            count: Micro-batches of a step.
        """
        pair = self._pair
        iterations = pair.config.schedule.train_iters
        if pair.first.format not in TRAINERS:
            return {} if iterations is None else {"train_iters": iterations * count}
        # The samples of the trainer's steps are known by their batch size.
        steps = f"{pair.state.consumed_tokens}:{pair.config.schedule.micro_batch_size}"
        values: dict[str, Any] = {"step_batch_size_schedule": (f"0:{size}", steps)}
        if iterations is not None:
            values |= {"train_iters": None, "train_samples": iterations * size}
            values |= {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_decay_iters": None}
            values |= {"lr_decay_points": None, "lr_wsd_decay_iters": None}
        return values

    def _run(self, name: str, values: Mapping[str, Any]) -> Path:
        """Continues the first checkpoint with these settings; returns the folder of the run.

        Raises:
            UserError: If it fails, or the record names what the reader does not trust.
        """
        folder = self._folder / name
        folder.mkdir()
        first = self._pair.first
        run = first.path.parent
        loaded: dict[str, Any] = {"load": str(run), "ckpt_step": self._pair.start}
        if first.format in TRAINERS:
            run = first.path
            loaded = {"load": f"{first.format}:{run}", "override_opt_param_scheduler": True}
        loaded["save"] = str(folder)
        trust = dataclasses.replace(self._trust, changes={**self._trust.changes, **values})
        config = one_process(self._pair.config, {**loaded, **values}, run, folder, trust)
        file = folder / "settings.yaml"
        file.write_text(yaml_file.dump(config), encoding="utf-8")
        samples = self._pair.samples
        position = str(self._pair.state.consumed_samples)
        words = [] if samples is None else [str(samples), position]
        status = self._replay([*words, "--config", str(file)])
        if status:
            raise user_error("replay-failed", status=status)
        return folder


def _states_at(folder: Path, iteration: int, rows: int) -> AdamStates:
    """The states that a computation has saved."""
    path = folder / f"global_step{iteration}"
    source = open_source(path, options=ReadOptions(optimizer=True, checksums=False))
    source.release()  # no run removes it
    return _states_of(source, rows)


def _states_of(source: SourceCheckpoint, rows: int) -> AdamStates:
    """The states of a checkpoint, with the rows of the vocabulary alone."""
    weights = {name: source.tensors[name] for name in source.tensors}
    weights |= source.optimizer.get(MASTER, {})
    tables = (weights, *(source.optimizer[key] for key in MOMENTS))
    return AdamStates(*(_without_padding(tensors, rows) for tensors in tables))


def _without_padding(tensors: TensorReaders, rows: int) -> TensorReaders:
    return {
        name: tensor.first_rows(rows) if name in VOCABULARY_TABLES else tensor
        for name, tensor in tensors.items()
    }
