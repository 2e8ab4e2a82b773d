"""Find documents that are almost the same, with the flags of Megatron's find_duplicates.py.

Writes a JSON line {"kept id": [{"duplicate id": similarity}]} for each duplicate. The stage near of
clean.py drops them without that list.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ds.cleaning.duplicates import Near, NearJudge, NearOptions
from megatron_ds.cleaning.journey import Document
from megatron_ds.data.documents import Bad, Wanted, texts_of
from megatron_ds.data.sources import Inputs, Item, Reader
from megatron_ds.data.workers import Workers

CHUNK = 64
REFUSED = {
    "load_fingerprints": "pickled files are not read; give all files with --inputs",
    "save_fingerprints": "is not written; give all files with --inputs",
}
WITHOUT_EFFECT = {
    "num_bands": "follows from --threshold and --num-seeds",
    "heuristic_iter": "every candidate is compared",
    "jaccard_parallel": "--workers says how many processes work",
}


class Found(NamedTuple):
    """A document: what it is called, and its signature."""

    name: str
    key: bytes


@dataclass(frozen=True)
class Signing:
    """What a worker does: items with the key of their name to documents."""

    near: Near
    max_document_bytes: int

    def __call__(self, items: list[tuple[Item, str]]) -> list[Found | Bad]:
        return [self._signed(item, key) for item, key in items]

    def _signed(self, item: Item, key: str) -> Found | Bad:
        texts = texts_of(item, Wanted((key, "text"), self.max_document_bytes))
        if isinstance(texts, Bad):
            return texts
        return Found(texts[0], self.near(Document(texts[1], None)).key)


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
        for problem in Inputs(paths=(file,)).problems():
            yield problem.replace("--input", "--inputs")
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


def items_of(pairs: Sequence[str]) -> Iterator[list[tuple[Item, str]]]:
    chunk: list[tuple[Item, str]] = []
    for file, key in zip(pairs[::2], pairs[1::2], strict=True):
        for item in Reader(Inputs(paths=(file,)), (key, "text")):
            chunk.append((item, key))
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def find(args: argparse.Namespace, counts: Counter[str]) -> Iterator[str]:
    """The lines of the list; counts documents, duplicates and what gives no document."""
    options = NearOptions(threshold=args.threshold, num_perm=args.num_seeds, seed=args.seed)
    judge = NearJudge(options)
    kept: list[str] = []
    signing = Signing(Near(options), Inputs.max_document_bytes)
    with Workers(signing, args.workers) as workers:
        for answers in workers.map(items_of(args.inputs)):
            for answer in answers:
                if isinstance(answer, Bad):
                    counts["no document"] += 1
                    print(f"WARNING: {answer}", file=sys.stderr)
                    continue
                counts["documents"] += 1
                found = judge.most_similar(answer.key)
                if found is None:
                    judge.restore(answer.key)
                    kept.append(answer.name)
                    continue
                counts["duplicates"] += 1
                number, similarity = found
                line = {kept[number]: [{answer.name: round(similarity, 4)}]}
                yield json.dumps(line, ensure_ascii=False) + "\n"


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    output = Path(args.output)
    partial = output.with_name(output.name + ".partial")
    counts: Counter[str] = Counter()
    try:
        wrong = list(problems(args))
        if wrong:
            raise ValueError("\n".join(wrong))
        with partial.open("w", encoding="utf-8") as out:
            out.writelines(find(args, counts))
        os.replace(partial, output)
    except (ValueError, OSError) as error:
        partial.unlink(missing_ok=True)
        print(f"find_duplicates.py: error:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        partial.unlink(missing_ok=True)
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{counts['duplicates']:,} of {counts['documents']:,} documents are duplicates")
    if counts["no document"]:
        print(f"{counts['no document']:,} lines gave no document")
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
