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
from typing import Any, NamedTuple

from megatron_ds.checkpoint.compatibility import config_of
from megatron_ds.checkpoint.metadata import iteration_of, list_checkpoints
from megatron_ds.config import GROUP_OF_FIELD, Config, yaml_file
from megatron_ds.config.data_files import read_table
from megatron_ds.config.options.schedule import parse_iteration_range
from megatron_ds.config.problems import user_error
from megatron_ds.engine.ds_config.fields import field_value
from megatron_ds.training.loggers.events import EVENTS
from megatron_ds.training.loggers.step_records import FILE_NAME, record_path

Record = Mapping[str, Any]
Replay = Callable[[Sequence[str]], int]
"""Trains as one process on the host, with flags of pretrain_gpt.py; returns the exit status."""
TABLES: dict[str, Any] = read_table(__file__)


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
    """A value of a record, and of its replay."""

    cause: str
    """A key of `causes` in verification.toml."""
    where: str
    """Sample, or layer and tensor."""
    run: Any
    replay: Any
    size: float
    """Relative to a norm; infinite where hashes are not equal."""


def verify(
    run: Path,
    steps: Sequence[str] | None,
    replay: Replay,
    say: Callable[[str], object],
    *,
    tolerance: float | None = None,
    changes: Mapping[str, Any] | None = None,
) -> int:
    """Replays steps, and returns the exit status.

    Args:
        run: The --save folder.
        steps: Steps or ranges of steps, such as "10-20"; None: all recorded ones.
        replay: Starts a replay.
        say: Prints a line.
        tolerance: Largest accepted difference; None: that of the precision of the run.
        changes: Settings of the replay, by field.

    Raises:
        UserError: If they cannot be replayed.
    """
    largest = dict[str, Difference]()
    records, planned = plan(run, steps)
    for segment in planned:
        span = f"{segment.checkpoint + 1} to {segment.steps[-1]}"
        say(f"replaying iterations {span} of {run} as one process")
        limits = TABLES["tolerance"][segment.config.precision.name]
        with tempfile.TemporaryDirectory() as folder:
            config = replay_config(run, segment, Path(folder), changes or {})
            path = Path(folder, "replay.yaml")
            path.write_text(yaml_file.dump(config), encoding="utf-8")
            status = replay(["--config", str(path)])
            replayed = {} if status else read_records(Path(folder, FILE_NAME))
        if not replayed.keys() >= set(segment.steps):
            raise user_error("replay-failed", status=status)
        for step in segment.steps:
            for item in compare(records[step], replayed[step]):
                of_sum = limits["sum"] if item.where.endswith(" sum") else 0.0
                if item.size > (tolerance or max(limits.get(item.cause, 0.0), of_sum)):
                    say(f"step {step} is not equal: {_describe(item)}")
                    return 1
                pair = largest.get(item.cause, item), item
                largest[item.cause] = max(pair, key=lambda one: one.size)
            say(f"step {step} is equal")
    say("equal; the largest differences, relative to norms, are")
    for item in largest.values():
        say(f"    {item.cause}: {item.size:.1e}, {item.where}")
    return 0


def _describe(item: Difference) -> str:
    values = f"the run has {item.run}, its replay {item.replay}"
    return f"{item.where}: {item.cause} ({TABLES['causes'][item.cause]}); {values}"


def read_records(path: Path) -> dict[int, Record]:
    """The records of a file by iteration; see `_read_lines`."""
    return {record["iteration"]: record for record in _read_lines(path)}


