"""Files of speed certificates: one that a measurement continues, and those of a folder.

A file that cannot be continued is refused and left as it is, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accelerator.certificate_rules import TINY_SIZES, damage, problems
from benchmarks.accelerator.processes import Row, read_json
from benchmarks.common import write_json

SAME = ("format", "commit", "device", "ranks", "versions")
"""What all figures of a file have in common."""


class RefusedFileError(ValueError):
    """A file that is no certificate, or not the one that is measured."""


def read(path: Path) -> Any:
    """The content of a file.

    Raises:
        RefusedFileError: If it cannot be read, or is no JSON.
    """
    try:
        return read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedFileError(f"{path} cannot be read as JSON: {error}") from error


def begin_or_continue(path: Path, head: Mapping[str, Any], *, tiny: bool) -> Row:
    """What an earlier run of a measurement wrote to a file, or the head if there is no file.

    Args:
        path: The file.
        head: The values of `SAME`, and the date.
        tiny: Whether tiny models are measured.

    Raises:
        RefusedFileError: If the file is damaged, or has figures of another measurement.
    """
    if not path.exists():
        return {**head, "layouts": [], "speeds": []}
    values = read(path)
    if found := damage(values):
        raise RefusedFileError(
            f"{path} is no certificate that can be continued: {'; '.join(found)}. "
            "Move it away, or name another file"
        )
    differences = [
        f"{key} {values[key]!r}, not {head[key]!r}" for key in SAME if values[key] != head[key]
    ]
    if any((row["size"] in TINY_SIZES) != tiny for row in values["speeds"]):
        differences.append("speeds of other sizes" if tiny else "speeds of tiny models")
    if differences:
        raise RefusedFileError(
            f"{path} has figures of another measurement: {'; '.join(differences)}. "
            "Move it away, or name another file"
        )
    return dict(values)


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file at once: a run that is killed leaves the earlier one."""
    draft = path.with_suffix(".draft")
    write_json(draft, dict(values))
    draft.replace(path)


def accepted(folder: Path) -> dict[str, Row]:
    """The certificates of a folder by the names of their files.

    Raises:
        RefusedFileError: With all reasons, if files are refused.
    """
    contents: dict[str, Row] = {}
    reasons: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = read(path)
        except RefusedFileError as error:
            reasons.append(str(error))
            continue
        found = problems(values)
        if not found and {row["size"] for row in values["speeds"]} <= set(TINY_SIZES):
            found = ["speeds: tiny models try the program and are no certificate"]
        reasons += [f"{path}: {text}" for text in found]
        if not found:
            copies = [name for name, other in contents.items() if _is_copy(values, other)]
            reasons += [f"{path}: it has the figures of {name}.json" for name in copies]
            contents[path.stem] = values
    if reasons:
        raise RefusedFileError("\n".join(reasons))
    return contents


def _is_copy(values: Row, other: Row) -> bool:
    """Whether two files have the same figures, which two measurements never have."""
    return all(values[key] == other[key] for key in ("rates", "links", "speeds"))
