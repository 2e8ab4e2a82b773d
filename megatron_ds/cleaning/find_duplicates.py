"""Lists near duplicates: a JSON line {"kept id": [{"duplicate id": similarity}]} for each.

The stage `near` drops them instead. Knows no command line.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, NamedTuple

from megatron_ds.cleaning.deduplication import LshIndex, MinHashSignature, NearOptions
from megatron_ds.cleaning.pipeline import OUTPUT, ChunkedInput
from megatron_ds.cleaning.stages import Document
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem, option, user_error
from megatron_ds.fileio.resumable import ResumableOutput, pack_record, read_records
from megatron_ds.preprocess.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.formats import RawDocument
from megatron_ds.preprocess.inputs import InputSpec
from megatron_ds.preprocess.parsing import RejectedDocument, TextFields, texts_of
from megatron_ds.preprocess.worker_pool import Workers

KEPT = "kept"
"""The file with signature and id of kept documents, in the work folder."""
COMMIT_DOCUMENTS = 10_000
"""Documents between commits."""


@dataclass(frozen=True)
class DuplicateOptions:
    """Lists documents that are near duplicates of earlier ones.

    Writes a JSON line {"kept id": [{"duplicate id": similarity}]} for each duplicate. The stage
    near of clean.py drops duplicates instead.
    """

    PROGRAM: ClassVar[str] = "find_duplicates.py"
    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {"paths": "--inputs", "json_keys": "--inputs"}

    inputs: tuple[str, ...] = option_field(
        (),
        "files, each followed by the key of the documents' ids: cc.json cc_id news.json id",
        nargs="*",
        metavar="FILE KEY",
        required=True,
    )
    output: str = option_field(
        "", "output file for the list of duplicates", metavar="FILE", required=True
    )
    workers: int = option_field(1, "number of worker processes", minimum=1)
    resume: bool = option_field(
        False, "continue an interrupted run; the output equals that of an uninterrupted run"
    )
    near: NearOptions = option_group(
        NearOptions(near_duplicate_threshold=0.5),
        flags={
            "near_duplicate_threshold": "threshold",
            "num_perm": "num-seeds",
            "near_ngram_size": None,
            "near_ngram_unit": None,
        },
    )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Files with the keys of their ids."""
        return list(zip(self.inputs[::2], self.inputs[1::2], strict=True))

    def problems(self) -> Iterator[Problem]:
        if len(self.inputs) % 2:
            text = f"{option('inputs')} {' '.join(self.inputs)}: must be pairs of a file and a key"
            yield Problem("inputs-not-pairs", text=text)
        for file in self.inputs[::2]:
            spec = InputSpec(paths=(file,))
            yield from spec.problems()
            if os.path.realpath(self.output) in map(os.path.realpath, spec.local_files()):
                text = f"{option('output')} {self.output}: is also a file of {option('inputs')}"
                yield Problem("list-is-input", text=text)
            if self.resume:
                yield from spec.resume_problems()
        folder = os.path.dirname(self.output) or "."
        if not os.path.isdir(folder):
            text = f"{option('output')} {self.output}: there is no folder {folder}"
            yield Problem("list-folder-missing", text=text)

    def resume_settings(self) -> dict[str, Any]:
        """All that determines the list, which a resumed run must share."""
        settings: dict[str, Any] = {"inputs": [*self.inputs], **vars(self.near)}
        for file in self.inputs[::2]:
            settings |= InputSpec(paths=(file,)).describe_files()
        return settings | {"version of rensa": version("rensa")}


class SignedDocument(NamedTuple):
    """Id and signature of a document."""

    name: str
    key: bytes


