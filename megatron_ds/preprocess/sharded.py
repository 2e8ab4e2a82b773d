"""Preprocessing by several processes or machines: shards of the input, merged byte for byte.

Each shard is a run of `pipeline.py` with files of its own in `PREFIX.shards.work`. When all shards
are complete, their files are merged to those that one run over the entire input writes. A run that
is repeated continues: complete shards are kept, and the merge is resumable, too. The processes
share a file system and the settings, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import ignore, raise_if_any, user_error
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.tokenizer_metadata import metadata_json
from megatron_ds.fileio.resumable import COMPLETED_SUFFIX, Log, ResumableOutput, complete_progress
from megatron_ds.preprocess.documents.document_readers import ReadPosition
from megatron_ds.preprocess.documents.inputs import QUARANTINE
from megatron_ds.preprocess.documents.parsing import RejectedDocument
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import (
    REJECTED,
    Progress,
    finish_files,
    no_documents,
    preprocess,
    publish,
    token_file_writers,
    work_names,
)
from megatron_ds.preprocess.shard_files import RunShards, ShardFiles, remove_shards, shard_prefix
from megatron_ds.preprocess.shards import Shard, shard_problems
from megatron_ds.tokenizer import Tokenizer


def preprocess_shard(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None] = ignore,
    log: Log = ignore,
    *,
    merges: bool = True,
) -> Progress | None:
    """Write the token files of one shard; the process that completes the last shard merges them.

    Args:
        options: Inputs and output of all shards; `shard` is the one to process.
        tokenizer: Encodes the texts.
        report: Called with the counts of the shard after every chunk.
        log: Takes messages.
        merges: Whether this process checks the entire output and may merge the shards.

    Returns:
        The counts of the entire output; None if it is not complete yet.

    Raises:
        UserError: As `preprocess` does, and for inputs that cannot be divided.
    """
    shard = options.shard
    assert shard is not None
    raise_if_any([*options.problems(), *shard_problems(options.inputs)])
    part = dataclasses.replace(options, output_prefix=shard_prefix(options.output_prefix, shard))
    if not merges:
        preprocess(part, tokenizer, report, log)
        return None
    sharded = ShardedRun(dataclasses.replace(options, shard=None), tokenizer, shard.count)
    if (done := sharded.find_output()) is not None:
        log(f"{options.output_prefix} is complete; there is nothing left to do")
        return done
    preprocess(part, tokenizer, report, log)
    return sharded.files.merge_after(shard, lambda run: sharded.complete(run, log), log)


@dataclass
class ShardedRun:
    """All shards of a run.

    Args:
        options: Inputs and output of all shards.
        tokenizer: Encodes the texts.
        count: Number of shards.

    Raises:
        UserError: For wrong options, inputs that cannot be divided, and output of another run
            without `overwrite`.
    """

    options: PreprocessOptions
    tokenizer: Tokenizer
    count: int

    def __post_init__(self) -> None:
        options = self.options
        splitter = self.options.splitter
        raise_if_any([*options.problems(), *shard_problems(options.inputs)])
        sentences = None if splitter is None else splitter.description
        self._metadata = metadata_json(self.tokenizer.fingerprint, sentences)
        self._completed = options.output_prefix + COMPLETED_SUFFIX
        settings = options.resume_settings(self._metadata)
        self.files = ShardFiles(options.output_prefix, settings, self.count)
        existing = [] if options.overwrite else options.existing_output()
        if existing and not self.files.is_merging and self.find_output() is None:
            raise user_error("output-exists", existing=", ".join(existing))

    def find_output(self) -> Progress | None:
        """The counts of the complete output of this run; None if it is incomplete or is to be
        replaced."""
        if self.options.overwrite:
            return None
        record = complete_progress(Path(self._completed), self.files.settings)
        return None if record is None else Progress.from_json(record["counts"])

    def complete(self, run_shards: RunShards, log: Log, restart: bool = False) -> Progress:
        """Complete the missing shards, and merge all of them.

        While the shards run, no other process can merge them.

        Args:
            run_shards: Completes shards.
            log: Takes messages.
            restart: Whether to run complete shards again.

        Returns:
            The counts of the entire output.

        Raises:
            UserError: If another process merges; if a shard is still missing; if there is no
                document in any.
        """
        options = self.options
        files = self.files
        names = work_names(options)
        resume = not options.overwrite
        with files.open_merge(names, log, completed=self._completed, resume=resume) as work:
            if not work.published:
                if not work.finished:
                    if restart:
                        files.discard()
                    files.run_missing(run_shards)
                    merge = _Merge(options, self.tokenizer, work)
                    for shard in files.shards[merge.merged :]:
                        merge.add(shard, files.progress(shard))
                    merge.finish(self._metadata, len(files.settings["order of inputs"]))
                publish(options, work)
            assert work.progress is not None
            done = Progress.from_json(work.progress["counts"])
        remove_shards(options.output_prefix)
        return dataclasses.replace(done, input_bytes=options.inputs.total_bytes() or 0)


class _Merge:
    """Appends the files of shards, in order.

    Attributes:
        merged: Number of shards that were appended.
    """

    def __init__(
        self, options: PreprocessOptions, tokenizer: Tokenizer, work: ResumableOutput
    ) -> None:
        saved: dict[str, Any] = work.progress or {"merged": 0, "written": {}, "counts": {}}
        self._options = options
        self._work = work
        self.merged: int = saved["merged"]
        self._lines = Counter[str](saved.get("lines", {}))
        self._counts = Progress(**saved["counts"])
        self._usable = {*saved.get("usable", ())}
        self._writers = token_file_writers(options, tokenizer, work, saved["written"])
        self._first_reject: RejectedDocument | None = None

    def add(self, shard: Shard, progress: dict[str, Any]) -> None:
        options = self._options
        prefix = shard_prefix(self._options.output_prefix, shard)
        part = dataclasses.replace(options, output_prefix=prefix)
        for key, writer in self._writers.items():
            if any(progress["written"][key]):
                writer.add_dataset(IndexedDataset(part.prefix(key)))
        if progress["counts"]["dropped"]:
            with open(prefix + QUARANTINE, "rb") as rejected:
                for line in rejected:
                    self._add_rejected(RejectedDocument(**json.loads(line)))
        before = self._counts
        counts = Progress(**progress["counts"])
        self._counts = Progress(
            before.documents + counts.documents,
            before.tokens + counts.tokens,
            before.text_bytes + counts.text_bytes,
            before.lost_characters + counts.lost_characters,
            dropped=Counter(before.dropped) + Counter(counts.dropped),
            unusable=[*dict.fromkeys((*before.unusable, *counts.unusable))],
        )
        self._lines.update(progress["lines"])
        self._usable.update(progress.get("usable", ()))
        self.merged += 1
        if self._work.is_commit_due:
            saved = {"merged": self.merged, "lines": self._lines, "usable": sorted(self._usable)}
            self._work.commit({**saved, **self._progress()})

    def _add_rejected(self, document: RejectedDocument) -> None:
        """A shard counts lines from its own first one."""
        document = document._replace(line=document.line + self._lines[document.file])
        self._first_reject = self._first_reject or document
        self._work.files[REJECTED].write(document.to_json_line())

    def _progress(self) -> dict[str, Any]:
        written = {key: writer.written for key, writer in self._writers.items()}
        return {"written": written, "counts": self._counts.to_json()}

    def finish(self, metadata: bytes, files: int) -> None:
        """Complete the files, with the record that one run over all input files leaves."""
        if not self._counts.documents:
            self._work.discard()
            raise no_documents(self._options, self._counts, self._first_reject)
        unusable = [name for name in self._counts.unusable if name not in self._usable]
        self._counts = dataclasses.replace(self._counts, unusable=unusable)
        finish_files(self._options, self._work, self._writers, metadata)
        self._work.commit({"position": ReadPosition(files), **self._progress()}, finished=True)
