"""Checks a run: replays recorded steps as one process, and compares them with its records.

Owns which checkpoint a step is replayed from, the settings of a replay, and the comparison, in the
order in which a step computes. How a replay is started comes in as a function. Imports no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.metadata import iteration_of, list_checkpoints
from megatron_ds.config import Config, yaml_file
from megatron_ds.config.options.schedule import parse_iteration_range
from megatron_ds.config.problems import counted, user_error
from megatron_ds.training.loggers.events import EVENTS
from megatron_ds.training.loggers.step_records import FILE_NAME, record_path
from megatron_ds.training.replay.one_process import Replay, Trust, one_process
from megatron_ds.training.replay.record_comparison import DECAY, Difference, compare, continued
from megatron_ds.training.replay.recorded_run import (
    Record,
    read_records,
    read_starts,
    requiring_form,
)

HALF_PRECISION = {
    "weights": 2e-2,
    "forward": 1e-2,
    "gradient": 1e-1,
    "update": 1e-1,
    "decay": 1e-3,
    "optimizer": 2e-2,
    "sum": 0.3,
}
TOLERANCES = {
    "fp32": {
        "weights": 1e-3,
        "forward": 1e-4,
        "gradient": 1e-3,
        "update": 1e-3,
        "decay": 1e-3,
        "optimizer": 1e-3,
        "sum": 0.0,
    },
    "bf16": HALF_PRECISION,
    "fp16": HALF_PRECISION,
}
"""Largest accepted differences relative to a norm, by precision and cause; `sum`: lower bound for a
sum; `decay`: difference of the directions of all updates that another weight decay explains, beyond
rounding. Where rounding decides the sign of a gradient it decides the sign of Adam's update, which
shows in a sum."""
CAUSES = {
    "data": "other samples than the data, its order and the seed give",
    "weights": "what the step started from is not what the steps before it gave",
    "random numbers": "other random states than the seed, the position in the data and the layer "
    "give",
    "forward": "the same samples, weights and random states gave other activations",
    "gradient": "the same forward pass gave another gradient, or its reduction did",
    "update": "the same gradients and weights gave another update: another rate, weight decay or "
    "state",
    "optimizer": "the same gradients gave other weights",
}
"""Causes of differences, with what they mean."""
LOADED = (
    "load",
    "ckpt_step",
    "load_tag",
    "finetune",
    "no_load_optim",
    "reset_iteration",
    "pretrained_checkpoint",
)
"""Settings of --load that a replay from the start of a run takes from it."""
CHECKPOINT_ROUNDING = 1e-6
"""Accepted difference of weights, relative to a norm, that are saved and loaded into one process:
their norms are added in another order."""


@dataclass(frozen=True)
class Segment:
    """Steps that are replayed from one checkpoint."""

    checkpoint: int
    """Its iteration; 0: the start of the run."""
    config: Config
    """Settings of the run in these steps."""
    first: int
    """Iteration at which the run was started with these settings."""
    ranks: int
    steps: list[int]


def verify(
    run: Path,
    steps: Sequence[str] | None,
    replay: Replay,
    say: Callable[[str], object],
    *,
    tolerance: float | None = None,
    trust: Trust | None = None,
) -> int:
    """Replays steps, and returns the exit status.

    Args:
        run: The --save folder.
        steps: Steps or ranges of steps, such as "10-20"; None: all recorded ones.
        replay: Starts a replay.
        say: Prints a line.
        tolerance: Largest accepted difference; None: the limits for the precision of the run.
        trust: Settings of the replay, and what the record may name.

    Raises:
        UserError: If they cannot be replayed.
    """
    verdict = Verdict(say, tolerance)
    trust = trust or Trust()
    with requiring_form(run / EVENTS):
        records, planned = plan(run, steps, trust)
    for segment in planned:
        span = f"{segment.checkpoint + 1} to {segment.steps[-1]}"
        say(f"replaying iterations {span} of {run} as one process")
        replayed = _replay(run, segment, records, replay, trust)
        verdict.limits = TOLERANCES[segment.config.precision.name]
        if not _checks(segment, records, replayed, verdict):
            return 1
    verdict.summarize()
    return 0


def _checks(
    segment: Segment,
    records: Mapping[int, Record],
    replayed: Mapping[int, Record],
    verdict: Verdict,
) -> bool:
    """Whether the steps of a segment equal their replays, and continue each other."""
    start = segment.checkpoint
    if start in records:
        pairs = continued(records[start], replayed[start + 1])
        if not verdict.is_continued(start, pairs, CHECKPOINT_ROUNDING):
            return False
    for step in segment.steps:
        is_compiled = segment.config.runtime.compile
        pairs = compare(records[step], replayed[step], is_compiled=is_compiled)
        is_equal = (
            _is_continued(segment, records, step - 1, verdict)
            and verdict.is_equal(step, pairs)
            and _is_continued(segment, records, step, verdict)
        )
        if not is_equal:
            return False
    return True


def _is_continued(
    segment: Segment, records: Mapping[int, Record], step: int, verdict: Verdict
) -> bool:
    """Whether the next step began with the weights after a step, if the same start of the run made
    both and recorded them."""
    if not {step, step + 1} <= records.keys() or step <= segment.first:
        return True
    return verdict.is_continued(step, continued(records[step], records[step + 1]), 0.0)


class Verdict:
    """Decides which differences are accepted, and prints what was compared.

    Args:
        say: Prints a line.
        tolerance: Largest accepted difference; None: the values of `limits`.
    """

    def __init__(self, say: Callable[[str], object], tolerance: float | None) -> None:
        self._say = say
        self._tolerance = tolerance
        self.limits: Mapping[str, float] = {}
        """Largest accepted differences of the precision of the run, by cause."""
        self._largest: dict[str, Difference] = {}
        self._values = 0
        self._steps = 0
        self._continued = dict[int, None]()

    def is_equal(self, step: int, differences: Iterable[Difference]) -> bool:
        """Whether a step equals its replay; prints the first difference that is not accepted."""
        for item in differences:
            limit = self._tolerance or self._limit_of(item)
            if not item.size <= limit:  # so that nan is not accepted
                self._say(f"step {step} is not equal: {_describe(item)}")
                return False
            self._values += 1
            largest = self._largest.get(item.cause, item)
            self._largest[item.cause] = max(largest, item, key=lambda one: one.size)
        self._steps += 1
        self._say(f"step {step} is equal")
        return True

    def _limit_of(self, item: Difference) -> float:
        if item.where == DECAY:
            return self.limits["decay"]
        sum_limit = self.limits["sum"] if item.where.endswith(": sum") else 0.0
        return max(self.limits.get(item.cause, 0.0), sum_limit)

    def is_continued(self, step: int, differences: Iterable[Difference], limit: float) -> bool:
        """Whether the weights after a step are those before the next one."""
        for item in differences:
            if not item.size <= limit:
                text = (
                    f"step {step} ended with {item.expected}, step {step + 1} began with {item.run}"
                )
                cause = f"{item.where}: weights ({CAUSES['weights']})"
                self._say(f"step {step + 1} is not equal: {cause}; {text}")
                return False
            self._continued[step] = None
        return True

    def summarize(self) -> None:
        """Prints how much was compared, and the largest differences."""
        self._say(f"equal: {self._values} values of {counted(self._steps, 'step')}")
        if self._continued:
            steps = ", ".join(map(str, self._continued))
            self._say(f"the next step, or the checkpoint, has the weights after: {steps}")
        self._say("the largest differences, relative to norms, are")
        for item in self._largest.values():
            self._say(f"    {item.cause}: {item.size:.1e}, {item.where}")


def _replay(
    run: Path, segment: Segment, records: Mapping[int, Record], replay: Replay, trust: Trust
) -> dict[int, Record]:
    """Replays the steps of a segment, and returns their records.

    Raises:
        UserError: If the replay fails, or the record names what the reader does not trust.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with requiring_form(run / EVENTS):
            config = replay_config(run, segment, folder, trust)
        if segment.checkpoint in records:  # its weights are compared with those of the first step
            config = config.with_values({"record_every": 1})
        path = folder / "replay.yaml"
        path.write_text(yaml_file.dump(config), encoding="utf-8")
        status = replay(["--config", str(path)])
        replayed = {} if status else read_records(folder / FILE_NAME)
    if not replayed.keys() >= set(segment.steps):
        raise user_error("replay-failed", status=status)
    return replayed


