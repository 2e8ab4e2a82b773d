"""Shows which documents the steps of a run have read, and which steps have read a document.

The samples are in `steps`, the run's data in `run_data`, documents and their reads in `documents`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from megatron_ds import cli
from megatron_ds.cli.inspection import Inspection
from megatron_ds.config.problems import counted, user_error
from megatron_ds.usage.documents import DocumentTokens, documents_of, reads_of
from megatron_ds.usage.exclusion import fork_without_documents
from megatron_ds.usage.options import Options
from megatron_ds.usage.run_data import RunData
from megatron_ds.usage.steps import Steps


class UsageInspection(Inspection):
    """Shows the documents that a step has read, or the steps that have read a document."""

    def __init__(self, options: Options) -> None:
        super().__init__(as_json=options.json)
        self._options = options
        self._run = RunData(
            Path(options.run),
            trusts_files=options.trust_recorded_files,
            trusts_code=options.trust_remote_code,
        )

    def run(self) -> int:
        """Prints it, and returns the exit status."""
        if self._options.exclude is not None:
            self._show_fork()
        elif self._options.step is not None:
            self._show_step(self._options.step)
        else:
            name, _, index = (self._options.document or "").rpartition(":")
            self._show_document(name, int(index))
        return self.finish()

    def _show_fork(self) -> None:
        command = fork_without_documents(self._options)
        folder = self._options.save
        self.found |= {"fork": folder, "command": command}
        self.show(f"wrote {folder}, a fork of {self._options.run}; start it by", f"    {command}")

    def _show_step(self, step: int) -> None:
        steps = self._run.of_step(step)
        rank = self._options.rank
        dp_rank = None if rank is None else steps.dp_rank_of(rank)
        samples = steps.samples(step)
        shown = [sample for sample in samples if dp_rank in (None, steps.dp_rank(sample))]
        stage = f" of stage {steps.phase}" if steps.phase else ""
        rank_text = "" if rank is None else f", {len(shown)} of them on rank {rank}"
        state = "" if step <= self._run.last else ", which the run has not made yet"
        self.show(
            f"step {step}{stage}{state}: samples {samples[0]} to {samples[-1]}{rank_text}, "
            f"{counted(steps.segment.seq_length, 'token')} each"
        )
        entries: list[dict[str, Any]] = []
        for position in shown:
            documents = documents_of(steps, position)
            if not documents:
                raise user_error("run-without-documents", "run", run=self._run.folder)
            rank_of = steps.dp_rank(position)
            self.show(f"--- sample {position}, data-parallel rank {rank_of}")
            described = [self._described(steps, document) for document in documents]
            entries.append({"position": position, "dp_rank": rank_of, "documents": described})
        self.found |= {"step": step, "stage": steps.phase, "samples": entries}

    def _described(self, steps: Steps, tokens: DocumentTokens) -> dict[str, Any]:
        """Shows tokens of a document, and returns them for JSON."""
        name = f"{os.path.basename(tokens.prefix)}:{tokens.document}"
        ids = tokens.ids[: self._options.max_tokens]
        last = tokens.first + len(tokens.ids) - 1
        text = steps.tokenizer.decode(ids)
        self.show(f"{name} ({tokens.prefix}), tokens {tokens.first} to {last}:", f"    {text!r}")
        return {
            "document": name,
            "number": tokens.document,
            "prefix": tokens.prefix,
            "first": tokens.first,
            "tokens": len(tokens.ids),
            "ids": ids,
            "text": text,
        }

    def _show_document(self, name: str, index: int) -> None:
        prefix, reads = reads_of(self._run, name, index)
        entries = [dataclasses.asdict(read) for read in reads]
        self.found |= {"prefix": prefix, "number": index, "reads": entries}
        self.show(f"{name}:{index}: {counted(len(reads), 'part')} in steps 1 to {self._run.last}")
        for read in reads:
            self.show(
                f"step {read.step}, sample {read.position}, "
                f"data-parallel rank {read.dp_rank}, epoch {read.epoch}: "
                f"tokens {read.first} to {read.first + read.tokens - 1}"
            )


main = cli.program(Options, lambda options: UsageInspection(options).run())
