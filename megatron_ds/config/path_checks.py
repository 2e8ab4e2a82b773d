"""Checks of paths in options: whether a file can be read, or a folder created or written."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_ds.config.problems import Problem, option


def file_problems(field: str, path: str) -> Iterator[Problem]:
    """Check that a path is a regular file.

    Every rank reads the file, so a pipe does not work.

    Args:
        field: Name of the option field that holds the path.
    """
    if os.path.isdir(path):
        yield Problem("not-a-file", field, flag=option(field), path=path)
    elif not os.path.exists(path):
        yield Problem("file-not-found", field, flag=option(field), path=path)
    elif not os.path.isfile(path):
        yield Problem("path-not-a-regular-file", field, flag=option(field), path=path)


def folder_problems(field: str, path: str | None) -> Iterator[Problem]:
    """Check, without creating it, that a folder is writable or can be created.

    Args:
        field: Name of the option field that holds the path.
        path: The folder. None is valid.
    """
    if path is None:
        return
    existing = os.path.abspath(path)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        yield Problem("not-a-folder", field, flag=option(field), path=path, existing=existing)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(
            "folder-not-writable", field, flag=option(field), path=path, existing=existing
        )
