"""Files of `--input` that preprocessing does not read, refused by the name of their format.

Owns the messages of `--input` about them; `data/token_files/file_formats.py` has the formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from megatron_ds.config.problems import Problem
from megatron_ds.data.token_files.file_formats import (
    FOREIGN_FORMATS,
    Holds,
    Recognized,
    most_specific,
    recognize,
    recognize_head,
)
from megatron_ds.data.token_files.missing_pair import import_command
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
            yield _problem(files.shown(path), recognized)
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
        yield _problem(files.shown(best.file.path), best)


def head_problems(name: str, head: bytes) -> Iterator[Problem]:
    """The problem of a file whose first bytes belong to another program's format."""
    recognized = recognize_head(head)
    if recognized and recognized[1].holds in CODES:
        description, format = recognized
        yield _problem(name, Recognized(ProbedFile(LocalFiles(), name), description, format))


def _problem(named: str, recognized: Recognized) -> Problem:
    """The problem of a file that the user named so."""
    format = recognized.format
    path = recognized.file.files.shown(recognized.file.path)
    values = {"path": named, "description": recognized.description, "read_by": format.read_by}
    if format.import_name and format.holds in (Holds.IDS, Holds.RECORDS):
        command = import_command(named, recognized)
        return Problem("input-of-other-trainer", command=command, **values)
    return Problem(
        CODES[format.holds],
        folder=path.rpartition("/")[0] or ".",
        stem=path.removesuffix(".bin").removesuffix(".idx"),
        **values,
    )
