"""Merge token files (.bin and .idx) into one pair."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, counted
from megatron_ds.data.token_files.merge import MergeProgress, merge, prefixes_in
from megatron_ds.launch import output


@dataclass(frozen=True)
class Options:
    """Merges token files (.bin and .idx) into one pair, as if all text had been preprocessed at
    once: every pair of a folder, or given pairs in the given order.
    """

    PROGRAM: ClassVar[str] = "merge_datasets.py"
    OTHER_NAMES: ClassVar[tuple[str, ...]] = ("merge_preprocessed_data.py",)

    input: str | None = option_field(None, metavar="DIR")
    """Folder whose pairs are merged in order of name."""
    datasets: tuple[str, ...] = option_field((), nargs="*", metavar="PREFIX")
    """Pairs to merge, in this order (paths without .bin and .idx)."""
    output_prefix: str = option_field("", metavar="PREFIX", required=True)
    """Path of the new pair without .bin and .idx."""

    def problems(self) -> Iterator[Problem]:
        if (self.input is None) == (not self.datasets):
            yield Problem("merge-input-not-unique")


def _report(merged: MergeProgress) -> None:
    share = merged.copied_bytes / merged.total_bytes if merged.total_bytes else 1.0
    print(f"{merged.datasets} merged, {share:.0%} of the bytes", file=sys.stderr, flush=True)


def work(options: Options) -> None:
    start = time.perf_counter()
    prefixes = list(options.datasets) or prefixes_in(str(options.input))
    done = merge(prefixes, options.output_prefix, _report)
    written = done.written
    seconds = max(time.perf_counter() - start, 1e-9)
    with output.ignore_broken_pipe():
        print(
            f"{counted(done.datasets, 'dataset')}: {counted(written.documents, 'document')}, "
            f"{counted(written.sequences, 'sequence')}, {counted(written.tokens, 'token')} "
            f"({done.copied_bytes / seconds / 1e6:.1f} MB/s)"
        )
        print(f"wrote {options.output_prefix}.bin and .idx")


main = cli.program(Options, work)
