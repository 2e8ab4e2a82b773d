"""Write a pair of token files (.bin and .idx) as files of another trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_ds import cli
from megatron_ds.cli.command import print_warning, table_of
from megatron_ds.cli.progress import progress
from megatron_ds.config.checks import output_problems
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, counted, user_error
from megatron_ds.data.foreign_tokens.exporting import (
    FORMATS,
    Export,
    export_tokens,
    id_type,
    lost_boundaries,
)
from megatron_ds.data.foreign_tokens.kinds import AUTO
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.launch import output

BY_SUFFIX = {".bin": "nanogpt", ".parquet": "parquet"}
TYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class Options:
    """Writes a pair of token files (.bin and .idx) as files of another trainer.

    Ids stay as they are, in the order of the pair. Files of nanoGPT, llm.c and NumPy have no
    documents: their readers find them by the end token, which has to be in the pair.
    """

    PROGRAM: ClassVar[str] = "export_tokens.py"

    input: str = option_field("", metavar="PREFIX", required=True)
    """Path or URL of the pair without .bin and .idx."""
    output: str = option_field("", metavar="FILE", required=True)
    """The file to write; OLMo's .csv.gz of documents is written next to it."""
    format: str = option_field(AUTO, choices=(AUTO, *FORMATS))
    """Format; auto is nanogpt for .bin and parquet for .parquet. Of .npy, olmo has no header and
    numpy has one."""
    token_type: str | None = option_field(None, choices=TYPES)
    """Type of the ids in files of llm.c and OLMo (default: 16 bits if the pair has them)."""
    log_interval: int = option_field(1_000_000_000, minimum=1)
    """Tokens between progress lines if stderr is not a terminal."""
    overwrite: bool = option_field(False)
    """Replace existing files."""

    @property
    def selected_format(self) -> str:
        """The format; "" if nothing tells it."""
        if self.format != AUTO:
            return self.format
        return BY_SUFFIX.get(os.path.splitext(self.output)[1].lower(), "")

    def problems(self) -> Iterator[Problem]:
        if self.output:
            yield from output_problems("output", self.output)
            if not self.selected_format:
                yield Problem("export-format-unknown", path=self.output, formats=", ".join(FORMATS))
        format = self.selected_format
        types = list(map(np.dtype, FORMATS[format].types)) if format else []
        if self.token_type is not None and types and np.dtype(self.token_type) not in types:
            yield Problem("export-type-unknown", format=format, dtype=self.token_type)


def work(options: Options) -> None:
    start = time.perf_counter()
    pair = IndexedDataset(options.input)
    if pair.loss_spans is not None:
        raise user_error("export-of-loss-spans", "input", prefix=options.input)
    format = options.selected_format
    dtype = id_type(format, pair.dtype)
    if options.token_type is not None:
        dtype = np.dtype(options.token_type).newbyteorder("<")
    total = int(pair.tokens.size) * dtype.itemsize
    with progress("exporting", total, options.log_interval) as update:

        def report(tokens: int) -> None:
            update(tokens, tokens * dtype.itemsize, counted(tokens, "token", ","))

        export = Export(pair, dtype, report)
        for warning in lost_boundaries(export, format):
            print_warning(warning, table_of(Options))
        paths = export_tokens(export, options.output, format, overwrite=options.overwrite)
    seconds = max(time.perf_counter() - start, 1e-9)
    documents = counted(len(pair.document_index) - 1, "document")
    with output.ignore_broken_pipe():
        print(
            f"{documents}, {counted(export.count, 'token')} as {dtype}, format {format} "
            f"({total / seconds / 1e6:.0f} MB/s of ids)"
        )
        print(f"wrote {' and '.join(paths)}")


main = cli.program(Options, work)
