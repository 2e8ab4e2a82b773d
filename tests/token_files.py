"""Token files and JSON lines of given documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.data.indexed_writer import pair_writer


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
            writer.add_document(document)
    return str(prefix)


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """Writes one JSON line with the key "text" per text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
