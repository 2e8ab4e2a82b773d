"""Speed of the libraries that encode byte-level BPE, on text that they have not seen.

    python benchmarks/encoders.py [--rounds 9] [--input TEXT.jsonl] [--output encoders.json]

Each library encodes on one thread in a process of its own, with a new tokenizer in each round, in
the chunks of tools/preprocess_data.py; who is first alternates. Figures are MB of text per CPU
second, so that other load on the machine counts little. Libraries that are not installed are left
out. All must give the same ids. Parsing the lines and writing the ids are measured in the same
rounds.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Contender, Work, this_machine, versions, write_json
from benchmarks.preprocess import find_input, save_as_json
from megatron_ds.preprocess.pipeline import CHUNK_BYTES

REFERENCE = "fastokens"
PARSING = "parsing lines"
WRITING = "writing ids"
Encode = Callable[[list[str]], Any]


@dataclass(frozen=True)
class Round:
    """CPU seconds of a library."""

    start: float
    """Reading the vocabulary."""
    encoding: float
    digest: str
    """SHA-256 of all ids as 32-bit numbers."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--input", help="JSON lines file with the key text")
    parser.add_argument("--vocab-file", help="vocab.json")
    parser.add_argument("--merge-file", help="merges.txt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    args = parser.parse_args(argv)
    names = [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    os.environ["RAYON_NUM_THREADS"] = "1"
    machine = asdict(this_machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, vocab, merges = find_input(args, folder)
        save_as_json(vocab, merges, folder / "tokenizer.json")
        result = measure(names, source, folder, args.rounds)
    print(report(result))
    if args.output is not None:
        about = {"machine": machine, "versions": versions([*names, "numpy", "orjson"])}
        write_json(args.output, {**about, **result})
    return 0


def measure(names: Sequence[str], source: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """CPU seconds of each library and round, and of parsing and writing.

    Raises:
        ValueError: If libraries give different ids.
    """
    paths = str(source), str(folder)
    works = {name: functools.partial(_build_encoder, name) for name in names}
    contenders = {name: Contender(name, work, *paths) for name, work in works.items()}
    contenders["other"] = Contender("other", _build_others, *paths)
    kept: dict[str, list[Any]] = {name: [] for name in contenders}
    try:
        for contender in contenders.values():
            contender.run(1)  # imports, and touches the memory
        for number in range(rounds):
            order = list(contenders)
            for name in reversed(order) if number % 2 else order:
                kept[name].append(contenders[name].run(1))
    finally:
        for contender in contenders.values():
            contender.close()
    others = kept.pop("other")
    if len({one.digest for reports in kept.values() for one in reports}) > 1:
        raise ValueError("the libraries give different ids")
    with open(source, "rb") as lines:
        size = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
    return {
        "MB": size,
        "libraries": {name: [asdict(one) for one in reports] for name, reports in kept.items()},
        PARSING: [one[0] for one in others],
        WRITING: [one[1] for one in others],
        "ratios": {
            name: statistics.median(
                base.encoding / one.encoding
                for base, one in zip(kept[REFERENCE], reports, strict=True)
            )
            for name, reports in kept.items()
        },
    }


def report(result: dict[str, Any]) -> str:
    """The table."""
    size = result["MB"]
    lines = [f"{size:.1f} MB of text, seen once", f"{'':16}{'MB/CPU s':>10}{'best':>8}{'ratio':>8}"]
    for name, rounds in result["libraries"].items():
        seconds = [one["encoding"] for one in rounds]
        start = statistics.median(one["start"] for one in rounds)
        line = f"{name:16}{size / statistics.median(seconds):10.1f}{size / min(seconds):8.1f}"
        lines.append(f"{line}{result['ratios'][name]:8.2f}  start {start:.2f} s")
    for name in (PARSING, WRITING):
        seconds = result[name]
        line = f"{name:16}{size / statistics.median(seconds):10.1f}{size / min(seconds):8.1f}"
        lines.append(line)
    return "\n".join(lines)


def _chunks(source: str) -> list[list[bytes]]:
    """The lines of a file, in the chunks of preprocessing."""
    chunks: list[list[bytes]] = [[]]
    size = 0
    with open(source, "rb") as lines:
        for line in lines:
            if size >= CHUNK_BYTES:
                chunks.append([])
                size = 0
            chunks[-1].append(line)
            size += len(line)
    return chunks


def _build_encoder(name: str, source: str, folder: str) -> Work:
    vocabulary = Path(folder, "tokenizer.json").read_text(encoding="utf-8")
    chunks = [[json.loads(line)["text"] for line in lines] for lines in _chunks(source)]
    load = LIBRARIES[name]

    def work(count: int) -> Round:
        begin = time.process_time()
        encode = load(vocabulary)
        start = time.process_time()
        ids = [encode(chunk) for chunk in chunks]
        end = time.process_time()
        digest = hashlib.sha256()
        for part in ids:
            digest.update(part.astype("<u4").tobytes())
        return Round(start - begin, end - start, digest.hexdigest())

    return work


def _build_others(source: str, folder: str) -> Work:
    """Parsing of the lines by orjson, and writing of as many ids of 16 bits, a third of the
    bytes."""
    import numpy as np
    import orjson

    chunks = _chunks(source)
    sizes = [sum(map(len, chunk)) // 4 for chunk in chunks]

    def work(count: int) -> tuple[float, float]:
        begin = time.process_time()
        for chunk in chunks:
            for line in chunk:
                orjson.loads(line)["text"]
        parsed = time.process_time()
        with open(Path(folder, "ids"), "wb") as file:
            for size in sizes:
                file.write(np.zeros(size, np.uint32).astype(np.uint16).tobytes())
        return parsed - begin, time.process_time() - parsed

    return work


def _load_tokenizers(vocabulary: str) -> Encode:
    import numpy as np
    import tokenizers

    model = tokenizers.Tokenizer.from_str(vocabulary)
    return lambda texts: np.concatenate([one.ids for one in model.encode_batch(texts)])


def _load_fast(name: str, vocabulary: str) -> Encode:
    from megatron_ds.tokenizer.fast_backend import ENCODERS

    encode = ENCODERS[name](importlib.import_module(name), vocabulary)
    return lambda texts: encode(texts).ids


LIBRARIES: dict[str, Callable[[str], Encode]] = {
    "tokenizers": _load_tokenizers,
    "fastokens": functools.partial(_load_fast, "fastokens"),
    "gigatoken": functools.partial(_load_fast, "gigatoken"),
}


if __name__ == "__main__":
    sys.exit(main())
