"""Merges files of JSON lines into one: a cleaning run without stages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds.cleaning.command import clean_and_report
from megatron_ds.cleaning.options import RESUME, CleaningOptions
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.preprocess.inputs import (
    COMPRESSIONS,
    OUTPUT_SUFFIXES,
    QUARANTINE,
    InputSpec,
    is_skipped_name,
)

SUFFIXES = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class MergeOptions:
    """Merges files of JSON lines into one.

    Lines are copied as they are; lines that are not a JSON object are left out, listed in
    OUTPUT_FILE.quarantine and counted.
    """

    PROGRAM: ClassVar[str] = "merge_data.py"
    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {"paths": "--json_path", "output": "--output_file"}

    json_path: tuple[str, ...] = option_field(
        (".",),
        "JSON lines files, or folders whose files (including subfolders) are merged in "
        "order of name",
        flag="json_path",
        nargs="*",
        metavar="PATH",
    )
    output_file: str = option_field(
        "merged_output.json",
        "output file; compressed if the name ends with .gz, .xz or .bz2",
        flag="output_file",
        metavar="FILE",
    )
    workers: int = option_field(1, "number of worker processes", minimum=1)
    resume: bool = option_field(False, RESUME)

    @property
    def files(self) -> list[str]:
        return [file for path in self.json_path for file in files_of(path, self.output_file)]

    def problems(self) -> Iterator[Problem]:
        for path in self.json_path:
            if not any(files_of(path, self.output_file)):
                yield Problem("no-files-to-merge", path=path, suffixes=" ".join(SUFFIXES))


def files_of(path: str, output: str) -> Iterator[str]:
    """The files of a path, by name, except the outputs of this and of earlier runs."""
    if not os.path.isdir(path):
        yield path
        return
    written = {os.path.realpath(output), os.path.realpath(output + QUARANTINE)}
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not is_skipped_name(name))
        for name in sorted(names):
            stem, suffix = os.path.splitext(name.lower())
            if suffix in COMPRESSIONS:
                suffix = os.path.splitext(stem)[1]
            file = os.path.join(folder, name)
            is_written = is_skipped_name(name) or name.endswith(OUTPUT_SUFFIXES)
            is_listed = suffix in SUFFIXES and not is_written and os.path.isfile(file)
            if is_listed and os.path.realpath(file) not in written:
                yield file


def merge_files(options: MergeOptions) -> None:
    """Merge the files and report the results."""
    cleaning = CleaningOptions(
        InputSpec(paths=tuple(options.files), format="jsonl"),
        options.output_file,
        stages=(),
        workers=options.workers,
        resume=options.resume,
    )
    clean_and_report(cleaning, log_interval=10_000)
