"""Token files and JSON lines of given documents."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.data.token_files.indexed_writer import pair_writer


def write_pair(
    prefix: Path | str, documents: Iterable[Sequence[int] | Any], dtype: Any = "uint16", *more: Any
) -> str:
    """Writes one sequence per document.

    Args:
        more: Further arguments of `pair_writer`.

    Returns:
        The prefix.
    """
    with pair_writer(prefix, dtype, *more) as writer:
        for document in documents:
            writer.add_documents(document, [len(document)])
    return str(prefix)


def reference_bytes(
    documents: list[list[list[int]]], code: int = 8, letter: str = "H", uncounted: int = 0
) -> tuple[bytes, bytes]:
    """The pair of documents, each a list of sequences, by the description of the format.

    Args:
        documents: Tokens.
        code: Of the type.
        letter: Of the type, for `struct`.
        uncounted: Tokens at the end of each document that the lengths do not count (a bug of
            microsoft/Megatron-DeepSpeed).
    """
    lengths = []
    starts = [0]
    content = b""
    for document in documents:
        for sequence in document:
            content += struct.pack(f"<{len(sequence)}{letter}", *sequence)
            lengths.append(len(sequence))
        if document:
            lengths[-1] -= uncounted
        starts.append(len(lengths))
    offsets = [sum(lengths[:number]) * struct.calcsize(letter) for number in range(len(lengths))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(starts))
    for layout, numbers in (("i", lengths), ("q", offsets), ("q", starts)):
        index += struct.pack(f"<{len(numbers)}{layout}", *numbers)
    return content, index


def write_reference(prefix: Path, *description: Any, **more: Any) -> None:
    """Writes the pair of `reference_bytes`."""
    content, index = reference_bytes(*description, **more)
    Path(f"{prefix}.bin").write_bytes(content)
    Path(f"{prefix}.idx").write_bytes(index)


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """Writes one JSON line with the key "text" per text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
