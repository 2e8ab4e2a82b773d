"""The record of a preprocessing run: with which settings it ran, how far it came, what it counted.

`<output_prefix>.run.json` is replaced as a whole at intervals, always after what it tells of is on
the disk, and stays when the run is done. Owns what stands in that file; knows no files but it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ds.data.indexed_writer import WriteCounts
from megatron_ds.fileio.atomic import (
    fsync_path,
    write_atomically,
)
from megatron_ds.preprocess.document_readers import ReadPosition

VERSION = 1
RUNNING, SEALED, FINISHED = "running", "sealed", "finished"
STATES = (RUNNING, SEALED, FINISHED)
"""Under way; all on the disk, and to be given its names; done."""


@dataclass(frozen=True)
class RunSnapshot:
    """A moment of a run at which all files were in step.

    place: what was read. pairs: what was written for each key. quarantine, sources: bytes of the
    list of what was left out and of that of the files read. digest: SHA-256 of the latter. The rest
    are counts as in the summary.
    """

    place: ReadPosition
    pairs: tuple[WriteCounts, ...]
    quarantine: int = 0
    sources: int = 0
    digest: str = ""
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """What the file says.

    settings: all that the output depends on, but for the inputs. snapshots: the last, and before it
    the last one that stands before the file that was being read, for if that one changes.
    """

    state: str
    settings: Mapping[str, Any]
    snapshots: tuple[RunSnapshot, ...]

    @property
    def last(self) -> RunSnapshot:
        return self.snapshots[-1]


def write(path: str, record: RunRecord) -> None:
    """Replace the record of a prefix, durably."""
    content = dataclasses.asdict(record)
    whole = {"version": VERSION, "sha256": _sum(content), "run": content}
    write_atomically(path, (json.dumps(whole, indent=1) + "\n").encode())


def read(path: str) -> RunRecord | None:
    """The record of a prefix; None without one. Raises ValueError, in words, if it is damaged."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        whole = json.loads(content)
        version, digest, run = whole["version"], whole["sha256"], whole["run"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path} is damaged: it is no record of a run") from None
    if version != VERSION:
        raise ValueError(f"{path} was written by another version ({version}, not {VERSION})")
    if digest != _sum(run):
        raise ValueError(f"{path} is damaged: its checksum is not that of its content")
    snapshots = tuple(_snapshot(snapshot) for snapshot in run.pop("snapshots"))
    return RunRecord(snapshots=snapshots, **run)


def remove(path: str) -> None:
    """Forget a run, durably: what is written from now on must not be taken for what it wrote."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    fsync_path(os.path.dirname(path) or ".")


def _sum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _snapshot(content: dict[str, Any]) -> RunSnapshot:
    place, pairs = content.pop("place"), content.pop("pairs")
    return RunSnapshot(
        place=ReadPosition(*place), pairs=tuple(WriteCounts(*pair) for pair in pairs), **content
    )
