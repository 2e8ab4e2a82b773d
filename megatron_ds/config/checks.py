"""Checks that several groups of options share: paths, and numbers that must be divisible."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_ds.config.problems import Problem, user_error


def json_remedy(error: Exception) -> str:
    """Returns the fix for a JSON file with a comment or a trailing comma; otherwise "".

    Args:
        error: Error of the parser.
    """
    if not isinstance(error, json.JSONDecodeError):
        return ""
    doc = error.doc
    start = len(error.doc[: error.pos].rstrip(" \t\r\n,"))
    if re.match(r"\s*(#|//|/\*)", doc[error.pos :]):
        return f": JSON has no comments, remove the one in line {error.lineno}"
    if comma := re.match(r"\s*,(?=\s*[}\]])", doc[start:]):
        line = doc.count("\n", 0, start + comma.end()) + 1
        return f": remove the comma at the end of line {line}"
    return ""


def import_library(name: str, needed_by: str, *fields: str) -> Any:
    """Imports an optional library.

    Args:
        name: The library, or a module of it.
        needed_by: Option or input that needs it, for the message.
        fields: Names of the option fields concerned.

    Raises:
        UserError: If it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        values = {"needed_by": needed_by, "name": name.partition(".")[0], "error": error}
        raise user_error("library-missing", *fields, **values) from None


def shortened(words: Sequence[str], shown: int) -> str:
    """The first words of a list, and the number of further ones."""
    more = [f"{len(words) - shown} more"] if len(words) > shown else []
    return ", ".join([*words[:shown], *more])


def file_problems(field: str, path: str) -> Iterator[Problem]:
    """Check that a path is a regular file.

    Every rank reads the file, so a pipe does not work.

    Args:
        field: Name of the option field that holds the path.
    """
    if os.path.isdir(path):
        yield Problem("not-a-file", field, path=path)
    elif not os.path.exists(path):
        yield Problem("file-not-found", field, path=path)
    elif not os.path.isfile(path):
        yield Problem("path-not-a-regular-file", field, path=path)


def replaced_file_problems(field: str, path: str) -> Iterator[Problem]:
    """Check that a path has no folder, device or pipe, which the rename of a complete output would
    replace.

    Args:
        field: Name of the option field that holds the path.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield Problem("output-not-a-regular-file", field, path=path)


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
        yield Problem("not-a-folder", field, path=path, existing=existing)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem("folder-not-writable", field, path=path, existing=existing)


def output_problems(field: str, path: str) -> Iterator[Problem]:
    """Check that a file can be written.

    Args:
        field: Name of the option field concerned.
    """
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        yield Problem("not-a-file", field, path=path)
    elif not os.path.isdir(folder):
        yield Problem("samples-folder-missing", field, path=path)
    elif not os.access(folder, os.W_OK | os.X_OK) and not is_special_file(path):
        yield Problem("folder-not-writable", field, path=path, existing=folder)


def drawing_problems(field: str, path: str, suffixes: tuple[str, ...]) -> Iterator[Problem]:
    """Check that a file of a chart has one of some suffixes, and that charts can be drawn.

    Args:
        field: Name of the option field that holds the path.
    """
    if not path.lower().endswith(suffixes):
        yield Problem("plot-suffix", field, path=path, suffixes=" ".join(suffixes))
    elif importlib.util.find_spec("matplotlib") is None:
        yield Problem("plot-needs-matplotlib", field, path=path)


def is_special_file(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def prefix_problems(prefix: str) -> Iterator[Problem]:
    """Check --output-prefix, the beginning of the paths of files whose folder may be missing."""
    folder, name = os.path.split(prefix)
    if not name:
        yield Problem("output-prefix-without-name", prefix=prefix)
    yield from folder_problems("output_prefix", folder or ".")


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` below and above `value`, for messages."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def divisors(value: int) -> list[int]:
    """The divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    return sorted({*small, *(value // divisor for divisor in small)})


def listed(items: Iterable[str]) -> str:
    """Items of a sentence: `a`, `a and b`, `a, b and c`."""
    every = list(items)
    parts = [", ".join(every[:-1]), *every[-1:]]
    return " and ".join(filter(None, parts))


def list_numbers(values: list[int]) -> str:
    """Numbers for messages: `1, 2, 4`."""
    return ", ".join(map(str, values))