def _describe(item: Difference) -> str:
    values = f"the run has {item.run}, its replay {item.expected}"
    return f"{item.where}: {item.cause} ({CAUSES[item.cause]}); {values}"


def plan(
    run: Path, words: Sequence[str] | None, trust: Trust
) -> tuple[dict[int, Record], list[Segment]]:
    """The records of a run, and the wanted steps by the checkpoint they are replayed from.

    Raises:
        UserError: If a step has no record or no checkpoint, or computes what one process on the
            host does not.
    """
    starts = read_starts(run)
    path = run / FILE_NAME
    if not path.exists() and trust.files:
        path = record_path(starts[-1]["settings"], run) or path
    records = read_records(path)
    saved = {iteration_of(folder) for folder in list_checkpoints(run)}
    result: dict[int, Segment] = {}
    for step in _wanted(words, records):
        before = [event for event in starts if event["iteration"] < step]
        if not before:
            raise user_error("step-without-start", "steps", step=step, run=run)
        config = before[-1]["settings"]
        first = before[-1]["iteration"]
        _require_one_process(config, before[-1]["ranks"])
        loaded = {first} if first == 0 or config.checkpoint.load != str(run) else set()
        usable = {at for at in saved if first <= at < step} | loaded
        if not usable:
            raise user_error("replay-without-checkpoint", step=step, first=first, run=run)
        new = Segment(max(usable), config, first, before[-1]["ranks"], [])
        result.setdefault(new.checkpoint, new).steps.append(step)
    return records, list(result.values())


