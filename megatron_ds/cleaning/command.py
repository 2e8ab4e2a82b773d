"""Options and work that the command lines of cleaning share: tools/openwebtext.

Owns the report of a cleaning run; the stages have their own modules.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.cleaning.pipeline import clean
from megatron_ds.cleaning.stats import Counts, ranked
from megatron_ds.cli.progress import progress
from megatron_ds.config import TokenizerConfig
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem, collect, counted
from megatron_ds.launch import environment


@dataclass(frozen=True)
class CleaningCommand:
    """Base of the options of tools that clean documents."""

    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {"json_keys": "--json-key"}

    log_interval: int = option_field(
        10_000, "documents between progress lines if stderr is not a terminal", minimum=1
    )
    cleaning: CleaningOptions = option_group(CleaningOptions(workers=environment.available_cores()))
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

    def warnings(self) -> Iterator[Problem]:
        yield from self.options.warnings()


def work(command: CleaningCommand) -> None:
    """Clean and report the results."""
    clean_and_report(command.options, command.log_interval)


def clean_and_report(options: CleaningOptions, log_interval: int) -> None:
    """Clean documents and print the results.

    Raises:
        UserError: For invalid options, inputs that cannot be read, or if no document is left.
    """
    start = time.perf_counter()
    environment.limit_tokenizer_threads()  # the workers are the parallelism
    total = None if any(options.inputs.problems()) else options.inputs.total_bytes()
    with progress("cleaning", total, log_interval) as update:

        def report(counts: Counts, input_bytes: int) -> None:
            before, after = counts.before.documents, counts.after.documents
            update(before, input_bytes, f"{after:,} of {before:,} documents kept")

        counts = clean(options, report)
    print(*final_report(counts, options, time.perf_counter() - start), sep="\n")


def final_report(counts: Counts, options: CleaningOptions, seconds: float) -> Iterator[str]:
    """The results, stage by stage, and the output files."""
    before, after, seconds = counts.before, counts.after, max(seconds, 1e-9)
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
    files = [options.output, options.dropped_output, options.report_figure, options.report_numbers]
    yield "wrote " + ", ".join(file for file in files if file is not None)
