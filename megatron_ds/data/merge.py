"""Several `.bin/.idx` pairs into one, as if all of their text had been preprocessed at once.

Owns which pairs are meant and whether they belong together; how a pair is read and written stands
in `indexed.py`. Knows no tokenizer and no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ds.data.indexed_dataset import IndexedDataset, IndexedWriter
from megatron_ds.data.tokenizer_metadata import made_by_of


@dataclass(frozen=True)
class Merged:
    """Counts so far. size, total_size: bytes of tokens copied, and of all inputs."""

    datasets: int = 0
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    size: int = 0
    total_size: int = 0


def prefixes_in(folder: str) -> list[str]:
    """The prefixes of every pair in a folder, sorted by name.

    Raises ValueError for no folder, a folder without pairs, and halves of pairs.
    """
    if not os.path.isdir(folder):
        raise ValueError(f"--input {folder}: there is no such folder")
    found: dict[str, set[str]] = {}
    for name in os.listdir(folder):
        stem, suffix = os.path.splitext(name)
        if suffix in (".bin", ".idx") and os.path.isfile(os.path.join(folder, name)):
            found.setdefault(stem, set()).add(suffix)
    halves = [
        f"--input {folder}: {stem}{next(iter(there))} is there without its "
        f"{'.idx' if '.bin' in there else '.bin'}"
        for stem, there in sorted(found.items())
        if len(there) == 1
    ]
    if halves:
        raise ValueError("\n".join(halves))
    if not found:
        raise ValueError(f"--input {folder}: holds no pair of .bin and .idx")
    return [os.path.join(folder, stem) for stem in sorted(found)]


def merge(
    prefixes: Sequence[str],
    output_prefix: str,
    report: Callable[[Merged], None] = lambda merged: None,
) -> Merged:
    """Write one pair with the documents of all, in the order given; returns the final counts.

    Tokens and index are copied in blocks. report: called after every
    pair. The output appears under its name when it is complete. Raises ValueError, before anything
    is written, for pairs that are damaged or of unlike types, and for an output that is an input.
    """
    problems = list(_output_problems(prefixes, output_prefix))
    types: dict[str, np.dtype[np.generic]] = {}
    total_size = 0
    # Pairs are opened one at a time: there may be more of them than files that can be open.
    for prefix in prefixes:
        try:
            pair = IndexedDataset(prefix)
        except ValueError as error:
            problems.append(str(error))
            continue
        types[prefix] = pair.dtype
        total_size += pair.tokens.nbytes
    first = next(iter(types), "")
    problems += [
        f"{prefix} holds {dtype} and {first} {types[first]}: they were made with different "
        "tokenizers and do not go together"
        for prefix, dtype in types.items()
        if dtype != types[first]
    ]
    if problems:
        raise ValueError("\n".join(problems))
    made_by = made_by_of(list(prefixes))
    merged = Merged(total_size=total_size)
    with IndexedWriter(output_prefix, types[first], made_by) as writer:
        for prefix in prefixes:
            pair = IndexedDataset(prefix)
            writer.add_dataset(pair)
            merged = Merged(
                datasets=merged.datasets + 1,
                documents=merged.documents + len(pair.document_index) - 1,
                sequences=merged.sequences + len(pair),
                tokens=merged.tokens + pair.tokens.size,
                size=merged.size + pair.tokens.nbytes,
                total_size=total_size,
            )
            report(merged)
    return merged


def _output_problems(prefixes: Sequence[str], output_prefix: str) -> Iterator[str]:
    if not prefixes:
        yield "--datasets: at least one prefix is needed"
    folder, name = os.path.split(output_prefix)
    if not name:
        yield f"--output-prefix {output_prefix}: has no file name after the folder"
    elif not os.path.isdir(folder or "."):
        yield f"--output-prefix {output_prefix}: there is no folder {folder}"
    elif not os.access(folder or ".", os.W_OK | os.X_OK):
        yield f"--output-prefix {output_prefix}: the folder {folder or '.'} cannot be written"
    output = os.path.realpath(output_prefix + ".bin")
    if any(os.path.realpath(prefix + ".bin") == output for prefix in prefixes):
        yield (
            f"--output-prefix {output_prefix}: is one of the inputs; choose another name, or "
            "remove what an earlier run left there"
        )