def replay_config(run: Path, segment: Segment, folder: Path, trust: Trust) -> Config:
    """The settings of a replay: the settings of the run, for one process that saves nothing.

    Args:
        run: The --save folder.
        segment: The steps.
        folder: Temporary folder, which receives the records and all other files.
        trust: Settings of the replay, and what the record may name.

    Raises:
        UserError: If the record names what is not trusted.
    """
    before = segment.config
    at = segment.checkpoint
    options = before.checkpoint
    values: dict[str, Any] = {
        "record_every": before.logging.record_every,
        "exit_interval": segment.steps[-1],
    }
    if at:
        is_saved = (run / f"global_step{at}").is_dir()
        values |= {"load": str(run) if is_saved else options.load, "ckpt_step": at}
    elif options.load != options.save:
        values |= {name: getattr(options, name) for name in LOADED}
    if not before.schedule.batch_size_steps:
        dp_size = before.parallel.data_parallel_size(segment.ranks)
        values["global_batch_size"] = before.final_global_batch_size(dp_size)
    return one_process(before, values, run, folder, trust)


def _wanted(words: Sequence[str] | None, records: Mapping[int, Record]) -> list[int]:
    """The recorded steps that --steps names, or all."""
    if words is None:
        return sorted(records)
    spans = {word: parse_iteration_range(word) for word in words}
    for word, span in spans.items():
        if span is None:
            raise user_error("steps-malformed", "steps", word=word)
    steps = {x for span in spans.values() if span for x in range(span[0], span[1] + 1)}
    if not steps & records.keys():
        raise user_error("step-not-recorded", "steps", recorded=sorted(records))
    return sorted(steps & records.keys())


def _require_one_process(config: Config, ranks: int) -> None:
    """Refuses a run whose steps one process on the host does not compute.

    The ranks may draw dropout masks of their own, or balance the loads of micro-batches that are
    not computed one after the other.
    """
    sequence_ranks = config.parallel.sequence_ranks
    model = config.model
    shares_heads = config.parallel.tensor_model_parallel_size * sequence_ranks > 1
    if (shares_heads and model.attention_dropout) or (sequence_ranks > 1 and model.hidden_dropout):
        raise user_error("replay-draws-other-masks")
    replicas = config.parallel.data_parallel_size(ranks)
    if config.moe.balances_replicas and replicas > 1:
        raise user_error("replay-balances-other-loads", replicas=replicas)
