"""First bytes of files, which show whether the content is of the format that the name implies.

`signatures.toml` lists how formats begin. Knows no names of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from megatron_ds.config.data_files import read_table
from megatron_ds.config.problems import Problem
from megatron_ds.preprocess.documents.foreign_inputs import head_problems

HEAD_BYTES = 4096
SIGNATURES: dict[str, dict[str, str]] = read_table(__file__)


def contradictions(name: str, stream: BinaryIO, expected: str) -> Iterator[Problem]:
    """The problem of a file whose first bytes belong to another format, or program.

    Args:
        name: Its name, for the message.
        stream: The file at its beginning, where it stays.
        expected: Format or suffix of the compression, from its name.
    """
    head = _head(stream)
    if foreign := list(head_problems(name, head)):
        yield from foreign
        return
    for actual, signature in SIGNATURES.items():
        suffix = signature.get("suffix", " ")
        only_in = signature.get("only_in", expected)
        is_expected = expected.startswith((suffix, suffix[1:])) if suffix.strip() else False
        begins = re.match(signature["begins"].encode(), head, re.DOTALL)
        if begins and only_in == expected and not is_expected:
            advice = signature.get("advice", f"rename it, to end with {suffix}")
            names = {"name": name, "found": actual, "expected": expected, "advice": advice}
            yield Problem("input-format-differs", **names)


def _head(stream: Any) -> bytes:
    """The first bytes; none of a stream in which they could not be read again."""
    if hasattr(stream, "peek"):
        return bytes(stream.peek(HEAD_BYTES)[:HEAD_BYTES])
    if not stream.seekable():
        return b""
    start = stream.tell()
    content = stream.read(HEAD_BYTES)
    stream.seek(start)
    return bytes(content)