@dataclass(frozen=True)
class SignatureWorker:
    """Computes signatures in a worker process."""

    near: MinHashSignature
    max_document_bytes: int

    def __call__(
        self, items: list[tuple[RawDocument, str]]
    ) -> list[SignedDocument | RejectedDocument]:
        """The signatures of documents, each of which comes with the key of its id."""
        return [self._sign(item, key) for item, key in items]

    def _sign(self, item: RawDocument, key: str) -> SignedDocument | RejectedDocument:
        texts = texts_of(item, TextFields((key, "text"), self.max_document_bytes))
        if isinstance(texts, RejectedDocument):
            return texts
        return SignedDocument(texts[0], self.near(Document(texts[1], None)).key)


def find_duplicates(options: DuplicateOptions) -> Counter[str]:
    """Write the list of duplicates.

    Returns:
        Counts of `documents`, `duplicates` and documents that are `rejected`.

    Raises:
        UserError: For inputs that cannot be read, or without documents.
    """
    signer = SignatureWorker(MinHashSignature(options.near), InputSpec.max_document_bytes)
    with (
        Workers(signer, options.workers) as workers,
        ResumableOutput(
            options.output, options.resume_settings(), {OUTPUT: "", KEPT: ""}, options.resume
        ) as work,
    ):
        search = _Search(options, work)
        if not work.finished:
            search.run(workers)
        work.publish({OUTPUT: options.output})
    return search.counts


class _Search:
    """The kept documents, and how far the search has come."""

    def __init__(self, options: DuplicateOptions, work: ResumableOutput) -> None:
        self._options = options
        self._work = work
        self._index = LshIndex(options.near)
        self._names: list[str] = []
        done = work.progress or {"pair": 0, "place": START, "counts": {}}
        self.counts: Counter[str] = Counter(done["counts"])
        self._pair = int(done["pair"])
        self._position = ReadPosition(*done["place"])
        self._ends: deque[tuple[int, ReadPosition]] = deque()
        if not work.finished and work.files[KEPT].committed:
            kept = read_records(work.folder / KEPT, work.files[KEPT].committed)
            for key, name in zip(kept, kept, strict=True):
                self._index.reload(key)
                self._names.append(name.decode())

    def run(self, workers: Workers[Any, Any]) -> None:
        committed = self.counts.total()
        for results in workers.map(self._chunks()):
            for result in results:
                self._add(result)
            self._pair, self._position = self._ends.popleft()
            if self.counts.total() - committed >= COMMIT_DOCUMENTS:
                committed = self.counts.total()
                self._work.commit(self._progress())
        if not self.counts["documents"]:
            self._work.discard()
            inputs = " ".join(self._options.inputs)
            text = f"{option('inputs')} {inputs}: no documents; {self.counts['rejected']} rejected"
            raise user_error("no-documents-to-compare", text=text)
        self._work.commit(self._progress(), finished=True)

    def _progress(self) -> dict[str, Any]:
        return {"pair": self._pair, "place": self._position, "counts": self.counts}

    def _chunks(self) -> Iterator[list[tuple[RawDocument, str]]]:
        """Documents with the key of their id, from the position on."""
        first, start = self._pair, self._position
        for number, (file, key) in enumerate(self._options.pairs[first:], first):
            reader = DocumentReader(
                InputSpec(paths=(file,)), (key, "text"), start if number == first else START
            )
            feed = ChunkedInput(reader, sys.maxsize)
            for chunk in feed.chunks():
                self._ends.append((number, feed.marks.popleft().place))
                yield [(item, key) for item in chunk]

    def _add(self, result: SignedDocument | RejectedDocument) -> None:
        """List a duplicate, or keep the document."""
        if isinstance(result, RejectedDocument):
            self.counts["rejected"] += 1
            warnings.warn(str(result), stacklevel=2)
            return
        self.counts["documents"] += 1
        found = self._index.most_similar(result.key)
        if found is None:
            self._index.reload(result.key)
            self._names.append(result.name)
            record = pack_record(result.key) + pack_record(result.name.encode())
            self._work.files[KEPT].write(record)
            return
        self.counts["duplicates"] += 1
        number, similarity = found
        line = {self._names[number]: [{result.name: round(similarity, 4)}]}
        self._work.files[OUTPUT].write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
