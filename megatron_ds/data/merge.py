"""Merges pairs of token files, as if all of their text had been preprocessed at once.

Owns the selection of the pairs and whether they are compatible; `indexed_dataset.py` and
`indexed_writer.py` own the format. Knows no tokenizer and no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ds.config.problems import Problem, UserError, option, raise_if_any, user_error
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.data.indexed_writer import pair_writer
from megatron_ds.data.tokenizer_metadata import merged_metadata


@dataclass(frozen=True)
class MergeProgress:
    """Counts so far.

    Attributes:
        datasets: Pairs copied.
        documents: Documents copied.
        sequences: Sequences copied.
        tokens: Tokens copied.
        copied_bytes: Bytes of tokens copied.
        total_bytes: Bytes of tokens of all inputs.
    """

    datasets: int = 0
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    copied_bytes: int = 0
    total_bytes: int = 0


def prefixes_in(folder: str) -> list[str]:
    """The prefixes of all pairs of a folder, sorted by name.

    Raises:
        UserError: If there is no such folder, no pair, or a file without its counterpart.
    """
    if not os.path.isdir(folder):
        raise user_error("folder-missing", folder=folder)
    found: dict[str, set[str]] = {}
    for name in os.listdir(folder):
        stem, suffix = os.path.splitext(name)
        if suffix in (".bin", ".idx") and os.path.isfile(os.path.join(folder, name)):
            found.setdefault(stem, set()).add(suffix)
    raise_if_any(
        Problem(
            "incomplete-pair",
            folder=folder,
            stem=stem,
            suffix=next(iter(suffixes)),
            missing=".idx" if ".bin" in suffixes else ".bin",
        )
        for stem, suffixes in sorted(found.items())
        if len(suffixes) == 1
    )
    if not found:
        raise user_error("folder-without-pairs", folder=folder)
    return [os.path.join(folder, stem) for stem in sorted(found)]


def merge(
    prefixes: Sequence[str],
    output_prefix: str,
    report: Callable[[MergeProgress], None] = lambda merged: None,
) -> MergeProgress:
    """Writes one pair with the documents of all, in the given order.

    The output gets its name when it is complete. Memory use is constant.

    Args:
        prefixes: The pairs to merge.
        output_prefix: The pair to write.
        report: Called after every pair.

    Returns:
        The final counts.

    Raises:
        UserError: Before anything is written, if a pair is damaged, if the pairs have different
            dtypes or tokenizers, or if the output is an input or cannot be written.
    """
    problems = list(_output_problems(prefixes, output_prefix))
    types: dict[str, np.dtype[np.generic]] = {}
    total_size = 0
    # Pairs are opened one at a time: there may be more of them than files that can be open.
    for prefix in prefixes:
        try:
            pair = IndexedDataset(prefix)
        except UserError as error:
            problems += error.problems
            continue
        types[prefix] = pair.dtype
        total_size += pair.tokens.nbytes
    first = next(iter(types), "")
    problems += [
        Problem(
            "merging-different-dtypes", prefix=prefix, dtype=dtype, first=first, types=types[first]
        )
        for prefix, dtype in types.items()
        if dtype != types[first]
    ]
    raise_if_any(problems)
    made_by = merged_metadata(list(prefixes))
    merged = MergeProgress(total_bytes=total_size)
    with pair_writer(output_prefix, types[first], made_by) as writer:
        for prefix in prefixes:
            pair = IndexedDataset(prefix)
            writer.add_dataset(pair)
            merged = MergeProgress(
                datasets=merged.datasets + 1,
                documents=merged.documents + len(pair.document_index) - 1,
                sequences=merged.sequences + len(pair),
                tokens=merged.tokens + pair.tokens.size,
                copied_bytes=merged.copied_bytes + pair.tokens.nbytes,
                total_bytes=total_size,
            )
            report(merged)
    return merged


def _output_problems(prefixes: Sequence[str], output_prefix: str) -> Iterator[Problem]:
    if not prefixes:
        yield Problem("no-datasets-to-merge")
    folder, name = os.path.split(output_prefix)
    given = f"{option('output_prefix')} {output_prefix}"
    if not name:
        yield Problem("output-prefix-without-name", given=given)
    elif not os.path.isdir(folder or "."):
        yield Problem("output-folder-missing", given=given, folder=folder)
    elif not os.access(folder or ".", os.W_OK | os.X_OK):
        yield Problem("output-folder-not-writable", given=given, folder=folder or ".")
    output = os.path.realpath(output_prefix + ".bin")
    if any(os.path.realpath(prefix + ".bin") == output for prefix in prefixes):
        yield Problem("output-is-an-input", given=given)