def _read_lines(path: Path) -> list[Record]:
    """The objects of a file with an iteration, without a last line that is being written.

    Raises:
        UserError: If there is no file or no object, or a line is none.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]
        objects = [line | {"iteration": int(line["iteration"])} for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise user_error("step-records-damaged", path=path, error=error) from None
    if not objects:
        raise user_error("step-records-missing", path=path)
    return objects


def plan(run: Path, words: Sequence[str] | None) -> tuple[dict[int, Record], list[Segment]]:
    """The records of a run, and the wanted steps by the checkpoint they are replayed from.

    Raises:
        UserError: If a step has no record or no checkpoint, or draws random numbers that one
            process on the host does not.
    """
    starts = [event for event in _read_lines(run / EVENTS) if event["event"] == "start"]
    records = read_records(record_path(config_of(starts[-1]["config"]), run) or run / FILE_NAME)
    saved = {iteration_of(path) for path in list_checkpoints(run)}
    result: dict[int, Segment] = {}
    for step in _wanted(words, records):
        start = [event for event in starts if event["iteration"] < step][-1]
        config, first = config_of(start["config"]), start["iteration"]
        _require_masks(config)
        loaded = {first} if first == 0 or config.checkpoint.load != str(run) else set()
        usable = {at for at in saved if first <= at < step} | loaded
        if not usable:
            raise user_error("replay-without-checkpoint", step=step, first=first, run=run)
        new = Segment(max(usable), config, start["ranks"], [])
        result.setdefault(new.checkpoint, new).steps.append(step)
    return records, list(result.values())


def replay_config(run: Path, segment: Segment, folder: Path, changes: Mapping[str, Any]) -> Config:
    """The settings of a replay: those of the run, as one process that saves nothing.

    Args:
        run: The --save folder.
        segment: The steps.
        folder: Receives the records.
        changes: Flags of pretrain_gpt.py.
    """
    before, default, at = segment.config, Config(), segment.checkpoint
    options, model, parallel = before.checkpoint, before.model, before.parallel
    values = dict(TABLES["settings"])
    if at:
        is_saved = (run / f"global_step{at}").is_dir()
        values |= {"load": str(run) if is_saved else options.load, "ckpt_step": at}
    elif options.load != options.save:
        values |= {name: getattr(options, name) for name in TABLES["of_new_run"]}
    if not before.schedule.batch_size_steps:
        dp_size = parallel.data_parallel_size(segment.ranks)
        values["global_batch_size"] = before.final_global_batch_size(dp_size)
    unit = math.lcm(model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size)
    is_null = before.tokenizer.tokenizer_type == "NullTokenizer"
    values |= {
        "make_vocab_size_divisible_by": unit,
        "vocab_size": model.vocab_size - is_null,  # which counts no end of documents
        "metrics_jsonl": str(folder / "metrics.jsonl"),
        "record_every": before.logging.record_every,
        "exit_interval": segment.steps[-1],
        "seed": before.runtime.seed,
        "zero_stage": min(before.zero_stage, 1),
        "allow_fp16_on_cpu": before.precision.fp16,
        **changes,
    }
    unlike = {name: getattr(default, name) for name in TABLES["groups"]}
    config = dataclasses.replace(before, **unlike).with_values(values)
    names = {x for x in GROUP_OF_FIELD if field_value(config, x) != field_value(default, x)}
    names -= set() if is_null else {"vocab_size"}
    return dataclasses.replace(config, given=frozenset(names | changes.keys()))


def compare(run: Record, replay: Record) -> Iterator[Difference]:
    """Compares a record with its replay, in the order in which a step computes."""
    of_run = {(cause, where): value for cause, where, value, _ in _values_of(run)}
    of_replay = {(cause, where): x for cause, where, *x in _values_of(replay)}
    for key in dict.fromkeys([*of_replay, *of_run]):
        value, (expected, scale) = of_run.get(key), of_replay.get(key, (None, None))
        size = 0.0 if value == expected else math.inf
        if value is None and key[0] in TABLES["not_everywhere"]:
            continue
        if size and isinstance(value, float) and isinstance(expected, float):
            size = abs(value - expected) / (scale or abs(expected) or abs(value))
        yield Difference(*key, value, expected, size)


def _values_of(record: Record) -> Iterator[tuple[str, str, Any, float | None]]:
    """The values of a record, in the order in which a step computes: cause of a difference, name,
    value, and the norm to which a difference is relative; None: the value itself."""

    def norms(cause: str, key: str, least: float = 0.0) -> Iterator[tuple[str, str, Any, float]]:
        names = [*record.get(key, ())]
        for name in reversed(names) if key == "gradients" else names:
            if key == "gradients" or not name.endswith(TABLES["undecided"]):
                norm, total = record[key][name]
                scale = max(norm or 0.0, least)
                yield cause, f"{name}: norm", norm, scale
                yield cause, f"{name}: sum", total, scale

    for name, value in record["samples"].items():
        yield "data", f"sample {name}", value, None
    yield from norms("weights", "weights")
    for name, value in record["random"].items():
        yield "random numbers", name, value, None
    for name, value in record["layers"].items():
        yield "forward", f"{name}: output", value, None
    yield "forward", "head: loss", record["loss"], None
    yield from norms("gradient", "gradients", TABLES["least"] * (record["grad_norm"] or 0.0))
    yield "optimizer", "skipped", record["skipped"], None
    yield from norms("optimizer", "updated")


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


def _require_masks(config: Config) -> None:
    """Refuses a run whose dropout masks one process on the host does not draw."""
    sp_size, model = config.parallel.ds_sequence_parallel_size, config.model
    shares_heads = config.parallel.tensor_model_parallel_size * sp_size > 1
    if (shares_heads and model.attention_dropout) or (sp_size > 1 and model.hidden_dropout):
        raise user_error("replay-draws-other-masks")
