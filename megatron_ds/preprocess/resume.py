"""Where a preprocessing begins: at the start, or where an interrupted run stopped.

Owns what must be the same for a run to go on, and the words where it is not. Reads the record and
looks at files; changes nothing.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ds.data.indexed_dataset import HEADER, TOKENIZER_SUFFIX
from megatron_ds.data.indexed_writer import DOC_INDEX_SUFFIX, WriteCounts
from megatron_ds.preprocess import run_record
from megatron_ds.preprocess.document_readers import START, FileStamp, InputSpec
from megatron_ds.preprocess.output_files import OutputPaths, line_of
from megatron_ds.preprocess.run_record import FINISHED, RUNNING, RunRecord, RunSnapshot

FLAGS = {
    "keys": "--json-keys",
    "format": "--input-format",
    "hf_split": "--split",
    "made_by": "what makes the tokens",
}
"""Settings that are not named like their flags."""


@dataclass(frozen=True)
class ResumePoint:
    """Where to begin. record: that of the run that goes on, None for a new one; if it is not of a
    run under way, nothing is left to do but to give files their names, or nothing at all."""

    snapshot: RunSnapshot
    record: RunRecord | None = None


def find_resume_point(
    names: OutputPaths,
    settings: Mapping[str, Any],
    itemsize: int,
    inputs: InputSpec,
    resume: bool,
    say: Callable[[str], None],
) -> ResumePoint:
    """Where a run with these settings begins. itemsize: bytes per token. resume: whether it may go
    on; what speaks against it that new work would repair is said, and it begins anew.

    Raises ValueError, naming both, where settings or files are not those of the interrupted run.
    """
    new = ResumePoint(RunSnapshot(START, (WriteCounts(),) * len(names.pairs)))
    try:
        record = run_record.read(names.record)
    except ValueError as error:
        if resume:
            say(f"{error}; the run begins anew")
        return new
    if not resume:
        if record is not None and record.state != FINISHED and not inputs.unseekable_paths():
            say(
                f"{names.record}: an unfinished run had done {record.last.documents} documents; "
                "this one begins anew and replaces it (--resume would have gone on)"
            )
        return new
    if record is None:
        say(f"--resume: there is no {names.record}, nothing to go on with; the run begins anew")
        return new
    problems = list(_differences(names, record, settings))
    if problems:
        raise ValueError("\n".join(problems))
    try:
        if record.state != RUNNING:
            _check_complete(names, record, itemsize)
            _check_all_stamps(names, record, inputs)
            return ResumePoint(record.last, record)
        begun = _stamps(names, record.last)
        for snapshot in record.snapshots:
            _check_sizes(names, snapshot, itemsize)
    except _FilesMissing as error:
        say(f"--resume: {error}; the run begins anew")
        return new
    snapshot = _last_valid_snapshot(names, record, begun, inputs, say)
    return ResumePoint(snapshot, record)


class _FilesMissing(Exception):
    """Files of the interrupted run are not there as recorded."""


def _differences(
    names: OutputPaths, record: RunRecord, settings: Mapping[str, Any]
) -> Iterator[str]:
    for name in sorted({*record.settings, *settings}):
        before, now = record.settings.get(name), settings.get(name)
        if before != now:
            flag = FLAGS.get(name, "--" + name.replace("_", "-"))
            yield (
                f"--resume: {flag} is {_shown(now)}, and was {_shown(before)} in the run that "
                f"{names.record} tells of; give the same, or begin anew without --resume"
            )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return " ".join(str(value).split())


def _check_sizes(names: OutputPaths, snapshot: RunSnapshot, itemsize: int) -> None:
    needed = {names.sources: snapshot.sources}
    if snapshot.quarantine:
        needed[names.quarantine + ".partial"] = snapshot.quarantine
    for prefix, written in zip(names.pairs, snapshot.pairs, strict=True):
        needed[prefix + ".bin.partial"] = written.tokens * itemsize
        needed[prefix + ".idx.partial"] = HEADER.size + 4 * written.sequences
        needed[prefix + DOC_INDEX_SUFFIX] = 8 * written.documents
    for path, size in needed.items():
        there = _size(path)
        if there is None or there < size:
            has = "is not there" if there is None else f"has {there} bytes"
            raise _FilesMissing(f"{path} {has}, and {size} bytes were written")


def _check_complete(names: OutputPaths, record: RunRecord, itemsize: int) -> None:
    needed: dict[str, int | None] = {}
    if record.last.quarantine:
        needed[names.quarantine] = record.last.quarantine
    for prefix, (tokens, sequences, documents) in zip(names.pairs, record.last.pairs, strict=True):
        needed[prefix + ".bin"] = tokens * itemsize
        needed[prefix + ".idx"] = HEADER.size + 12 * sequences + 8 * (documents + 1)
        needed[prefix + TOKENIZER_SUFFIX] = None
    for path, size in needed.items():
        there = _size(path)
        if there is None and record.state != FINISHED:
            there = _size(path + ".partial")
        if there is None or (size is not None and there != size):
            has = "is not there" if there is None else f"has {there} bytes and not {size}"
            raise _FilesMissing(f"{path} {has}, as the run wrote it")


def _check_all_stamps(names: OutputPaths, record: RunRecord, inputs: InputSpec) -> None:
    lines = [line_of(stamp) for stamp in inputs.file_stamps()]
    if hashlib.sha256(b"".join(lines)).hexdigest() != record.last.digest:
        raise ValueError(
            f"--resume: {names.prefix} is complete, made of {record.last.place.file} files; "
            f"{inputs.name} means {len(lines)} files now, and not all are the same or unchanged; "
            "without --resume it is made again"
        )


def _stamps(names: OutputPaths, snapshot: RunSnapshot) -> list[FileStamp]:
    """The files that had been read or begun, as they were."""
    try:
        with open(names.sources, "rb") as file:
            content = file.read(snapshot.sources)
    except OSError as error:
        raise _FilesMissing(f"{names.sources} cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != snapshot.digest:
        raise _FilesMissing(f"{names.sources} is damaged")
    return [FileStamp(*json.loads(line)) for line in content.splitlines()]


def _last_valid_snapshot(
    names: OutputPaths,
    record: RunRecord,
    begun: list[FileStamp],
    inputs: InputSpec,
    say: Callable[[str], None],
) -> RunSnapshot:
    """The last snapshot of which all files are what they were. Raises ValueError without one."""
    same = 0
    change = ""
    now_there = inputs.file_stamps()
    for before in begun:
        now = next(now_there, None)
        if before != now:
            change = _change(before, now)
            break
        same += 1
    for snapshot in reversed(record.snapshots):
        if snapshot.place.files <= same:
            if change:
                say(f"--resume: {change}; it is read from its beginning")
            return snapshot
    raise ValueError(
        f"--resume: {change}: what {names.record} tells of cannot go on; begin anew without "
        "--resume"
    )


def _change(before: FileStamp, now: FileStamp | None) -> str:
    if now is None:
        return f"{before.name} was read, and is not among the inputs now"
    if now.name != before.name:
        return f"{before.name} was read, and in its place comes {now.name} now"
    return (
        f"{before.name} has changed since it was read: it had "
        f"{_describe_stamp(before)}, and has {_describe_stamp(now)}"
    )


def _describe_stamp(stamp: FileStamp) -> str:
    if not stamp.mark.isdecimal():
        return f"{stamp.size} bytes" + (f" ({stamp.mark})" if stamp.mark else "")
    seconds, nanoseconds = divmod(int(stamp.mark), 10**9)
    moment = datetime.datetime.fromtimestamp(seconds)  # as `ls` shows it
    return f"{stamp.size} bytes of {moment:%Y-%m-%d %H:%M:%S}.{nanoseconds:09}"


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
