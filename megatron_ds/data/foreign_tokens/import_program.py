"""Make a pair of token files (.bin and .idx) of another trainer's tokens."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_ds import cli
from megatron_ds.cli.command import print_warning, table_of
from megatron_ds.cli.progress import progress
from megatron_ds.config.checks import prefix_problems
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, UserError, counted
from megatron_ds.data.foreign_tokens.documents import DocumentRule
from megatron_ds.data.foreign_tokens.foreign_file import ForeignTokens, ReadOptions
from megatron_ds.data.foreign_tokens.importing import (
    ImportProgress,
    ImportTarget,
    import_tokens,
)
from megatron_ds.data.foreign_tokens.kinds import AUTO, FORMATS, KINDS
from megatron_ds.data.foreign_tokens.selection import Selection, select
from megatron_ds.launch import output

POSITIONS = (AUTO, "after", "before")
TYPES = ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")


@dataclass(frozen=True)
class Options:
    """Makes a pair of token files (.bin and .idx) of another trainer's tokens.

    Ids are kept as they are, with the end tokens in their documents. Documents are those of the
    files, where they have them, or found by the end token. The same command continues an
    interrupted run.
    """

    PROGRAM: ClassVar[str] = "import_tokens.py"

    inputs: tuple[str, ...] = option_field(
        (), flag="input", nargs="*", metavar="PATH", required=True
    )
    """Files, glob patterns or a folder of one format, in reading order."""
    output_prefix: str = option_field("", metavar="PREFIX", required=True)
    """Path of the new pair without .bin and .idx."""
    format: str = option_field(AUTO, choices=FORMATS)
    """Format of the files; auto recognizes it."""
    end_token: int | None = option_field(None, minimum=0, metavar="ID")
    """Id of the end token, at which documents end, instead of the ends that the files have."""
    end_token_position: str = option_field(AUTO, choices=POSITIONS)
    """Side of its document on which the end token is; auto is before for llm.c, else after."""
    document_per_file: bool = option_field(False)
    """Take each file for one document, although it may hold many."""
    keep_truncated_document: bool = option_field(False)
    """Keep a last document without an end token, which is an error otherwise."""
    vocab_size: int | None = option_field(None, minimum=1)
    """Number of ids; others are errors. Ids are stored in 16 bits below 65,500, as in preprocessing
    (default: in 16 bits if the files do so)."""
    column: str | None = option_field(None, metavar="NAME")
    """Column or key of the ids (default: the only one, or input_ids, tokens, token_ids, ids)."""
    token_type: str | None = option_field(None, choices=TYPES)
    """Type of ids in files that do not have it (default: uint16 for nanoGPT, int64 for MDS columns
    of bytes, else by the document ends or the vocabulary)."""
    log_interval: int = option_field(1_000_000, minimum=1)
    """Documents between progress lines if stderr is not a terminal."""
    resume: bool = option_field(False)
    """Warn if there is no interrupted run to continue."""
    overwrite: bool = option_field(False)
    """Start over and replace existing output."""

    def problems(self) -> Iterator[Problem]:
        if self.output_prefix:
            yield from prefix_problems(self.output_prefix)
        if self.end_token is not None and self.document_per_file:
            yield Problem("foreign-boundaries-twice")

    def read_options(self) -> ReadOptions:
        return ReadOptions(
            None if self.token_type is None else np.dtype(self.token_type).newbyteorder("<"),
            self.column,
            self.vocab_size,
            self.end_token is not None or self.document_per_file,
        )

    def target(self, source: ForeignTokens) -> ImportTarget:
        is_before = self.end_token_position == "before"
        if self.end_token_position == AUTO:
            is_before = source.marks_begin
        rule = DocumentRule(
            self.end_token, is_before and self.end_token is not None, self.document_per_file
        )
        return ImportTarget(
            self.output_prefix,
            rule,
            self.vocab_size,
            self.keep_truncated_document,
            self.resume,
            self.overwrite,
        )


def boundaries_line(source: ForeignTokens, rule: DocumentRule) -> str:
    """Describes how documents are found."""
    if rule.whole_files:
        return "documents: one per file"
    if rule.end_token is None:
        return f"documents: {source.boundaries}"
    side = "begin with" if rule.is_before else "end with"
    ignored = f"; {source.boundaries} are ignored" if source.boundaries else ""
    return f"documents: {side} the token {rule.end_token}, which stays in them{ignored}"


def final_report(
    done: ImportProgress, selection: Selection, prefix: str, seconds: float
) -> Iterator[str]:
    """Counts, speed and files."""
    written = done.written
    yield f"{counted(written.documents, 'document')}, {counted(written.tokens, 'token')}"
    if done.empty:
        yield f"left out: {counted(done.empty, 'document')} without tokens"
    if selection.skipped:
        others = counted(len(selection.skipped), "other file")
        yield f"not read: {others} of the folder, such as {selection.skipped[0]}"
    if done.is_complete:
        yield "the output was complete; there was nothing left to do"
    else:
        yield f"{seconds:.2f} s ({done.id_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s of ids)"
    yield f"{'in' if done.is_complete else 'wrote'} {prefix}.bin and .idx"


def work(options: Options) -> None:
    start = time.perf_counter()
    selection = select(options.inputs, options.format)
    source = KINDS[selection.format].open(selection.paths, options.read_options())
    target = options.target(source)
    table = table_of(Options)

    def warn(problem: Problem) -> None:
        print_warning(problem, table)

    for warning in source.warnings:
        warn(warning)
    line = f"format {selection.format}, {counted(len(source.files), 'file')}"
    output.print_error("; ".join([line, *source.notes]))
    with progress("importing", source.size, options.log_interval) as update:

        def report(done: ImportProgress) -> None:
            tokens = counted(done.written.tokens, "token", ",")
            documents = counted(done.written.documents, "document", ",")
            update(done.written.documents, done.num_bytes, f"{documents}, {tokens}")

        try:
            done = import_tokens(source, target, report, warn)
        except UserError as error:
            if error.problems[-1].code == "output-exists":
                cli.fail(error.problems, table)
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                error.add_note("free some space for --output-prefix, and run this command again")
            raise
    with output.ignore_broken_pipe():
        print(boundaries_line(source, target.rule))
        report_lines = final_report(
            done, selection, options.output_prefix, time.perf_counter() - start
        )
        print(*report_lines, sep="\n")


main = cli.program(Options, work)
