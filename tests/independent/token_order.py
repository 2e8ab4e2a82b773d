"""Token files and Megatron's order of samples, from their definitions.

Imports nothing of the package. The files are a `.bin` of tokens and an `.idx` of lengths, offsets
and documents, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\0\0"
UINT16 = 8
"""The code of the type of the tokens."""
SEPARATE_EPOCH = 0.80
"""A last epoch of which fewer samples are needed is shuffled by itself."""

Tokens = npt.NDArray[np.int64]


def write_documents(prefix: Path, documents: Sequence[Tokens]) -> Path:
    """Writes a pair of files with one sequence per document."""
    lengths = [len(document) for document in documents]
    offsets = np.cumsum([0, *lengths[:-1]]) * 2
    header = MAGIC + struct.pack("<QBQQ", 1, UINT16, len(lengths), len(lengths) + 1)
    arrays = (lengths, "<i4"), (offsets, "<i8"), (range(len(lengths) + 1), "<i8")
    index = header + b"".join(np.array(values).astype(kind).tobytes() for values, kind in arrays)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(np.concatenate(documents).astype("<u2").tobytes())
    return prefix


def read_documents(prefix: Path) -> list[Tokens]:
    """Reads what `write_documents` writes."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == MAGIC
    version, kind, count, _ = struct.unpack("<QBQQ", index[9:34])
    assert (version, kind) == (1, UINT16)
    lengths = np.frombuffer(index, "<i4", count, 34)
    offsets = np.frombuffer(index, "<i8", count, 34 + 4 * count) // 2
    tokens = np.frombuffer(prefix.with_suffix(".bin").read_bytes(), "<u2").astype(np.int64)
    return [tokens[at : at + length] for at, length in zip(offsets, lengths, strict=True)]


def samples_in_order(
    documents: Sequence[Tokens], wanted: int, seq_length: int, seed: int
) -> tuple[Tokens, bool]:
    """The samples of a run in their order [wanted, seq_length + 1].

    Also returns whether the last of several epochs is shuffled by itself.

    The documents of all epochs are shuffled and concatenated; sample i begins at token
    i x seq_length and ends with the first token of the next one. Then the samples are shuffled.
    """
    epoch = sum(map(len, documents))
    epochs = 1
    while (epochs * epoch - 1) // seq_length < wanted:
        epochs += 1
    total = (epochs * epoch - 1) // seq_length
    before_last = ((epochs - 1) * epoch - 1) // seq_length if epochs > 1 else 0
    needed = wanted - before_last
    of_one = (epoch - 1) // seq_length
    separate = epochs > 1 and needed < int(SEPARATE_EPOCH * of_one)
    random = np.random.RandomState(seed)

    def shuffled(count: int, first: int = 0) -> list[int]:
        numbers = np.arange(first, first + count)
        random.shuffle(numbers)
        return numbers.tolist()  # type: ignore[no-any-return]

    size = len(documents)
    order = shuffled(size * (epochs - separate)) + shuffled(size * separate)
    stream = np.concatenate([documents[number % size] for number in order])
    middle = before_last if separate else total
    numbers = shuffled(middle) + shuffled(total - middle, middle)
    starts = [number * seq_length for number in numbers[:wanted]]
    return np.stack([stream[start : start + seq_length + 1] for start in starts]), separate
