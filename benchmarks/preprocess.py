"""tools/preprocess_data.py against plain batch encoding with `tokenizers`, as a ratio in one run.

    python benchmarks/preprocess.py [--rounds 3] [--output preprocess.json]

The floor is the shortest program for the job: read, json.loads, encode_batch on as many threads as
the tool has workers, write the tokens as raw uint16. All run as whole processes, start-up included,
in turn; each round gives one ratio (tool seconds / floor seconds, so less is better) and the median
over the rounds is stated. The input is taken once, 4 times and 16 times, its lines shuffled: once
is text that no cache has seen, and the difference of the others is the steady state.

The input: OpenWebText and GPT-2's vocabulary from ../shared/data where that folder is, else what
the flags name, else Python's standard library and a vocabulary trained on it.
"""

from __future__ import annotations

import argparse
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

REPOSITORY = Path(__file__).resolve().parents[1]
COPIES = {"once": 1, "middle": 4, "large": 16}
FLOOR, TOOL = "floor large", "tool large"
TARGETS = {"ratio": 0.2, "steady": 60.0}
"""At most so much of the floor's time; at least so many MB/s."""
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
    """A whole process and its children. stages: its own line on what the time went to."""

    wall: float
    cpu: float
    stages: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--input", help="jsonl with key text")
    parser.add_argument("--vocab-file", help="vocab.json")
    parser.add_argument("--merge-file", help="merges.txt")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        result = measure(args, Path(name))
    print(report(result))
    if args.output is not None:
        write_json(args.output, result)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    machine = asdict(this_machine())
    source, vocab, merges = chosen_input(args, folder)
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
        "rounds": [{name: asdict(run) for name, run in one.items()} for one in rounds],
        **figures(rounds, text_bytes),
    }


def figures(rounds: Sequence[Mapping[str, Run]], text_bytes: int) -> dict[str, Any]:
    """Medians over the rounds. text_bytes: of the input taken once. The steady state is None where
    the machine was too busy for the larger input to take longer.
    """
    seconds = {name: statistics.median(one[name].wall for one in rounds) for name in rounds[0]}
    grown = (COPIES["large"] - COPIES["middle"]) * text_bytes / 1e6
    longer = seconds[TOOL] - seconds["tool middle"]
    stages = [one["tool once"].stages for one in rounds]
    encoding = [found for line in stages if (found := ENCODING.search(line))]
    cold = [text_bytes / 1e6 / max(float(found["seconds"]), 0.005) for found in encoding]
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "ratio": round(statistics.median(one[TOOL].wall / one[FLOOR].wall for one in rounds), 3),
        "ratio_cpu": round(statistics.median(one[TOOL].cpu / one[FLOOR].cpu for one in rounds), 3),
        "steady_MB_s": round(grown / longer, 1) if longer > 0 else None,
        "once_MB_s": round(text_bytes / 1e6 / seconds["tool once"], 1),
        "once_encoding_MB_s_per_worker": round(statistics.median(cold), 1),
        "library": encoding[0]["library"],
        "targets": TARGETS,
    }


def report(result: Mapping[str, Any]) -> str:
    """The figures against their targets, as lines for people."""
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
            f"{TARGETS['steady']:.0f}); a worker encodes text for the first time at "
            f"{result['once_encoding_MB_s_per_worker']} MB/s by {result['library']}",
            f"{TOOL}, {last}",
            f"{result['machine']['cpu']}, {result['machine']['cores']} cores, load before "
            f"{result['machine']['load']}",
        ]
    )


def all_commands(folder: Path, vocab: str, merges: str, workers: int) -> dict[str, list[str]]:
    tokenizer, floor = str(folder / "tokenizer.json"), str(folder / "floor.bin")
    commands = {
        FLOOR: [
            *("env", f"RAYON_NUM_THREADS={workers}", sys.executable, "-c", FLOOR_CODE),
            *(tokenizer, str(folder / "large.jsonl"), floor),
        ]
    }
    for name in reversed(COPIES):
        commands[f"tool {name}"] = [
            *("env", f"PYTHONPATH={REPOSITORY}", sys.executable),
            *(str(REPOSITORY / "tools" / "preprocess_data.py"), "--append-eod"),
            *("--input", str(folder / f"{name}.jsonl"), "--output-prefix", str(folder / name)),
            *("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab),
            *("--merge-file", merges, "--workers", str(workers)),
        ]
    return commands


def timed(command: list[str]) -> Run:
    """Wall and CPU seconds of a whole process and its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    stages = [line for line in done.stdout.splitlines() if line.startswith("time: ")]
    return Run(round(wall, 3), round(cpu, 3), "".join(stages))


def check_equal(folder: Path) -> None:
    """A faster program that writes something else proves nothing."""
    if (folder / "floor.bin").read_bytes() != (folder / "large_text_document.bin").read_bytes():
        raise ValueError("the floor and the tool wrote different tokens")


def write_shuffled(lines: list[bytes], copies: int, path: Path) -> None:
    """Copies of lines in an order that is the same every time; once, their own."""
    repeated = lines * copies
    if copies > 1:
        random.Random(0).shuffle(repeated)
    with open(path, "wb") as file:
        file.writelines(repeated)


def chosen_input(args: argparse.Namespace, folder: Path) -> tuple[Path, str, str]:
    """Text, vocabulary and merges."""
    shared = REPOSITORY.parent / "shared" / "data"
    beside = shared.is_dir() and not (args.input or args.vocab_file or args.merge_file)
    if beside:
        names = ("openwebtext-1000.jsonl", "gpt2-vocab.json", "gpt2-merges.txt")
        text, vocab, merges = (shared / name for name in names)
        return text, str(vocab), str(merges)
    source = Path(args.input) if args.input else library_corpus(folder / "library.jsonl")
    if args.vocab_file and args.merge_file:
        return source, args.vocab_file, args.merge_file
    return source, *train_tokenizer(source, folder)


def library_corpus(path: Path) -> Path:
    """The sources of Python's standard library, a document per file."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if "site-packages" not in f.parts)
    with open(path, "w", encoding="utf-8") as out:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                out.write(json.dumps({"text": text}) + "\n")
    return path


def train_tokenizer(corpus: Path, folder: Path) -> tuple[str, str]:
    """vocab.json and merges.txt of a byte-level BPE of the corpus."""
    from tokenizers import ByteLevelBPETokenizer

    with open(corpus, "rb") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(2000), lines, strict=False)]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trained.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def save_as_json(vocab: str, merges: str, path: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path))


if __name__ == "__main__":
    sys.exit(main())
