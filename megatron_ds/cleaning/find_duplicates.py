"""Lists near duplicates: a JSON line {"kept id": [{"duplicate id": similarity}]} for each.

The stage `near` drops them instead. Knows no command line.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megatron_ds.cleaning.deduplication import LshIndex, MinHashSignature, NearOptions
from megatron_ds.cleaning.options import RESUME
from megatron_ds.cleaning.pipeline import OUTPUT, chunks
from megatron_ds.cleaning.stages import Document
from megatron_ds.config.checks import folder_problems, replaced_file_problems
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import PROBLEMS_SHOWN, Problem, counted, user_error
from megatron_ds.fileio.resumable import ResumableOutput, pack_record, read_records
from megatron_ds.preprocess.documents.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.documents.formats import RawDocument
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.parsing import RejectedDocument, TextFields, texts_of
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

    inputs: tuple[str, ...] = option_field((), nargs="*", metavar="FILE KEY", required=True)
    """Files, each followed by the key of the documents' ids: cc.json cc_id news.json id."""
    output: str = option_field("", metavar="FILE", required=True)
    """Output file for the list of duplicates."""
    workers: int = option_field(1, minimum=1)
    """Number of worker processes."""
    resume: bool = option_field(False, help=RESUME)
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
            yield Problem("inputs-not-pairs", settings=self)
        for file in self.inputs[::2]:
            spec = InputSpec(paths=(file,))
            yield from spec.problems()
            if os.path.realpath(self.output) in map(os.path.realpath, spec.local_files()):
                yield Problem("list-is-input", settings=self)
            if self.resume:
                yield from spec.resume_problems()
        yield from folder_problems("output", os.path.dirname(self.output) or ".")
        yield from replaced_file_problems("output", self.output)

    def run(self) -> None:
        """Lists the duplicates, and prints the results."""
        counts = find_duplicates(self)
        print(f"{counts['duplicates']:,} of {counts['documents']:,} documents are duplicates")
        if counts["rejected"]:
            print(f"rejected: {counted(counts['rejected'], 'line', ',')}")
        print(f"wrote {self.output}")


class SignedDocument(NamedTuple):
    """Id and signature of a document."""

    name: str
    key: bytes


class Position(NamedTuple):
    """Number of a pair of a file and a key, and the position in the file."""

    pair: int = 0
    place: ReadPosition = START


Chunk = tuple[list[RawDocument], str, Position]
"""Documents, the key of their ids, and the position after them."""
Signed = tuple[list[SignedDocument | RejectedDocument], Position]


@dataclass(frozen=True)
class SignatureWorker:
    """Computes signatures in a worker process."""

    near: MinHashSignature

    def __call__(self, chunk: Chunk) -> Signed:
        items, key, end = chunk
        return [self._sign(item, key) for item in items], end

    def _sign(self, item: RawDocument, key: str) -> SignedDocument | RejectedDocument:
        wanted = TextFields((key, "text"), InputSpec.max_document_bytes, id_keys=(key,))
        texts = texts_of(item, wanted)
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
    near = MinHashSignature(options.near)
    settings = {"inputs": options.inputs, **near.settings}
    for file, _ in options.pairs:
        settings |= InputSpec(paths=(file,)).describe_files()
    with (
        Workers(SignatureWorker(near), options.workers) as workers,
        ResumableOutput(options.output, settings, {OUTPUT: "", KEPT: ""}, options.resume) as work,
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
        self._position = Position(done["pair"], ReadPosition(*done["place"]))

    def run(self, workers: Workers[Chunk, Signed]) -> None:
        """Compare the documents from the position on, and finish the list."""
        kept = read_records(self._work.folder / KEPT, self._work.files[KEPT].committed)
        for key, name in zip(kept, kept, strict=True):
            self._index.reload(key)
            self._names.append(name.decode())
        committed = self.counts.total()
        for results, end in workers.map(self._chunks()):
            for result in results:
                self._add(result)
            self._position = end
            if self.counts.total() - committed >= COMMIT_DOCUMENTS:
                committed = self.counts.total()
                self._commit()
        if not self.counts["documents"]:
            self._work.discard()
            rejected = self.counts["rejected"]
            raise user_error("no-documents-to-compare", settings=self._options, rejected=rejected)
        self._commit(finished=True)

    def _commit(self, finished: bool = False) -> None:
        self._work.commit({**self._position._asdict(), "counts": self.counts}, finished)

    def _chunks(self) -> Iterator[Chunk]:
        """Documents from the position on."""
        first, start = self._position
        for index, (file, key) in enumerate(self._options.pairs[first:], first):
            after = start if index == first else START
            reader = DocumentReader(InputSpec(paths=(file,)), (key, "text"), after)
            for items, end in chunks(reader, sys.maxsize):
                yield items, key, Position(index, end.position)

    def _add(self, result: SignedDocument | RejectedDocument) -> None:
        """List a duplicate, or keep the document."""
        if isinstance(result, RejectedDocument):
            self.counts["rejected"] += 1
            if self.counts["rejected"] <= PROBLEMS_SHOWN:
                warnings.warn(str(result), stacklevel=2)
            return
        self.counts["documents"] += 1
        similar = self._index.most_similar(result.key)
        if similar is None:
            self._index.reload(result.key)
            self._names.append(result.name)
            record = pack_record(result.key) + pack_record(result.name.encode())
            self._work.files[KEPT].write(record)
            return
        self.counts["duplicates"] += 1
        index, similarity = similar
        line = {self._names[index]: [{result.name: round(similarity, 4)}]}
        self._work.files[OUTPUT].write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
