"""Files of `--input` that preprocessing does not read, refused by the name of their format.

Owns the messages of `--input` about them; `data/token_files/file_formats.py` has the formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from megatron_ds.config.problems import Problem
from megatron_ds.data.token_files.file_formats import (
    FOREIGN_FORMATS,
    FileFormat,
    Holds,
    most_specific,
    recognize,
    recognize_head,
)
from megatron_ds.data.token_files.probed_files import Files, LocalFiles, ProbedFile

CODES = {
    Holds.IDS: "input-of-other-program",
    Holds.RECORDS: "input-in-records",
    Holds.SAVED_DATASET: "input-is-saved-dataset",
    Holds.DATASET_CACHE: "input-is-dataset-cache",
    Holds.PAIR: "input-is-token-file",
    Holds.POINTER: "input-is-pointer",
}


def foreign_problems(
    path: str, files: Files | None = None, *, by_name: bool = False
) -> Iterator[Problem]:
    """The problem of a file that belongs to another program.

    Args:
        path: The file; a link is tried where it is and where it leads.
        files: Where it is; None for this machine.
        by_name: Try only signs with a name; `head_problems` tries the first bytes later.
    """
    paths = [path] if files else dict.fromkeys((path, os.path.realpath(path)))
    files = files or LocalFiles()
    for tried in paths:
        file = ProbedFile(files, tried)
        if recognized := recognize(file, FOREIGN_FORMATS, by_name=by_name):
            format = recognized.format
            shown = files.shown(tried)
            yield _problem(files.shown(path), shown, recognized.description, format)
            return


def folder_problems(paths: Iterable[str], files: Files | None = None) -> Iterator[Problem]:
    """The problem of files of a folder of another program.

    Args:
        paths: The files.
        files: Where they are; None for this machine.
    """
    files = files or LocalFiles()
    tried = (recognize(ProbedFile(files, path), FOREIGN_FORMATS) for path in paths)
    if best := most_specific(filter(None, tried)):
        path = files.shown(best.file.path)
        yield _problem(path, path, best.description, best.format)


def head_problems(name: str, head: bytes) -> Iterator[Problem]:
    """The problem of a file whose first bytes belong to another program's format."""
    recognized = recognize_head(head)
    if recognized and recognized[1].holds in CODES:
        yield _problem(name, name, *recognized)


def _problem(named: str, path: str, description: str, format: FileFormat) -> Problem:
    return Problem(
        CODES[format.holds],
        path=named,
        folder=path.rpartition("/")[0] or ".",
        stem=path.removesuffix(".bin").removesuffix(".idx"),
        description=description,
        read_by=format.read_by,
    )
