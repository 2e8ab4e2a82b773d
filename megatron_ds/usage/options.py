"""Options of tools/data_usage.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.reports.history import run_problems


@dataclass(frozen=True)
class Options:
    """Shows the documents that a step of a run has read, or the steps that have read a document.

    The samples are found again from what the starts of the run have recorded in events.jsonl, with
    the token files that it has read. A document is named by its file and its number in the file,
    from 0: web:17, or data/web:17 if several files have this name.
    """

    PROGRAM: ClassVar[str] = "data_usage.py"

    run: str = option_field("", metavar="RUN", positional=True, required=True)
    """--save folder of the run."""
    step: int | None = option_field(None, minimum=1)
    """Iteration whose documents are shown."""
    rank: int | None = option_field(None, minimum=0)
    """Show the samples of this rank only."""
    document: str | None = option_field(None, metavar="FILE:NUMBER")
    """Document whose steps are shown."""
    max_tokens: int | None = option_field(None, minimum=1)
    """Truncate the shown parts of documents to this length."""
    json: bool = option_field(False)
    """Print one JSON object."""
    exclude: str | None = option_field(None, metavar="FILE")
    """Fork the run at the checkpoint of --step, without the documents of this file: FILE:NUMBER or
    FILE:FIRST-LAST on each line."""
    save: str | None = option_field(None, metavar="FOLDER")
    """New folder of the fork."""
    trust_recorded_files: bool = option_field(False)
    """Read the files outside of the run's folder that its record names."""
    trust_remote_code: bool = option_field(False)
    """Run the Python code of the run's tokenizer, if it has some."""

    def problems(self) -> Iterator[Problem]:
        yield from run_problems("run", (self.run,))
        if (self.exclude is None) != (self.save is None) or (self.exclude and not self.step):
            yield Problem("exclude-needs-step-and-folder", "exclude", "step", "save")
        elif self.exclude is not None:
            yield from file_problems("exclude", self.exclude)
        if (self.step is None) == (self.document is None):
            yield Problem("step-or-document", "step", "document")
        if self.document is not None and not re.fullmatch(r".+:\d+", self.document):
            yield Problem("document-syntax", "document", text=self.document)
        if self.rank is not None and self.step is None:
            yield Problem("rank-without-step", "rank", "step")
