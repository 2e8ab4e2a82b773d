"""Checks a run: replays recorded steps as one process, and compares them with its records.

Owns which checkpoint a step is replayed from, the settings of a replay, and the comparison, in the
order in which a step computes. How a replay is started comes in as a function. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megatron_ds.checkpoint.compatibility import config_of
from megatron_ds.checkpoint.metadata import iteration_of, list_checkpoints
from megatron_ds.config import GROUP_OF_FIELD, Config, yaml_file
from megatron_ds.config.data_files import read_table
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.options.checkpoint import missing_folder
from megatron_ds.config.options.schedule import parse_iteration_range
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.engine.ds_config.fields import field_value
from megatron_ds.training.loggers.events import EVENTS
from megatron_ds.training.loggers.step_records import FILE_NAME

Record = Mapping[str, Any]
Replay = Callable[[Sequence[str]], int]
"""Trains as one process on the host, with flags of pretrain_gpt.py; returns the exit status."""
TABLES: dict[str, Any] = read_table(__file__)
SETTINGS = "replay.yaml"


@dataclass(frozen=True)
class Options:
    """Checks a run that has records of --record-every: replays recorded steps from the checkpoint
    before them, as one process on a CPU, whatever the layout of the run.

    Flags of pretrain_gpt.py replace settings of the run, such as --data-path where the data is
    elsewhere. Exit status 0: all steps are equal; 1: the first difference is printed; 2: the steps
    cannot be replayed.
    """

    PEERS: ClassVar[str] = "pretrain_gpt"

    run: str = option_field(
        "", "--save folder of the run", metavar="RUN", positional=True, required=True
    )
    steps: tuple[str, ...] | None = option_field(
        None,
        "steps to check, such as 3 or 10-20 (default: all recorded ones)",
        nargs="*",
        metavar="STEPS",
    )
    tolerance: float | None = option_field(
        None,
        "largest accepted difference relative to a norm (default: 1e-4 in fp32, 0.05 otherwise)",
        above=0,
    )
    script: str | None = option_field(
        None, "program that trained the run (default: pretrain_gpt.py)", metavar="FILE"
    )
    training: Config = option_group(Config(), hidden=True)
    given: frozenset[str] = frozenset()

    def problems(self) -> Iterator[Problem]:
        yield from missing_folder(self.run)

    @property
    def changes(self) -> dict[str, Any]:
        """The flags of pretrain_gpt.py, by field."""
        names = self.given - {"run", "steps", "tolerance", "script"}
        return {name: field_value(self.training, name) for name in sorted(names)}


@dataclass(frozen=True)
class Segment:
    """Steps that are replayed from one checkpoint."""

    checkpoint: int
    """Its iteration; 0: the start of the run."""
    config: Config
    """Settings of the run in these steps."""
    ranks: int
    steps: list[int]


class Difference(NamedTuple):
    """A value of a record that its replay does not have."""

    cause: str
    """A key of `causes` in verification.toml."""
    where: str
    """Sample, or layer and tensor."""
    size: float
    """Relative to the norm; infinite for what must be equal bit for bit."""
    values: tuple[Any, Any]
    """Of the run, and of the replay."""


def verify(options: Options, replay: Replay, say: Callable[[str], object]) -> int:
    """Replays steps, and returns the exit status.

    Raises:
        UserError: If they cannot be replayed.
    """
    run = Path(options.run)
    records = read_records(run / FILE_NAME)
    steps, largest = _wanted(options.steps, records), dict[str, Difference]()
    for segment in segments(run, steps):
        span = f"{segment.checkpoint + 1} to {segment.steps[-1]}"
        say(f"replaying iterations {span} of {run} as one process")
        tolerance = options.tolerance
        if tolerance is None:
            tolerance = TABLES["tolerance"][segment.config.precision.name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, SETTINGS)
            config = replay_config(run, segment, Path(folder), options.changes)
            path.write_text(yaml_file.dump(config), encoding="utf-8")
            if status := replay(["--config", str(path)]):
                raise user_error("replay-failed", status=status)
            replayed = read_records(Path(folder, FILE_NAME))
        for step in segment.steps:
            differences = list(compare(records[step], replayed.get(step, {})))
            for item in differences:
                if item.size > tolerance:
                    say(f"step {step} is not equal: {describe(item)}")
                    return 1
            for item in differences:
                largest[item.cause] = max(item, largest.get(item.cause, item), key=lambda x: x.size)
            say(f"step {step} is equal")
    say(f"equal: {len(steps)} steps; the largest relative differences are")
    for item in largest.values():
        say(f"    {item.cause}: {item.size:.1e}, {item.where}")
    return 0


def describe(difference: Difference) -> str:
    """The cause of a difference and what it means, where it is, and both values."""
    run, replay = difference.values
    meaning = TABLES["causes"][difference.cause]
    return f"{difference.where}: {difference.cause} ({meaning}); the run has {run}, replay {replay}"


def read_records(path: Path) -> dict[int, Record]:
    """The records of a run by iteration.

    Raises:
        UserError: If there are none, or a line is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        parsed = [json.loads(line) for line in lines]
        records = {int(record["iteration"]): record for record in parsed}
    except FileNotFoundError:
        records = {}
    except (ValueError, TypeError, KeyError) as error:
        raise user_error("step-records-damaged", path=path, error=error) from None
    if not records:
        raise user_error("step-records-missing", "record_every", path=path)
    return records


