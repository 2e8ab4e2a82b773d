"""Reads what a run has recorded about itself, in a folder that may come from somebody else.

Owns the form of `events.jsonl` and `step_records.jsonl`, and what the settings in them may make a
program do. A record decides neither what code runs nor what is written, and which files outside of
the folder are read only if its reader allows it. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron_ds.checkpoint.compatibility import config_of
from megatron_ds.config import Config, phases
from megatron_ds.config.problems import UserError, user_error
from megatron_ds.engine.ds_config.fields import field_value
from megatron_ds.training.loggers.events import EVENTS

Record = Mapping[str, Any]
MAX_LINE = 1 << 28
"""Bytes of a line. The record of a step has 200 bytes per parameter and 40 per sample."""
NOT_A_RECORD = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError)
"""Errors of values of another form, RecursionError of deep ones aside."""
FILES = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "exclude_documents",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "load",
    "pretrained_checkpoint",
)
"""Options that name files, folders or URLs to read; numbers among them are weights of a blend."""
LISTS = (
    "data_args_path",
    "per_split_data_args_path",
    "train_weighted_split_paths",
    "train_weighted_split_paths_path",
    "valid_weighted_split_paths",
    "valid_weighted_split_paths_path",
    "test_weighted_split_paths",
    "test_weighted_split_paths_path",
)
"""Options whose value, or whose file, names further files."""
CACHES = ("data_cache_path", "object_storage_cache_path")
"""Options that name folders to write."""


def read_objects(path: Path, check: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
    """The objects of a file with one on each line, without a last line that is being written.

    Args:
        path: A file of JSON lines.
        check: Called with each object. Any error of NOT_A_RECORD says that it has another form.

    Raises:
        UserError: If the file is missing or has no object, or if a line is not an object.
    """
    objects = []
    try:
        with path.open("rb") as file:
            for position, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
                if not line.endswith(b"\n"):
                    break
                with requiring_form(path, position):
                    value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
                    if not isinstance(value, dict):
                        raise TypeError("the line is not a JSON object")
                    check(value)
                    objects.append(value)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise user_error("step-records-unreadable", path=path, error=error) from None
    if not objects:
        raise user_error("step-records-missing", path=path)
    return objects


@contextmanager
def requiring_form(path: Path, line: int | None = None) -> Iterator[None]:
    """Raises a UserError about a file, or a line of it, for values of another form."""
    try:
        yield
    except UserError:
        raise
    except (*NOT_A_RECORD, RecursionError) as error:
        where = str(path) if line is None else f"{path}, line {line}"
        reason = f"{type(error).__name__}: {error}"[:200]
        raise user_error("step-records-damaged", where=where, error=reason) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def read_records(path: Path) -> dict[int, Record]:
    """The records of steps in a file by iteration; see `read_objects`."""
    return {record["iteration"]: record for record in read_objects(path, check_record)}


def read_starts(run: Path) -> list[dict[str, Any]]:
    """The starts of a run in `events.jsonl`, in their order, with `settings`: its Config.

    Raises:
        UserError: If there is none, or the file is damaged.
    """

    def check(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            _require_integer(event, "iteration", 0)
            _require_integer(event, "ranks", 1)
            event["settings"] = config_of(event["config"])

    starts = [event for event in read_objects(run / EVENTS, check) if event["event"] == "start"]
    if not starts:
        raise user_error("step-records-missing", path=run / EVENTS)
    return starts


def check_record(record: Record) -> None:
    """Checks the form of the record of a step: see docs/running/verifying.md.

    Raises:
        ValueError, TypeError, KeyError: If a value is missing or of another type.
    """
    _require_integer(record, "iteration", 1)
    for name in ("loss", "grad_norm"):
        _require_number(name, record[name])
    if not isinstance(record["skipped"], bool):
        raise TypeError("skipped is not true or false")
    for name in ("samples", "random"):
        if not all(isinstance(value, str) for value in record[name].values()):
            raise TypeError(f"{name}: a value is not a hash")
    for name, value in record["layers"].items():
        _require_number(name, value)
    for key in () if record["skipped"] else ("weights", "gradients", "updated"):
        for name, (norm, total) in record[key].items():
            _require_number(name, norm)
            _require_number(name, total)
    for name, value in {} if record["skipped"] else record["update"].items():
        _require_number(name, value)


def _require_integer(values: Record, name: str, minimum: int) -> None:
    if type(values[name]) is not int or values[name] < minimum:
        raise ValueError(f"{name} is not a number from {minimum} on")


def _require_number(name: str, value: Any) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    ):
        raise ValueError(f"{name}: a value is neither a finite number nor null")


def restricted(
    config: Config, run: Path, folder: Path, *, replaced: Collection[str], is_trusted: bool
) -> Config:
    """Recorded settings, restricted to what a reader of the run allows.

    Code of a tokenizer runs only if the reader asks for it, and caches of indexes and of objects
    are written to `folder` unless the reader names others.

    Args:
        config: Recorded settings, with those that the reader has replaced.
        run: The --save folder, whose files are always read.
        folder: Temporary folder of the reader.
        replaced: Fields that the reader has replaced.
        is_trusted: Files that the record names outside of `run` are read where it names them.

    Raises:
        UserError: If the settings run code, or read other files, that the reader did not allow.
    """
    if config.tokenizer.trust_remote_code and "trust_remote_code" not in replaced:
        raise user_error("checkpoint-tokenizer-runs-code", path=run)
    outside = [
        (name, value)
        for name, value in _files(config, replaced)
        if name in LISTS or not _is_inside(value, run)
    ]
    if outside and not is_trusted:
        names = dict.fromkeys(name for name, _ in outside)
        files = ", ".join(dict.fromkeys(str(value) for _, value in outside))
        raise user_error("recorded-files-not-trusted", *names, files=files, run=run)
    unnamed = [name for name in CACHES if name not in replaced]
    caches = {name: str(folder / name) for name in unnamed if not is_trusted}
    return config.with_values(caches)


def _files(config: Config, replaced: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The files that settings name, by field."""
    run_values = {
        name: field_value(config, name) for name in (*FILES, *LISTS) if name not in replaced
    }
    # The data of a stage replaces what the reader has given for all of them.
    for settings in (run_values, *map(phases.values_of, config.schedule.stages)):
        for name in settings.keys() & {*FILES, *LISTS}:
            value = settings[name]
            words = [value] if isinstance(value, str) else value or ()
            yield from ((name, word) for word in words if not _is_weight(word))


def _is_weight(word: str) -> bool:
    return re.fullmatch(r"[0-9.eE+-]+", word) is not None


def _is_inside(value: Any, run: Path) -> bool:
    """Whether a recorded file is one of the run's folder."""
    if not isinstance(value, str) or "://" in value or value.startswith("hf:"):
        return False
    return Path(os.path.realpath(value)).is_relative_to(os.path.realpath(run))
