"""Merges pairs of token files, as if all of their text had been preprocessed at once.

Owns the selection of the pairs and whether they are compatible; `indexed_dataset.py` and
`indexed_writer.py` own the format. Knows no tokenizer and no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ds.config.checks import prefix_problems
from megatron_ds.config.problems import Problem, UserError, ignore, option, raise_if_any, user_error
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.indexed_writer import WriteCounts, pair_writer
from megatron_ds.data.token_files.missing_pair import describe_other, other_format_problems
from megatron_ds.data.token_files.tokenizer_metadata import merged_metadata


@dataclass(frozen=True)
class MergeProgress:
    """Counts so far.

    Attributes:
        datasets: Pairs copied.
        written: Tokens, sequences and documents copied.
        copied_bytes: Bytes of tokens copied.
        total_bytes: Bytes of tokens of all inputs.
    """

    datasets: int
    written: WriteCounts
    copied_bytes: int
    total_bytes: int


def prefixes_in(folder: str) -> list[str]:
    """The prefixes of all pairs of a folder, sorted by name.

    Raises:
        UserError: If there is no such folder, no pair, a file without its counterpart, or a file of
            another format.
    """
    if not os.path.isdir(folder):
        raise user_error("folder-missing", folder=folder)
    files = [path for path in Path(folder).iterdir() if path.is_file()]
    bins, indexes = (
        {path.stem for path in files if path.suffix == suffix} for suffix in (".bin", ".idx")
    )
    for stem in sorted(bins - indexes):
        if describe_other(os.path.join(folder, f"{stem}.bin")):
            raise_if_any(other_format_problems(os.path.join(folder, f"{stem}.bin")))
    raise_if_any(
        Problem("incomplete-pair", folder=folder, stem=stem, suffix=suffix, missing=missing)
        for stem in sorted(bins ^ indexes)
        for suffix, missing in [(".bin", ".idx") if stem in bins else (".idx", ".bin")]
    )
    if not bins:
        raise_if_any(other_format_problems(folder))
        raise user_error("folder-without-pairs", folder=folder)
    return [os.path.join(folder, stem) for stem in sorted(bins)]


def merge(
    prefixes: Sequence[str],
    output_prefix: str,
    report: Callable[[MergeProgress], None] = ignore,
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
    has_loss_spans = False
    # Pairs are opened one at a time: there may be more of them than files that can be open.
    for prefix in prefixes:
        try:
            pair = IndexedDataset(prefix)
        except UserError as error:
            problems += error.problems
            continue
        types[prefix] = pair.dtype
        total_size += pair.tokens.nbytes
        has_loss_spans |= pair.loss_spans is not None
    first = next(iter(types), "")
    problems += [
        Problem(
            "merging-different-dtypes", prefix=prefix, dtype=dtype, first=first, types=types[first]
        )
        for prefix, dtype in types.items()
        if dtype != types[first]
    ]
    raise_if_any(problems)
    dtype = types[first]
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    metadata = merged_metadata(prefixes)
    with pair_writer(output_prefix, dtype, metadata, has_loss_spans=has_loss_spans) as writer:
        for datasets, prefix in enumerate(prefixes, 1):
            writer.add_dataset(IndexedDataset(prefix))
            copied_bytes = writer.written.tokens * dtype.itemsize
            merged = MergeProgress(datasets, writer.written, copied_bytes, total_size)
            report(merged)
    return merged


def _output_problems(prefixes: Sequence[str], output_prefix: str) -> Iterator[Problem]:
    if not prefixes:
        yield Problem("no-datasets-to-merge")
    yield from prefix_problems(output_prefix)
    text = f"{option('output_prefix')} {output_prefix}"
    output = os.path.realpath(output_prefix + ".bin")
    if any(os.path.realpath(prefix + ".bin") == output for prefix in prefixes):
        yield Problem("output-is-an-input", given=text)