def segments(run: Path, steps: Sequence[int]) -> list[Segment]:
    """The steps by the checkpoint from which they are replayed.

    Raises:
        UserError: If a step has none, or draws random numbers that one process on a CPU does not.
    """
    lines = (run / EVENTS).read_text(encoding="utf-8").splitlines()
    starts = [event for event in map(json.loads, lines) if event["event"] == "start"]
    saved = [iteration_of(path) for path in list_checkpoints(run)]
    result: dict[int, Segment] = {}
    for step in steps:
        start = [event for event in starts if event["iteration"] < step][-1]
        first = start["iteration"]
        usable = [at for at in [*saved, 0] if first <= at < step and (at or not first)]
        if not usable:
            raise user_error("replay-without-checkpoint", step=step, first=first, run=run)
        config = config_of(start["config"])
        new = Segment(max(usable), config, start["ranks"], [])
        _require_masks(config)
        result.setdefault(new.checkpoint, new).steps.append(step)
    return list(result.values())


def replay_config(run: Path, segment: Segment, folder: Path, changes: Mapping[str, Any]) -> Config:
    """The settings of a replay: those of the run, as one process that saves nothing.

    Args:
        run: The --save folder.
        segment: The steps.
        folder: Receives the records.
        changes: Flags of pretrain_gpt.py.
    """
    before, default = segment.config, Config()
    unlike = {name: getattr(default, name) for name in TABLES["groups"]}
    config = dataclasses.replace(before, **unlike)
    options, model, parallel = before.checkpoint, before.model, before.parallel
    is_new = segment.checkpoint == 0
    loaded = {name: getattr(options, name) for name in TABLES["of_new_run"]} if is_new else {}
    if not is_new or options.load in (None, options.save):
        step = {"ckpt_step": segment.checkpoint, "exit_on_missing_checkpoint": True}
        loaded = {} if is_new else {"load": str(run), **step}
    dp_size = parallel.data_parallel_size(segment.ranks)
    sizes = {"global_batch_size": before.final_global_batch_size(dp_size)}
    unit = math.lcm(model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size)
    null = before.tokenizer.tokenizer_type == "NullTokenizer"
    values = {
        **loaded,
        **({} if before.schedule.batch_size_steps else sizes),
        "make_vocab_size_divisible_by": unit,
        "vocab_size": model.vocab_size - null,  # which counts no end of documents
        "metrics_jsonl": str(folder / "metrics.jsonl"),
        "record_every": before.logging.record_every,
        "exit_interval": segment.steps[-1],
        "eval_iters": 0,
        "num_workers": 0,
        "seed": before.runtime.seed,
        "memory_check": "off",
        "zero_stage": min(before.zero_stage, 1),
        "allow_fp16_on_cpu": before.precision.fp16,
        **changes,
    }
    config = config.with_values(values)
    chosen = {
        name for name in GROUP_OF_FIELD if field_value(config, name) != field_value(default, name)
    } - (set() if null else {"vocab_size"})
    return dataclasses.replace(config, given=frozenset(chosen | changes.keys()))


