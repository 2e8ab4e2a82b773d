"""JSON lines with a list of ids under a key. A line is a document."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from megatron_ds.config.problems import PROBLEMS_SHOWN, Problem, UserError, user_error
from megatron_ds.data.foreign_tokens.foreign_file import Block, ForeignTokens, ReadOptions
from megatron_ds.data.foreign_tokens.readers.id_columns import choose_name
from megatron_ds.data.foreign_tokens.readers.numbers import file_size, open_each
from megatron_ds.data.token_files.text_columns import columns_of_object

BLOCK_LINES_BYTES = 1 << 22
DTYPE = np.dtype("<i8")


@dataclass(frozen=True)
class Lines:
    """A file of JSON lines. Implements `ForeignFile`.

    Attributes:
        key: The key of the ids.
    """

    path: str
    size: int
    dtype: np.dtype[np.generic]
    key: str

    def blocks(self, position: int) -> Iterator[Block]:
        parse = _parser()
        line = 0
        problems = list[Problem]()
        with open(self.path, "rb") as file:
            line = _count_lines(file, position)
            while lines := file.readlines(BLOCK_LINES_BYTES):
                documents = list[np.ndarray[Any, Any]]()
                for text in lines:
                    line += 1
                    if not text.strip():
                        continue
                    try:
                        documents.append(_ids(parse(text), self.key))
                    except (
                        ValueError,
                        TypeError,
                        KeyError,
                        OverflowError,
                        RecursionError,
                    ) as error:
                        shown = _reason(error, self.key)
                        where = f"{self.path}:{line}"
                        problems.append(Problem("foreign-line-unusable", path=where, reason=shown))
                    if len(problems) >= PROBLEMS_SHOWN:
                        raise UserError(*problems)
                start = position
                position = file.tell()
                if documents and not problems:
                    ends = np.cumsum([len(ids) for ids in documents])
                    yield Block(np.concatenate(documents), ends, position, position - start)
        if problems:
            raise UserError(*problems)

    def byte_of(self, token: int) -> int | None:
        return None


def open_files(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens files of JSON lines; see `Reader`."""
    files = open_each(paths, lambda path: _open(path, options))
    note = f"key {files[0].key!r}"
    return ForeignTokens(
        files, "lines of the files", notes=(note,), joins_files=True, drops_tail=True
    )


def _open(path: str, options: ReadOptions) -> Lines:
    size = file_size(path)
    with open(path, "rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        value = _parser()(first)
    except (ValueError, RecursionError) as error:
        reason = f"it is no JSON: {error}"
        raise user_error("foreign-line-unusable", path=f"{path}:1", reason=reason) from error
    if not isinstance(value, dict):
        raise user_error("foreign-line-unusable", path=f"{path}:1", reason="it is no JSON object")
    if options.column is not None and isinstance(value.get(options.column), list):
        return Lines(path, size, DTYPE, options.column)
    masks = ("attention_mask", "token_type_ids", "special_tokens_mask", "labels")
    candidates = [name for name in columns_of_object(value).ids if name not in masks]
    return Lines(path, size, DTYPE, choose_name(candidates, list(value), options.column, path))


def _ids(value: Any, key: str) -> np.ndarray[Any, Any]:
    """The ids of a line.

    Raises:
        ValueError: If they are not all integers of 64 bits, or the row is padded.
        KeyError: Without the key.
    """
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    ids = value[key]
    if not isinstance(ids, list):
        raise ValueError(f"the value of {key!r} is no list")
    if not all(value.get("attention_mask") or (1,)):
        raise ValueError("its attention_mask has zeros: remove the padding")
    array = np.array(ids)
    if array.size and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise ValueError(f"the list of {key!r} has other values than integers")
    return array.astype(np.int64)


def _reason(error: Exception, key: str) -> str:
    return f"it has no key {key!r}" if isinstance(error, KeyError) else str(error)


def _parser() -> Callable[[bytes], Any]:
    """The faster parser, if it is installed."""
    if importlib.util.find_spec("orjson") is None:
        return json.loads
    import orjson

    loads: Callable[[bytes], Any] = orjson.loads
    return loads


def _count_lines(file: BinaryIO, position: int) -> int:
    """Lines of a file in front of a byte, where it is left."""
    lines = 0
    while file.tell() < position:
        lines += file.read(min(1 << 20, position - file.tell())).count(b"\n")
    return lines
