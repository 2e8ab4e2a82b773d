"""Documents that a run leaves out: --exclude-documents, and the samples of an index without them.

Knows the file of the flag, token files and datasets, but no ranks and no torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_ds.config.problems import Problem
from megatron_ds.data.gpt_dataset import NumberedDataset
from megatron_ds.data.sample_index import IntArray, Ranges
from megatron_ds.data.validation import DataFiles

NUMBER = re.compile("[0-9]{1,18}")
"""A number of a document, which fits into 64 bits."""
SHOWN = 200
"""Characters of a line that an error shows."""


def excluded_sequences(
    files: Sequence[DataFiles],
) -> tuple[Mapping[str, Ranges], list[Problem]]:
    """The sequences that the flag leaves out of the training data, by prefix; lines without any.

    Args:
        files: Data files of each stage of a run; the stages have the same flag.

    Raises:
        UserError: If a token file is damaged.
    """
    path = files[0].config.exclude_documents or ""
    problems = list[Problem]()
    opened = {prefix: stage for stage in files for prefix in stage.train_prefixes}
    sequences: dict[str, set[int]] = {}

    @functools.cache
    def named(name: str) -> list[str]:
        return [prefix for prefix in opened if f"/{prefix}".endswith(f"/{name}")]

    for line, text in enumerate(_lines(Path(path)), 1):
        name, first, last = _documents(text) or ("", 0, -1)
        prefixes = named(name) if name else []
        if len(prefixes) == 1:
            index = opened[prefixes[0]].open(prefixes[0]).document_index
            if first <= last < len(index) - 1:
                of_file = sequences.setdefault(prefixes[0], set())
                of_file.update(range(int(index[first]), int(index[last + 1])))
                continue
        if text and not text.startswith("#"):
            shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
            problems.append(Problem("exclusion-invalid", path=path, line=line, text=shown))
    return {prefix: _ranges(of_file) for prefix, of_file in sequences.items()}, problems


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, without blanks at their ends and a byte order mark. Bytes that are not
    UTF-8 are replaced, so that the line that has them names no document."""
    for line in path.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
        yield line.strip()


def _documents(text: str) -> tuple[str, int, int] | None:
    """File and first and last document of a line, FILE:NUMBER or FILE:FIRST-LAST."""
    name, _, numbers = text.rpartition(":")
    first, dash, last = numbers.partition("-")
    words = (first, last) if dash else (first, first)
    if not name or not all(NUMBER.fullmatch(word) for word in words):
        return None
    return name, int(words[0]), int(words[1])


def _ranges(sequences: set[int]) -> Ranges:
    ordered = np.array(sorted(sequences), dtype=np.int64)
    parts = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts if len(part))


def numbers_of(ranges: Ranges) -> IntArray:
    """All sequences of ranges."""
    return np.concatenate([np.arange(0), *(np.arange(first, end) for first, end in ranges)])


def samples_without(
    dataset: NumberedDataset, samples: IntArray, excluded: Ranges
) -> dict[str, IntArray]:
    """The samples that remain when sequences are left out, as arrays of `RemainingIndexes`.

    The others keep their places. What is left of samples with these sequences is joined in the
    order of the text and divided again; a new sample has the place of the one in which it begins.

    Args:
        dataset: The samples before.
        samples: Numbers of those that are not read, in the order of the data.
        excluded: The sequences.
    """
    left_out = numbers_of(excluded)
    length = dataset.seq_length
    wanted = {*left_out.tolist()}
    is_cut = np.isin(samples, dataset.samples_of(left_out))
    numbers = list[int]()
    ends = list[int]()
    shifts = list[int]()
    total = 0
    for sample in np.sort(samples[is_cut]).tolist():
        first = 0
        for piece in dataset.pieces_of(sample):
            size = min(piece.size, length - first)  # without the last label
            if size > 0 and piece.sequence not in wanted:
                numbers.append(sample)
                shifts.append(first - total)
                total += size
                ends.append(total)
            first += piece.size
    whole = np.sort(samples[~is_cut])
    new = np.arange((total - 1) // length) * length
    parts = np.array(numbers, dtype=np.int64)
    begun = parts[np.searchsorted(ends, new, side="right")]
    order = np.where(
        is_cut, len(whole) + np.searchsorted(begun, samples), np.searchsorted(whole, samples)
    )
    return {
        "unread": np.concatenate([whole.astype(np.int64), parts]),
        "shuffle": order[~is_cut | np.isin(samples, begun)],
        "ends": np.array(ends, dtype=np.int64),
        "shifts": np.array(shifts, dtype=np.int64),
    }