def compare(run: Record, replay: Record) -> Iterator[Difference]:
    """Compares a record with its replay, in the order in which a step computes."""
    yield from _compare_hashes("data", "sample {}", run, replay, "samples")
    yield from _compare_norms("weights", run, replay, "weights")
    yield from _compare_hashes("random numbers", "{}", run, replay, "random")
    for name, value in run["layers"].items():
        if name in replay["layers"]:
            yield _difference("forward", f"{name}: output", value, replay["layers"][name])
    yield _difference("forward", "head: loss", run["loss"], replay["loss"])
    least = TABLES["least"] * (replay["grad_norm"] or 0.0)
    yield from _compare_norms("gradient", run, replay, "gradients", least)
    yield _difference("optimizer", "skipped", float(run["skipped"]), float(replay["skipped"]))
    yield from _compare_norms("optimizer", run, replay, "updated")


def _compare_hashes(
    cause: str, where: str, run: Record, replay: Record, key: str
) -> Iterator[Difference]:
    """Compares hashes. Random states are compared where both have one: compiled layers have none
    after their pass."""
    for name, value in run[key].items():
        other = replay[key].get(name)
        if other is not None or key == "samples":
            size = 0.0 if value == other else math.inf
            yield Difference(cause, where.format(name), size, (value, other))


def _compare_norms(
    cause: str, run: Record, replay: Record, key: str, least: float = 0.0
) -> Iterator[Difference]:
    """Compares norms and sums of tensors; those of gradients in the order of a backward pass.

    Args:
        cause: Of the differences.
        run: Record of the run.
        replay: Record of the replay.
        key: Of the tensors in both.
        least: Least norm to which a difference is relative.
    """
    names = list(replay.get(key, {}))
    for name in reversed(names) if key == "gradients" else names:
        if key != "gradients" and name.endswith(TABLES["undecided"]):
            continue
        values, expected = run[key].get(name, (None, None)), replay[key][name]
        for what, value, other in zip(("norm", "sum"), values, expected, strict=True):
            scale = max(expected[0] or 0.0, least)
            yield _difference(cause, f"{name}: {what}", value, other, scale)


def _difference(
    cause: str, where: str, run: float | None, replay: float | None, scale: float | None = None
) -> Difference:
    """Compares two numbers, which are None if they are not finite.

    Args:
        cause: Of the difference.
        where: Name of the number.
        run: Of the run.
        replay: Of the replay.
        scale: To what the difference is relative; None: the replay's number.
    """
    size = 0.0 if run == replay else math.inf
    if run is not None and replay is not None and run != replay:
        size = abs(run - replay) / ((abs(replay) if scale is None else scale) or abs(run))
    return Difference(cause, where, size, (run, replay))


def _wanted(words: Sequence[str] | None, records: Mapping[int, Record]) -> list[int]:
    """The recorded steps that --steps names, or all."""
    if words is None:
        return sorted(records)
    ranges = [range(first, last + 1) for first, last in map(_range_of, words)]
    steps = sorted({step for span in ranges for step in span})
    if missing := [step for step in steps if step not in records]:
        raise user_error("step-not-recorded", "steps", steps=missing, recorded=sorted(records))
    return steps


def _range_of(word: str) -> tuple[int, int]:
    span = parse_iteration_range(word)
    if span is None:
        raise user_error("steps-malformed", "steps", word=word)
    return span


def _require_masks(config: Config) -> None:
    """Refuses a run whose dropout masks one process on the host does not draw."""
    sizes, model = config.parallel, config.model
    is_sharded = sizes.ds_sequence_parallel_size > 1 and model.hidden_dropout > 0
    ranks = sizes.tensor_model_parallel_size * sizes.ds_sequence_parallel_size
    if is_sharded or (ranks > 1 and model.attention_dropout > 0):
        raise user_error("replay-draws-other-masks")
