"""Find documents that are almost the same, with the flags of Megatron's find_duplicates.py.

Writes a JSON line {"kept id": [{"duplicate id": similarity}]} for each duplicate. The stage near of
clean.py drops them without that list.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ds.cleaning.deduplication import LshIndex, MinHashSignature, NearOptions
from megatron_ds.cleaning.options import file_stamps
from megatron_ds.cleaning.pipeline import OUTPUT, ChunkedInput
from megatron_ds.cleaning.stages import Document
from megatron_ds.fileio.resumable import ResumableOutput, pack_record, read_records
from megatron_ds.preprocess.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.formats import RawDocument
from megatron_ds.preprocess.inputs import InputSpec
from megatron_ds.preprocess.parsing import RejectedDocument, TextFields, texts_of
from megatron_ds.preprocess.worker_pool import Workers
from tools.openwebtext import clean

KEPT = "kept"
"""The file with signature and name of what is no duplicate, in the folder of the work."""
PART = 10_000
"""Documents between two records of how far the work came."""
REFUSED = {
    "load_fingerprints": "pickled files are not read; give all files with --inputs",
    "save_fingerprints": "is not written; give all files with --inputs",
}
WITHOUT_EFFECT = {
    "num_bands": "follows from --threshold and --num-seeds",
    "heuristic_iter": "every candidate is compared",
    "jaccard_parallel": "--workers says how many processes work",
}


class SignedDocument(NamedTuple):
    """A document: what it is called, and its signature."""

    name: str
    key: bytes


@dataclass(frozen=True)
class SignatureWorker:
    """What a worker does: items with the key of their name to documents."""

    near: MinHashSignature
    max_document_bytes: int

    def __call__(
        self, items: list[tuple[RawDocument, str]]
    ) -> list[SignedDocument | RejectedDocument]:
        return [self._signed(item, key) for item, key in items]

    def _signed(self, item: RawDocument, key: str) -> SignedDocument | RejectedDocument:
        texts = texts_of(item, TextFields((key, "text"), self.max_document_bytes))
        if isinstance(texts, RejectedDocument):
            return texts
        return SignedDocument(texts[0], self.near(Document(texts[1], None)).key)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--inputs",
        nargs="+",
        required=True,
        metavar="FILE KEY",
        help="files, and for each the key of what documents are called: cc.json cc_id news.json id",
    )
    parser.add_argument("--output", required=True, help="the list of duplicates")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        help="Jaccard similarity of what counts as almost the same (default: %(default)s)",
    )
    parser.add_argument(
        "--num-seeds", type=int, default=128, help="values of a signature (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=NearOptions.seed)
    parser.add_argument("--workers", type=int, default=1, help="processes that work")
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that was interrupted"
    )
    parser.add_argument("--jaccard", default="union", choices=["union"], help="always union")
    elsewhere = parser.add_argument_group("taken from Megatron, without effect")
    elsewhere.add_argument("--num-bands", type=int)
    elsewhere.add_argument("--heuristic-iter", type=int)
    elsewhere.add_argument("--jaccard-parallel", action="store_true", default=None)
    for name in REFUSED:
        parser.add_argument("--" + name.replace("_", "-"), nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, why in REFUSED.items():
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: {why}")
    for name, why in WITHOUT_EFFECT.items():
        if getattr(args, name) is not None:
            print(f"WARNING: --{name.replace('_', '-')}: has no effect: {why}", file=sys.stderr)
    return args


def problems(args: argparse.Namespace) -> Iterator[str]:
    if len(args.inputs) % 2:
        yield f"--inputs {' '.join(args.inputs)}: must be pairs of a file and a key"
    for file in args.inputs[::2]:
        inputs = InputSpec(paths=(file,))
        for problem in inputs.problems():
            yield problem.replace("--paths", "--inputs")
        if os.path.realpath(args.output) in map(os.path.realpath, inputs.local_files()):
            yield f"--output {args.output}: is a file of --inputs, too"
        if args.resume and inputs.unseekable_paths():
            yield f"--resume: --inputs {file} cannot be read a second time"
    if not 0 < args.threshold <= 1:
        yield f"--threshold {args.threshold}: must be above 0, and 1 at most"
    if not 16 <= args.num_seeds <= 4096:
        yield f"--num-seeds {args.num_seeds}: must be 16 to 4096"
    if args.seed < 0:
        yield f"--seed {args.seed}: must not be negative"
    if args.workers < 1:
        yield f"--workers {args.workers}: must be at least 1"
    folder = os.path.dirname(args.output) or "."
    if not os.path.isdir(folder):
        yield f"--output {args.output}: there is no folder {folder}"


def chunks_of(
    pairs: Sequence[str], done: int, after: ReadPosition, ends: deque[tuple[int, ReadPosition]]
) -> Iterator[list[tuple[RawDocument, str]]]:
    """Items with the key of their name, from a place in the pair number `done` on. ends: takes
    where each chunk ends."""
    named = list(zip(pairs[::2], pairs[1::2], strict=True))
    for number, (file, key) in enumerate(named[done:], done):
        place = after if number == done else START
        feed = ChunkedInput(
            DocumentReader(InputSpec(paths=(file,)), (key, "text"), place), sys.maxsize
        )
        for chunk in feed.chunks():
            ends.append((number, feed.marks.popleft().place))
            yield [(item, key) for item in chunk]


def find(args: argparse.Namespace) -> Counter[str]:
    """Writes the list; counts documents, duplicates and what gives no document."""
    options = NearOptions(threshold=args.threshold, num_perm=args.num_seeds, seed=args.seed)
    signing = SignatureWorker(MinHashSignature(options), InputSpec.max_document_bytes)
    judge = LshIndex(options)
    names: list[str] = []
    settings: dict[str, Any] = {
        "--inputs": args.inputs,
        "--threshold": args.threshold,
        "--num-seeds": args.num_seeds,
        "--seed": args.seed,
        "version of rensa": version("rensa"),
    }
    for file in args.inputs[::2]:
        settings |= file_stamps(InputSpec(paths=(file,)))
    with (
        Workers(signing, args.workers) as workers,
        ResumableOutput(args.output, settings, {OUTPUT: "", KEPT: ""}, args.resume) as work,
    ):
        done = work.progress or {"pair": 0, "place": START, "counts": {}}
        counts = Counter(done["counts"])
        if work.finished:
            work.publish({OUTPUT: args.output})
            return counts
        if work.files[KEPT].committed:
            kept = read_records(work.folder / KEPT, work.files[KEPT].committed)
            for key, name in zip(kept, kept, strict=True):
                judge.reload(key)
                names.append(name.decode())
        ends: deque[tuple[int, ReadPosition]] = deque()
        recorded = counts.total()
        pair, place = done["pair"], ReadPosition(*done["place"])

        def progress() -> dict[str, Any]:
            return {"pair": pair, "place": place, "counts": counts}

        for answers in workers.map(chunks_of(args.inputs, pair, place, ends)):
            for answer in answers:
                take(answer, judge, names, work, counts)
            pair, place = ends.popleft()
            if counts.total() - recorded >= PART:
                recorded = counts.total()
                work.commit(progress())
        if not counts["documents"]:
            work.discard()
            named = " ".join(args.inputs)
            bad = counts["no document"]
            raise ValueError(f"--inputs {named}: has no documents: {bad} lines gave none")
        work.commit(progress(), finished=True)
        work.publish({OUTPUT: args.output})
    return counts


def take(
    answer: SignedDocument | RejectedDocument,
    judge: LshIndex,
    names: list[str],
    work: ResumableOutput,
    counts: Counter[str],
) -> None:
    """Writes a duplicate to the list, and keeps what is none. names: of what was kept."""
    if isinstance(answer, RejectedDocument):
        counts["no document"] += 1
        print(f"WARNING: {answer}", file=sys.stderr)
        return
    counts["documents"] += 1
    found = judge.most_similar(answer.key)
    if found is None:
        judge.reload(answer.key)
        names.append(answer.name)
        work.files[KEPT].write(pack_record(answer.key) + pack_record(answer.name.encode()))
        return
    counts["duplicates"] += 1
    number, similarity = found
    line = {names[number]: [{answer.name: round(similarity, 4)}]}
    work.files[OUTPUT].write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        wrong = list(problems(args))
        if wrong:
            raise ValueError("\n".join(wrong))
        counts = find(args)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        return clean.exit_code_for(error, "find_duplicates.py", args.output)
    print(f"{counts['duplicates']:,} of {counts['documents']:,} documents are duplicates")
    if counts["no document"]:
        print(f"{counts['no document']:,} lines gave no document")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
