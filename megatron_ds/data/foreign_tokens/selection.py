"""Which files of `--input` are read, and in which format.

Recognizes formats by `token_files/file_formats.py`. A folder has one format, whose files are read
by name; links that lead out of it are refused, since their targets may change or be anything.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error
from megatron_ds.data.foreign_tokens.kinds import AUTO, KINDS
from megatron_ds.data.foreign_tokens.readers.folder_index import check_inside
from megatron_ds.data.remote.token_cache import is_url
from megatron_ds.data.token_files.file_formats import Recognized, most_specific, recognize
from megatron_ds.data.token_files.missing_pair import other_format_problems, readable_as
from megatron_ds.data.token_files.probed_files import LocalFiles, ProbedFile

SPLIT_NAMES = re.compile(r"(?:^|[^a-z])(train|val|valid|validation|test)(?:[^a-z]|$)", re.I)

PART_NAMES = re.compile(r"-(\d+)-of-(\d+)")
STATE = "state.json"
"""List of the files of a saved data set."""
DESCRIBED = {
    "datatrove": {".ds.index": ".ds"},
    "olmo": {".csv.gz": ".npy"},
    "arrow": {"dataset_info.json": STATE},
}
"""Suffixes of files by format, with that of the file which each belongs to."""


class Selection(NamedTuple):
    """Files of one format.

    Attributes:
        format: Name of the format.
        paths: The files in reading order, or the one folder.
        skipped: Files of the folders that are not read.
    """

    format: str
    paths: tuple[str, ...]
    skipped: tuple[str, ...]


def select(inputs: Sequence[str], format: str) -> Selection:
    """Selects the files of paths and glob patterns.

    Args:
        inputs: Files, folders and patterns, in reading order.
        format: Name of the format; "auto" to recognize it.

    Raises:
        UserError: If a path is missing, no format that is read, or of another one than the first.
    """
    problems = list[Problem]()
    selections = list[Selection]()
    for path in inputs:
        with collect(problems):
            selections += (_select(one, format) for one in _expanded(path))
    raise_if_any(problems)
    formats = {selection.format: selection.paths[0] for selection in reversed(selections)}
    paths = tuple(path for selection in selections for path in selection.paths)
    skipped = tuple(path for selection in selections for path in selection.skipped)
    if len(formats) > 1:
        shown = ", ".join(f"{path} is {name}" for name, path in formats.items())
        raise user_error("foreign-formats-differ", shown=shown)
    (name,) = formats
    if KINDS[name].is_folder and len(paths) > 1:
        raise user_error("foreign-several-folders", folders=", ".join(paths))
    raise_if_any(_repeated(paths))
    return Selection(name, paths, skipped)


def _expanded(path: str) -> list[str]:
    if os.path.exists(path):
        return [path]
    paths = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    if not paths and is_url(path):
        raise user_error("foreign-input-by-url", path=path)
    if not paths:
        raise user_error("foreign-input-missing", path=path)
    return paths


def _select(path: str, format: str) -> Selection:
    """The files of a path that exists."""
    path = path.rstrip("/") or path
    if os.path.isdir(path):
        return _select_in_folder(path, format)
    if not os.path.isfile(path):
        raise user_error("foreign-not-a-file", path=path)
    if format == AUTO:
        recognized = recognize(ProbedFile(LocalFiles(), path))
        format = _format_of(path, recognized)
    foreign_kind = KINDS[format]
    if foreign_kind.suffixes is None:
        folder = os.path.dirname(path) or "."
        raise user_error("foreign-input-needs-folder", path=path, format=format, folder=folder)
    if not path.endswith(foreign_kind.suffixes):
        suffix = " or ".join(foreign_kind.suffixes)
        raise user_error("foreign-input-describes", path=path, format=format, suffix=suffix)
    return Selection(format, (path,), ())


def _select_in_folder(folder: str, format: str) -> Selection:
    names = sorted(
        name
        for name in os.listdir(folder)
        if not name.startswith((".", "_")) and not os.path.isdir(os.path.join(folder, name))
    )
    paths = [os.path.join(folder, name) for name in names]
    if format == AUTO:
        probed = (recognize(ProbedFile(LocalFiles(), path)) for path in paths)
        readable = [one for one in probed if one is not None and readable_as(one)]
        format = _format_of(folder, most_specific(readable))
    foreign_kind = KINDS[format]
    if foreign_kind.suffixes is None:
        return Selection(format, (folder,), ())
    selected = [
        path for path in paths if path.endswith(foreign_kind.suffixes) and _is(path, format)
    ]
    if not selected:
        raise user_error("foreign-folder-without", path=folder, format=format)
    taken = {*selected}
    skipped = {path: None for path in paths if path not in taken and not _is(path, format)}
    problems = list[Problem]()
    for path in (path for path in paths if path not in skipped):  # also what describes tokens
        with collect(problems):
            check_inside(path, folder)
    problems += (
        *_mixed_splits(folder, selected),
        *_missing_parts(folder, selected),
        *_missing_files(folder, names, format),
        *_unread(skipped, selected, format),
    )
    raise_if_any(problems)
    return Selection(format, tuple(selected), tuple(skipped))


def _is(path: str, format: str) -> bool:
    """Whether a file of a folder is of a format."""
    recognized = recognize(ProbedFile(LocalFiles(), path))
    return recognized is not None and readable_as(recognized) == format


def _format_of(path: str, recognized: Recognized | None) -> str:
    """The name of a recognized format.

    Raises:
        UserError: If it is none that is read.
    """
    if recognized is not None and (name := readable_as(recognized)):
        return name
    raise_if_any(other_format_problems(path))
    raise user_error("foreign-format-unknown", path=path, formats=", ".join(KINDS))


def _mixed_splits(folder: str, paths: Iterable[str]) -> Iterator[Problem]:
    """The problem of a folder with files of several splits: validation must not be trained on."""
    splits = {
        os.path.basename(path): {
            match[1].lower()[:3] for match in SPLIT_NAMES.finditer(os.path.basename(path))
        }
        for path in paths
    }
    if any(splits.values()) and not set.intersection(*splits.values()):
        shown = {str(sorted(names)): name for name, names in splits.items()}
        yield Problem("foreign-splits-mixed", folder=folder, shown=", ".join(shown.values()))


def _missing_parts(folder: str, paths: Iterable[str]) -> Iterator[Problem]:
    """The problem of a folder with some of the files `NAME-00000-of-00003` only."""
    parts = dict[tuple[str, str], set[int]]()
    for path in paths:
        if match := PART_NAMES.search(os.path.basename(path)):
            key = (os.path.basename(path)[: match.start()], match[2])
            parts.setdefault(key, set()).add(int(match[1]))
    for (name, count), seen in parts.items():
        missing = sorted({*range(int(count))} - seen)
        if missing and len(seen) < int(count):
            shown = f"{name}-{missing[0]:0{len(count)}}-of-{count}"
            yield Problem("foreign-part-missing", folder=folder, name=shown, count=len(missing))


def _missing_files(folder: str, names: Sequence[str], format: str) -> Iterator[Problem]:
    """The problems of files that others of the folder belong to, and that are not there."""
    for suffix, described in DESCRIBED.get(format, {}).items():
        for name in names:
            file = name.removesuffix(suffix) + described
            if name.endswith(suffix) and file not in names:
                path = os.path.join(folder, file)
                yield Problem("foreign-shard-missing", path=path, index=os.path.join(folder, name))


def _unread(skipped: Iterable[str], selected: Sequence[str], format: str) -> Iterator[Problem]:
    """The problems of files that are not of the format, and are named like those that are."""
    suffixes = {os.path.splitext(path)[1] for path in selected} - {""}
    for path in skipped:
        is_index = format == "arrow" and os.path.basename(path) == STATE  # damaged, if it is here
        if is_index or os.path.splitext(path)[1] in suffixes:
            yield Problem("foreign-file-of-other-format", path=path, format=format)


def _repeated(paths: Iterable[str]) -> Iterator[Problem]:
    """The problems of files that are selected twice, also by links."""
    seen = dict[tuple[int, int], str]()
    for path in paths:
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            yield Problem("foreign-file-twice", path=path, other=seen[identity])
        seen.setdefault(identity, path)
