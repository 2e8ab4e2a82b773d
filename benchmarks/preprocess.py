"""Benchmark of tools/preprocess_data.py against plain batch encoding with `tokenizers`.

    python benchmarks/preprocess.py [--rounds 3] [--output preprocess.json]

The baseline ("floor") is a minimal program: read, json.loads, encode_batch with as many threads as
the tool has workers, and write the tokens as raw uint16. Both run in turn as complete processes,
including start-up. Each round gives a ratio (tool seconds / floor seconds; lower is better); the
result is the median. The input is repeated 1, 4 and 16 times with shuffled lines: a single copy
measures text that is in no cache, the difference between 4 and 16 copies the steady state.

The input is given by flags; by default it is OpenWebText with GPT-2's vocabulary from
../shared/data if that folder exists, else Python's standard library with a vocabulary trained on
it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from megatron_ds.demo import corpus
from megatron_ds.tokenizer.train import train_bpe

REPOSITORY = Path(__file__).resolve().parents[1]
COPIES = {"once": 1, "middle": 4, "large": 16}
FLOOR = "floor large"
TOOL = "tool large"
TARGETS = {"ratio": 0.2, "steady": 60.0}
"""Maximum ratio to the floor's time; minimum MB/s in the steady state."""
FLOOR_CODE = """
import json, sys
import numpy as np
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
eod = tokenizer.token_to_id("<|endoftext|>")
with open(sys.argv[2], "rb") as lines, open(sys.argv[3], "wb") as out:
    while texts := [json.loads(line)["text"] for _, line in zip(range(1000), lines)]:
        for encoding in tokenizer.encode_batch(texts):
            out.write(np.array(encoding.ids + [eod], dtype=np.uint16).tobytes())
"""
ENCODING = re.compile(r"encoding by (?P<library>\S+) (?P<seconds>[\d.]+) s")


@dataclass(frozen=True)
class Run:
    """Seconds of a process and its children, and the line of stage times that it printed."""

    wall: float
    cpu: float
    stages: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--input", help="JSON lines file with the key text")
    parser.add_argument("--vocab-file", help="vocab.json")
    parser.add_argument("--merge-file", help="merges.txt")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        result = measure(args, Path(name))
    print(report(result))
    if args.output is not None:
        write_json(args.output, result)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    machine = asdict(this_machine())
    source, vocab, merges = find_input(args, folder)
    lines = source.read_bytes().splitlines(keepends=True)
    for name, copies in COPIES.items():
        write_shuffled(lines, copies, folder / f"{name}.jsonl")
    save_as_json(vocab, merges, folder / "tokenizer.json")
    commands = all_commands(folder, vocab, merges, args.workers)
    rounds = [
        {name: timed(command) for name, command in commands.items()} for _ in range(args.rounds)
    ]
    check_equal(folder)
    text_bytes = sum(len(json.loads(line)["text"].encode()) for line in lines)
    return {
        "machine": machine,
        "versions": versions(["fastokens", "numpy", "orjson", "tokenizers"]),
        "workers": args.workers,
        "text_bytes": {name: text_bytes * copies for name, copies in COPIES.items()},
        "tokens": (folder / "floor.bin").stat().st_size // 2,
        "rounds": [{name: asdict(run) for name, run in runs.items()} for runs in rounds],
        **figures(rounds, text_bytes),
    }


def figures(rounds: Sequence[Mapping[str, Run]], text_bytes: int) -> dict[str, Any]:
    """Return medians over the rounds.

    Args:
        rounds: By round, the run of each command.
        text_bytes: Size of one copy of the input.

    Returns:
        The figures. The steady state is None if the larger input was not slower, on a busy machine.
    """
    seconds = {name: statistics.median(runs[name].wall for runs in rounds) for name in rounds[0]}
    grown = (COPIES["large"] - COPIES["middle"]) * text_bytes / 1e6
    longer = seconds[TOOL] - seconds["tool middle"]
    stages = [runs["tool once"].stages for runs in rounds]
    encoding = [match for line in stages if (match := ENCODING.search(line))]
    cold = [text_bytes / 1e6 / max(float(match["seconds"]), 0.005) for match in encoding]
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "ratio": round(statistics.median(runs[TOOL].wall / runs[FLOOR].wall for runs in rounds), 3),
        "ratio_cpu": round(
            statistics.median(runs[TOOL].cpu / runs[FLOOR].cpu for runs in rounds), 3
        ),
        "steady_MB_s": round(grown / longer, 1) if longer > 0 else None,
        "once_MB_s": round(text_bytes / 1e6 / seconds["tool once"], 1),
        "once_encoding_MB_s_per_worker": round(statistics.median(cold), 1),
        "library": encoding[0]["library"],
        "targets": TARGETS,
    }


