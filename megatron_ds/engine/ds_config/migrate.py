"""Rewrites DeepSpeed files of earlier versions for the supported one, with the same meaning.

Old keys are translated, removed features are left out with their successor, and defaults that have
changed are written as they were. Does not import deepspeed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.deepspeed_file import DeepSpeedFile, Json, get, leaves, pop, put
from megatron_ds.config.problems import Problem, UserError, with_flags
from megatron_ds.engine.ds_config import history, schedules
from megatron_ds.engine.ds_config.fields import as_flag
from megatron_ds.engine.ds_config.file import normalize, parse_file, unknown_keys
from megatron_ds.engine.ds_config.keys import VERSION
from megatron_ds.engine.ds_config.values import as_optimizer

UNSUPPORTED = "ds-key-unsupported"
UNKNOWN = "ds-key-unknown"


@dataclass(frozen=True)
class Meaning:
    """An absent key whose default was another one.

    Attributes:
        key: Dotted name, or a description of what has no key.
        then: The default of the file's version.
        now: Value that megatron_ds uses without the key.
        since: Version of DeepSpeed since which it is so; "" if it is in megatron_ds alone.
        effect: Effect of the difference.
        is_written: Whether the migrated file has the former default.
        flag: Flag that restores it, for what has no key.
    """

    key: str
    then: Any
    now: Any
    since: str
    effect: str
    is_written: bool
    flag: str


@dataclass
class Migration:
    """A migrated file and what was done to it.

    Attributes:
        values: The new file.
        version: Version for which the old file was written.
        assumed_from: Why the version was assumed; "" if it was given.
        changes: Translated keys, and keys without effect that were left out.
        removed: Keys and blocks that were left out, with what replaces them.
        unknown: Keys that were left out because no version has them.
        flags: Flags that replace blocks.
        meanings: Absent keys that meant something else.
        auto: Keys that are left to the flags.
    """

    values: Json
    version: str
    assumed_from: str
    changes: list[Problem] = field(default_factory=list)
    removed: list[Problem] = field(default_factory=list)
    unknown: list[Problem] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    meanings: list[Meaning] = field(default_factory=list)
    auto: list[str] = field(default_factory=list)


def migrate(path: str, version: str | None = None, *, new_defaults: bool = False) -> Migration:
    """Rewrite a file.

    Args:
        path: File for any version of DeepSpeed since 0.5.
        version: The version, such as "0.9"; the oldest one with all keys of the file if None.
        new_defaults: Leave defaults that have changed as they are now.

    Raises:
        UserError: If the file or the version cannot be read, or values are invalid.
    """
    known = None if version is None else history.known_version(version)
    file = parse_file(path)
    oldest, key = history.oldest_version(file)
    reason = f"the first version with {key}" if key else "the oldest supported version"
    result = Migration(file.values, known or oldest, "" if known else reason)
    if known and history.as_version(known) < history.as_version(oldest):
        result.changes.append(file.at(key, Problem("ds-key-is-newer", key=key, version=oldest)))
    result.changes += [*_replaced_keys(file), *_replaced_optimizer(file)]
    normalize(file)
    _check_optimizer(file)
    result.changes += [*file.warnings, *_replaced_stage(file)]
    result.removed = [problem for problem in file.problems if problem.code == UNSUPPORTED]
    result.unknown = [problem for problem in file.problems if problem.code == UNKNOWN]
    invalid = [problem for problem in file.problems if problem.code not in (UNSUPPORTED, UNKNOWN)]
    if invalid:
        raise UserError(*invalid)
    for key in unknown_keys(file):
        pop(file.values, key)
    _remove_schedules(file, result)
    result.meanings = list(_meanings(file, result.version, new_defaults))
    result.auto = [key for key in leaves(file.values) if get(file.values, key) == "auto"]
    return result


def _replaced_keys(file: DeepSpeedFile) -> Iterator[Problem]:
    for old, new in history.REPLACED.items():
        value = get(file.values, old)
        if isinstance(value, int) and not isinstance(value, bool):
            pop(file.values, old)
            if value > 1:
                put(file.values, new, value)
                reason = "optimizer states are partitioned over all ranks"
                yield _replaced(file, old, f"{new} {value}", reason)


def _replaced_optimizer(file: DeepSpeedFile) -> Iterator[Problem]:
    key = "optimizer.type"
    for old, entry in history.OPTIMIZERS.items():
        if str(get(file.values, key)).lower() == old.lower():
            put(file.values, key, entry["successor"])
            params = (f"optimizer.params.{name}" for name in entry["params"])
            gone = [name for name in params if pop(file.values, name) is not None]
            shown = " with ".join([f"{key} {old}", *[", ".join(gone)][: len(gone)]])
            yield _replaced(file, shown, entry["successor"], entry["effect"], key)


def _check_optimizer(file: DeepSpeedFile) -> None:
    key = "optimizer.type"
    try:
        as_optimizer(file.get(key) or "adam")
    except ValueError as error:
        file.problems.append(file.invalid(key, error))


def _replaced_stage(file: DeepSpeedFile) -> Iterator[Problem]:
    """Stage 0 is not supported in half precision, in which DeepSpeed computes it incorrectly."""
    key = "zero_optimization.stage"
    if file.get(key) == 0 and (file.get("fp16.enabled") or file.get("bf16.enabled")):
        put(file.values, key, 1)
        reason = "stage 0 is not supported in half precision; the results are the same"
        yield _replaced(file, f"{key} 0", "stage 1", reason, key)


def _replaced(file: DeepSpeedFile, old: str, new: str, reason: str, key: str = "") -> Problem:
    return file.at(key or old, Problem("ds-key-replaced", old=old, new=new, reason=reason))


def _remove_schedules(file: DeepSpeedFile, result: Migration) -> None:
    """Leave out the schedules that only flags can express."""
    problems = list(schedules.scheduler_problems(Config(), file))
    if problems:
        pop(file.values, "scheduler")
        result.removed += problems
    if file.get(schedules.CURRICULUM) is not None:
        result.removed += schedules.curriculum_problems(file)
        result.flags = [
            with_flags(as_flag(name, value)) for _, name, value in schedules.curriculum_fields(file)
        ]
        pop(file.values, schedules.CURRICULUM)


def _meanings(file: DeepSpeedFile, version: str, new_defaults: bool) -> Iterator[Meaning]:
    concerned = [former for former in history.FORMER if former.concerns(file)]
    for former in concerned:
        then = former.at(version)
        if then == former.here:
            continue
        is_written = former.keep and not new_defaults
        if is_written:
            put(file.values, former.key, then)
        yield Meaning(
            former.key, then, former.here, former.moved, former.effect, is_written, former.flag
        )


def text(migration: Migration, path: str) -> str:
    """The list of changes, for a terminal."""
    assumed = f" (assumed: {migration.assumed_from}; --from-version gives it)"
    lines = [
        f"{path}: from DeepSpeed {migration.version}"
        f"{assumed if migration.assumed_from else ''} to {VERSION}"
    ]
    sections = {
        "changed": [problem.render() for problem in migration.changes],
        "removed, with the successor": [problem.render() for problem in migration.removed],
        "left out, known to no version": [problem.render() for problem in migration.unknown],
        "flags that replace curriculum_learning": migration.flags,
        "absent keys with another default": [_line(meaning) for meaning in migration.meanings],
        'left to the flags of the run ("auto")': migration.auto,
    }
    for title, entries in sections.items():
        lines += [f"{title}:", *(f"  - {entry}" for entry in entries)] if entries else []
    return "\n".join(lines) + "\n"


def _line(meaning: Meaning) -> str:
    then = _shown(meaning.then)
    now = _shown(meaning.now)
    owner = f"DeepSpeed since {meaning.since}" if meaning.since else "megatron_ds"
    end = f"; {meaning.flag} {then} restores it" if meaning.flag else ""
    end = f"; written as {then}" if meaning.is_written else end
    return f"{meaning.key}: was {then}, is {now} ({owner}): {meaning.effect}{end}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
