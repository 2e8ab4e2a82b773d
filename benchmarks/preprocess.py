"""tools/preprocess_data.py against plain batch encoding with `tokenizers`, as a ratio in one run.

The floor is the shortest program for the job: read, json.loads, encode_batch on as many threads as
the tool has workers, write the tokens as raw uint16. A second floor uses encode_batch_fast, which
computes no offsets. All run as whole processes, start-up included, in turn; each round gives one
ratio (floor seconds / tool seconds, so more is better) and the median over the rounds is stated.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = 0.9
FLOOR = """
import json, sys
import numpy as np
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
encode = getattr(tokenizer, sys.argv[4])
eod = tokenizer.token_to_id("<|endoftext|>")
with open(sys.argv[2], "rb") as lines, open(sys.argv[3], "wb") as out:
    while texts := [json.loads(line)["text"] for _, line in zip(range(1000), lines)]:
        for encoding in encode(texts):
            out.write(np.array(encoding.ids + [eod], dtype=np.uint16).tobytes())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", help="jsonl with key text (default: the standard library)")
    parser.add_argument("--vocab-file", help="vocab.json (default: trained on the input)")
    parser.add_argument("--merge-file", help="merges.txt (default: trained on the input)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1, help="times the input is repeated")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(args, Path(name)), indent=2))
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source = Path(args.input) if args.input else library_corpus(folder / "library.jsonl")
    corpus = folder / "corpus.jsonl"
    with open(corpus, "wb") as file:
        for _ in range(args.copies):
            file.write(source.read_bytes())
    vocab, merges = args.vocab_file, args.merge_file
    if not (vocab and merges):
        vocab, merges = train_tokenizer(corpus, folder)
    commands = all_commands(folder, corpus, vocab, merges, args.workers)
    described = machine()
    rounds = [
        {name: timed(command) for name, command in commands.items()} for _ in range(args.rounds)
    ]
    check_equal(folder)
    return {
        "machine": described,
        "input": {
            "bytes": corpus.stat().st_size,
            "documents": sum(1 for _ in open(corpus, "rb")),
            "tokens": (folder / "floor.bin").stat().st_size // 2,
        },
        "workers": args.workers,
        "rounds": rounds,
        "ratio": ratio(rounds, "floor", "wall_s"),
        "ratio_cpu": ratio(rounds, "floor", "cpu_s"),
        "ratio_to_fast_floor": ratio(rounds, "floor_fast", "wall_s"),
        "target": TARGET,
    }


def ratio(rounds: list[dict[str, dict[str, float]]], floor: str, unit: str) -> float:
    values = [times[floor][unit] / times["tool"][unit] for times in rounds]
    return round(statistics.median(values), 3)


def all_commands(
    folder: Path, corpus: Path, vocab: str, merges: str, workers: int
) -> dict[str, list[str]]:
    save_as_json(vocab, merges, folder / "tokenizer.json")
    floor = [
        *("env", f"RAYON_NUM_THREADS={workers}", sys.executable, "-c", FLOOR),
        *(str(folder / "tokenizer.json"), str(corpus)),
    ]
    tool = [
        *("env", f"PYTHONPATH={REPOSITORY}", sys.executable),
        *(str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", str(corpus)),
        *("--output-prefix", str(folder / "tool"), "--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", vocab, "--merge-file", merges, "--append-eod"),
        *("--workers", str(workers)),
    ]
    return {
        "floor": [*floor, str(folder / "floor.bin"), "encode_batch"],
        "floor_fast": [*floor, str(folder / "floor_fast.bin"), "encode_batch_fast"],
        "tool": tool,
    }


def timed(command: list[str]) -> dict[str, float]:
    """Wall and CPU seconds of a whole process and its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3)}


def check_equal(folder: Path) -> None:
    """A faster program that writes something else proves nothing."""
    made = (folder / "tool_text_document.bin").read_bytes()
    for floor in ("floor.bin", "floor_fast.bin"):
        if (folder / floor).read_bytes() != made:
            raise ValueError(f"{floor} and the tool wrote different tokens")


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


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
        "numpy": version("numpy"),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