def report(result: Mapping[str, Any]) -> str:
    """Format the figures with their targets."""
    sizes = {name: size / 1e6 for name, size in result["text_bytes"].items()}
    lines = [f"{'':16}{'MB of text':>12}{'s':>8}{'MB/s':>8}"]
    for name, seconds in result["seconds"].items():
        size = sizes[name.split()[1]]
        lines.append(f"{name:16}{size:12.1f}{seconds:8.2f}{size / seconds:8.1f}")
    last = result["rounds"][-1][TOOL]["stages"]
    return "\n".join(
        [
            *lines,
            f"ratio {result['ratio']} (CPU time {result['ratio_cpu']}; target at most "
            f"{TARGETS['ratio']}), steady {result['steady_MB_s']} MB/s (target at least "
            f"{TARGETS['steady']:.0f}); each worker encodes new text at "
            f"{result['once_encoding_MB_s_per_worker']} MB/s with {result['library']}",
            f"{TOOL}, {last}",
            f"{result['machine']['cpu']}, {result['machine']['cores']} cores, load before "
            f"{result['machine']['load']}",
        ]
    )


def all_commands(folder: Path, vocab: str, merges: str, workers: int) -> dict[str, list[str]]:
    tokenizer = str(folder / "tokenizer.json")
    floor = str(folder / "floor.bin")
    commands = {
        FLOOR: [
            "env",
            f"RAYON_NUM_THREADS={workers}",
            sys.executable,
            "-c",
            FLOOR_CODE,
            tokenizer,
            str(folder / "large.jsonl"),
            floor,
        ]
    }
    for name in reversed(COPIES):
        commands[f"tool {name}"] = [
            "env",
            f"PYTHONPATH={REPOSITORY}",
            sys.executable,
            str(REPOSITORY / "tools" / "preprocess_data.py"),
            "--append-eod",
            "--overwrite",
            "--input",
            str(folder / f"{name}.jsonl"),
            "--output-prefix",
            str(folder / name),
            "--tokenizer-type",
            "GPT2BPETokenizer",
            "--vocab-file",
            vocab,
            "--merge-file",
            merges,
            "--workers",
            str(workers),
        ]
    return commands


def timed(command: list[str]) -> Run:
    """Run a command; measure wall and CPU seconds of its process and children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    stages = [line for line in completed.stdout.splitlines() if line.startswith("time: ")]
    return Run(round(wall, 3), round(cpu, 3), "".join(stages))


def check_equal(folder: Path) -> None:
    """Check that both programs wrote the same tokens."""
    if (folder / "floor.bin").read_bytes() != (folder / "large_text_document.bin").read_bytes():
        raise ValueError("the floor and the tool wrote different tokens")


def write_shuffled(lines: list[bytes], copies: int, path: Path) -> None:
    """Write copies of the lines in a fixed random order; a single copy keeps its order."""
    repeated = lines * copies
    if copies > 1:
        random.Random(0).shuffle(repeated)
    with open(path, "wb") as file:
        file.writelines(repeated)


def find_input(args: argparse.Namespace, folder: Path) -> tuple[Path, str, str]:
    """Return the paths of text, vocabulary and merges."""
    shared = REPOSITORY.parent / "shared" / "data"
    if shared.is_dir() and not (args.input or args.vocab_file or args.merge_file):
        names = ("openwebtext-1000.jsonl", "gpt2-vocab.json", "gpt2-merges.txt")
        text, vocab, merges = (shared / name for name in names)
        return text, str(vocab), str(merges)
    source = Path(args.input) if args.input else library_corpus(folder / "library.jsonl")
    if args.vocab_file and args.merge_file:
        return source, args.vocab_file, args.merge_file
    return source, *train_tokenizer(source, folder)


def library_corpus(path: Path) -> Path:
    """Write the sources of Python's standard library, one document per file."""
    with open(path, "w", encoding="utf-8") as out:
        for text in corpus.sources(Path(sysconfig.get_path("stdlib"))):
            out.write(json.dumps({"text": text}) + "\n")
    return path


def train_tokenizer(corpus: Path, folder: Path) -> tuple[str, str]:
    """Train a byte-level BPE; return the paths of vocab.json and merges.txt."""
    with open(corpus, "rb") as lines:
        texts = [json.loads(line)["text"] for line in itertools.islice(lines, 2000)]
    train_bpe(texts, 8000, folder)
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def save_as_json(vocab: str, merges: str, path: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path))


if __name__ == "__main__":
    sys.exit(main())
