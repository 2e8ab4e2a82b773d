"""Options and work of the command lines of cleaning in tools/openwebtext, and their report.

Merging files is a cleaning run without stages. The stages have their own modules.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds.cleaning import pipeline
from megatron_ds.cleaning.options import RESUME, CleaningOptions
from megatron_ds.cleaning.stats import Counts, ranked
from megatron_ds.cli.progress import progress
from megatron_ds.cli.sharding import ShardOptions, connect_ray
from megatron_ds.config import TokenizerConfig
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem, collect, counted
from megatron_ds.launch import environment
from megatron_ds.launch.output import print_error
from megatron_ds.preprocess.documents.inputs import (
    COMPRESSIONS,
    OUTPUT_SUFFIXES,
    QUARANTINE,
    InputSpec,
    is_skipped_name,
)
from megatron_ds.preprocess.shards import Shard, shard_problems

Update = Callable[[int, int, str], None]
"""Takes the documents and bytes so far, and a description."""
Clean = Callable[[CleaningOptions, Update], Counts | None]
"""Cleans. Returns None if other processes have to complete the output."""
MERGED_SUFFIXES = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class CleaningCommand:
    """Base of the options of tools that clean documents."""

    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {"json_keys": "--json-key"}

    log_interval: int = option_field(10_000, minimum=1)
    """Documents between progress lines if stderr is not a terminal."""
    cleaning: CleaningOptions = option_group(CleaningOptions(workers=environment.available_cores()))
    shards: ShardOptions = option_group(ShardOptions())
    tokenizer: TokenizerConfig = option_group(TokenizerConfig())
    given: frozenset[str] = frozenset()

    @property
    def options(self) -> CleaningOptions:
        """The options of the run."""
        if "tokenizer_type" not in self.given:
            return self.cleaning
        return dataclasses.replace(self.cleaning, tokenizer=self.tokenizer)

    def problems(self) -> Iterator[Problem]:
        problems: list[Problem] = []
        # The work reports the problems of the stages' files, which take long to read.
        if any(self.options.problems()):
            with collect(problems):
                self.options.build()
        yield from problems
        yield from self.shards.problems()
        if self.shards.is_used:
            yield from shard_problems(self.options.inputs)

    def warnings(self) -> Iterator[Problem]:
        yield from self.options.warnings()


@dataclass(frozen=True)
class MergeOptions:
    """Merges files of JSON lines into one.

    Lines are copied as they are; lines that are not a JSON object are left out, listed in
    OUTPUT_FILE.quarantine and counted.
    """

    PROGRAM: ClassVar[str] = "merge_data.py"
    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {"paths": "--json_path", "output": "--output_file"}

    json_path: tuple[str, ...] = option_field((".",), flag="json_path", nargs="*", metavar="PATH")
    """JSON lines files, or folders whose files (including subfolders) are merged in order of
    name."""
    output_file: str = option_field("merged_output.json", flag="output_file", metavar="FILE")
    """Output file; compressed if the name ends with .gz, .xz or .bz2."""
    workers: int = option_field(1, minimum=1)
    """Number of worker processes."""
    resume: bool = option_field(False, help=RESUME)

    @property
    def files(self) -> list[str]:
        return [file for path in self.json_path for file in files_of(path, self.output_file)]

    def problems(self) -> Iterator[Problem]:
        for path in self.json_path:
            if not any(files_of(path, self.output_file)):
                yield Problem("no-files-to-merge", path=path, suffixes=" ".join(MERGED_SUFFIXES))

    def run(self) -> None:
        """Merges the files and reports the results."""
        inputs = InputSpec(paths=tuple(self.files), format="jsonl")
        cleaning = CleaningOptions(
            inputs, self.output_file, stages=(), workers=self.workers, resume=self.resume
        )
        clean_and_report(cleaning, 10_000, _clean, _total_bytes(cleaning))


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
            is_listed = suffix in MERGED_SUFFIXES and not is_written and os.path.isfile(file)
            if is_listed and os.path.realpath(file) not in written:
                yield file


def work(command: CleaningCommand) -> None:
    """Clean and report the results."""
    options = command.options
    if command.shards.is_used:
        clean: Clean = functools.partial(_clean_shards, command)
        total = None
    else:
        clean = _clean
        total = _total_bytes(options)
    clean_and_report(options, command.log_interval, clean, total)


def _clean(options: CleaningOptions, update: Update) -> Counts:
    return pipeline.clean(options, functools.partial(_report, update))


def _total_bytes(options: CleaningOptions) -> int | None:
    """Bytes of the inputs; None if they have problems, which the work reports."""
    return None if any(options.inputs.problems()) else options.inputs.total_bytes()


def _report(update: Update, counts: Counts, input_bytes: int) -> None:
    before = counts.before.documents
    after = counts.after.documents
    update(before, input_bytes, f"{after:,} of {before:,} documents kept")


def _clean_shards(
    command: CleaningCommand, options: CleaningOptions, update: Update
) -> Counts | None:
    """Clean one shard, or all with Ray. None if other processes have to complete the output."""
    from megatron_ds.cleaning import sharded
    from megatron_ds.launch.ranks import ray_cluster
    from megatron_ds.preprocess.shard_files import settle_count

    def report(documents: int, input_bytes: int) -> None:
        update(documents, input_bytes, f"{documents:,} documents read")

    shards = command.shards
    part = command.shards.part
    if part is not None:
        if not shards.merges:
            ray_cluster.exit_with_task()
        shard = Shard(*part)
        merges = shards.merges
        return sharded.clean_shard(options, shard, report, print_error, merges=merges)
    program = [os.path.abspath(inspect.getfile(type(command)))]
    with connect_ray(shards, program, options.workers, print_error) as ray:
        count = settle_count(options.output, shards.num_shards, ray.count)
        merged = functools.partial(_report, update)
        return sharded.ShardedCleaning(options, count).complete(ray.run, print_error, merged)


def clean_and_report(
    options: CleaningOptions, log_interval: int, clean: Clean, total: int | None
) -> None:
    """Clean documents and print the results.

    Args:
        options: Inputs, stages and output.
        log_interval: Documents between progress lines if stderr is not a terminal.
        clean: Cleans.
        total: Bytes that it reads; None if they are unknown.

    Raises:
        UserError: For invalid options, inputs that cannot be read, or if no document is left.
    """
    start = time.perf_counter()
    environment.limit_tokenizer_threads()  # the workers are the parallelism
    with progress("cleaning", total, log_interval) as update:
        counts = clean(options, update)
    if counts is None:
        return
    print(*final_report(counts, options, time.perf_counter() - start), sep="\n")


def final_report(counts: Counts, options: CleaningOptions, seconds: float) -> Iterator[str]:
    """The results, stage by stage, and the output files."""
    before = counts.before
    after = counts.after
    seconds = max(seconds, 1e-9)
    if not options.order:  # the texts were not read
        speed = f"{before.documents / seconds:,.0f} documents/s"
        yield f"merged {after.documents:,} documents in {seconds:.1f} s ({speed})"
    else:
        yield (
            f"kept {after.documents:,} of {before.documents:,} documents, {after.characters:,} of "
            f"{before.characters:,} characters, in {seconds:.1f} s "
            f"({before.characters / seconds / 1e6:.2f} million characters/s)"
        )
    if counts.bad:
        listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.bad.items()))
        yield f"rejected: {listed}; listed in {options.quarantine}"
    for name, stage in counts.stages.items():
        line = f"{name}: {stage.entered:,} in, {stage.left:,} out"
        if stage.changed:
            line += f", {stage.changed:,} changed"
        if stage.added > 0:
            line += f", {stage.added:,} more by splitting"
        if stage.dropped:
            reasons = (f"{count:,} {reason}" for reason, count in ranked(stage.dropped))
            line += f"; dropped {', '.join(reasons)}"
        yield line
    if counts.without_url:
        yield f"without {options.url_key!r}: {counted(counts.without_url, 'document', ',')}"
    files = [options.output, options.dropped_output, options.report]
    yield "wrote " + ", ".join(file for file in files if file is not None)
