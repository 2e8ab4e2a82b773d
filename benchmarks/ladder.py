#!/usr/bin/env python
"""A real ladder: four small runs on the demo's text, and the next size, whose loss they predict.

    python benchmarks/ladder.py --folder ladders/demo
    python benchmarks/ladder.py --folder ladders/demo --page docs/training/ladder.md
    python benchmarks/ladder.py --folder ladders/5M --largest 5M

It makes the demo's corpus with a byte-level BPE tokenizer of 1,024 ids, plans the ladder from a
recipe with muP, trains it in one process, trains the next size, and judges the prediction. What has
been done in the folder is not repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from megatron_ds.ladder.records import read_ladder
from megatron_ds.ladder.runs import final_loss, step_seconds
from megatron_ds.reports.history import METRICS, read_run

REPOSITORY = Path(__file__).resolve().parents[1]


class Shape(NamedTuple):
    """Sizes of a ladder."""

    parameters: tuple[float, ...]
    """Of the small runs."""
    hidden_size: int
    """Of the next size."""


SHAPES = {
    "1M": Shape((0.39e6, 0.6e6, 0.9e6, 1.35e6), 192),
    "5M": Shape((0.54e6, 1.15e6, 2.3e6, 4.75e6), 384),
}
HEAD = 16
RECIPE = """\
# The next size, to which the ladder leads
num-layers: 4
seq-length: 128
max-position-embeddings: 128
position-embedding-type: rope
normalization: RMSNorm
disable-bias-linear: true
untie-embeddings-and-output-weights: true
attention-dropout: 0
hidden-dropout: 0
init-method-std: 0.05

use-mup: true
mup-base-hidden-size: 64
mup-base-head-dim: 16

micro-batch-size: 8
global-batch-size: 8
train-iters: 586
lr: 6.0e-3
lr-decay-style: linear
lr-warmup-fraction: 0.1
adam-beta2: 0.95
eval-interval: 0
eval-iters: 40
split: 95,5,0
"""
MARKS = ("<!-- begin: measured -->\n", "<!-- end: measured -->\n")
"""Lines of the page between which the program writes."""
WIDTH = 118
"""Characters of a line of the page, besides tables."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="folder of text and runs")
    parser.add_argument("--largest", choices=SHAPES, default="1M", help="about the last size")
    parser.add_argument("--page", type=Path, help="page into which the figures are written")
    options = parser.parse_args(argv)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.largest]
    recipe = prepare(folder, shape)
    ladder = folder / "ladder"
    if not (ladder / "ladder.json").is_file():
        sizes = map(str, shape.parameters)
        tool("ladder.py", "plan", ladder, "--config", recipe, "--sizes", *sizes)
    result = folder / "result.json"
    if not (ladder / "fit.json").is_file():
        output = tool("ladder.py", "run", ladder)
        write_json(result, {"ladder_seconds": seconds_in(output), "output": output})
    large = folder / "large"
    if not is_trained(ladder, large):
        words = ("--config", recipe, "--save", large, "--load", large, "--save-interval", 100)
        call([sys.executable, REPOSITORY / "pretrain_gpt.py", *words])
    judged = call(
        [sys.executable, REPOSITORY / "tools" / "ladder.py", "judge", ladder, large], may_fail=True
    )
    timed = json.loads(result.read_text())
    lines = list(summary(options.largest, ladder, large, timed))
    print(*lines, sep="\n")
    if options.page is not None:
        write_page(options.page, lines)
    return int("OUTSIDE" in judged)


def is_trained(ladder: Path, large: Path) -> bool:
    """Whether the next size has made its last step; an interrupted run continues."""
    if not (large / METRICS).is_file():
        return False
    return final_loss(read_run(large), read_ladder(ladder).target.steps) is not None


def seconds_in(output: str) -> float:
    """Seconds that the runs took, from what the program prints at their end."""
    match = re.search(r"([0-9.]+) s from the start of the program", output)
    assert match is not None
    return float(match[1])


def prepare(folder: Path, shape: Shape) -> Path:
    """Makes text, tokenizer and token files, and the recipe; returns its path."""
    corpus = folder / "corpus.jsonl"
    tokens = folder / "text"
    files = {"--vocab-file": folder / "vocab.json", "--merge-file": folder / "merges.txt"}
    tokenizer = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        *(w for pair in files.items() for w in pair),
    ]
    if not tokens.with_name("text_text_document.bin").is_file():
        tool("make_corpus.py", "--output", corpus)
        tool("train_tokenizer.py", "--input", corpus, "--vocab-size", 1024, "--output-dir", folder)
        outputs = ("--output-prefix", tokens, *tokenizer, "--append-eod", "--workers", 1)
        tool("preprocess_data.py", "--input", corpus, *outputs)
    recipe = folder / "recipe.yaml"
    values = {
        "hidden-size": shape.hidden_size,
        "num-attention-heads": shape.hidden_size // HEAD,
        "tokenizer-type": "GPT2BPETokenizer",
        "vocab-file": files["--vocab-file"],
        "merge-file": files["--merge-file"],
        "data-path": tokens.with_name("text_text_document"),
    }
    recipe.write_text(RECIPE + "".join(f"{key}: {value}\n" for key, value in values.items()))
    return recipe


def tool(name: str, *words: object) -> str:
    """Runs a program of tools/ and returns its output."""
    return call([sys.executable, REPOSITORY / "tools" / name, *words])


def call(words: list[Any], *, may_fail: bool = False) -> str:
    """Runs a command and returns what it prints.

    Raises:
        SystemExit: If it fails.
    """
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    if done.returncode and not may_fail:
        raise SystemExit(f"{words[1]}: status {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def summary(largest: str, folder: Path, large: Path, timed: dict[str, Any]) -> Iterator[str]:
    """Lines in Markdown: the runs, the prediction and what was measured."""
    ladder = read_ladder(folder)
    fitted = json.loads((folder / "fit.json").read_text())
    losses = {run["name"]: run["loss"] for run in fitted["runs"]}
    prediction = fitted["prediction"]
    measured = final_loss(read_run(large), ladder.target.steps)
    packages = ", ".join(f"{name} {text}" for name, text in versions(["torch"]).items())
    yield (
        f"`python benchmarks/ladder.py --largest {largest}` trains four sizes on the demo's text "
        f"and predicts the next one ({this_machine().cpu}, {packages}):"
    )
    yield ""
    yield "| run | hidden size | parameters | tokens | operations | loss |"
    yield "|---|---|---|---|---|---|"
    for run in ladder.runs:
        cells = (run.name, run.hidden_size, f"{run.parameters:,}", f"{run.tokens:,}")
        yield f"| {' | '.join(map(str, cells))} | {run.operations:.3g} | {losses[run.name]:.4f} |"
    target = ladder.target
    cells = ("the next size", target.hidden_size, f"{target.parameters:,}", f"{target.tokens:,}")
    yield f"| {' | '.join(map(str, cells))} | {target.operations:.3g} | {measured:.4f} |"
    yield ""
    holds = prediction["low"] <= (measured or 0.0) <= prediction["high"]
    yield (
        f"Predicted for the next size were {prediction['loss']:.4f}, "
        f"{prediction['level']:.0%} between {prediction['low']:.4f} and {prediction['high']:.4f}: "
        f"its loss is {'inside' if holds else 'outside'}, "
        f"{(measured or 0.0) / prediction['loss'] - 1:+.2%} from the prediction."
    )
    steps = seconds_of_steps(folder)
    seconds = float(timed["ladder_seconds"])
    yield (
        f"The four runs took {seconds:.0f} s from the start of the program, "
        f"{seconds / steps:.2f} times the {steps:.0f} s of their training steps."
    )


def seconds_of_steps(folder: Path) -> float:
    """Sum of the times of the training steps of a ladder."""
    ladder = read_ladder(folder)
    return sum(step_seconds(ladder, run) for run in ladder.runs)


def write_page(path: Path, lines: list[str]) -> None:
    """Writes lines between the marks of a page."""
    before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    text = "\n".join(line if line[:1] == "|" else fill(line, WIDTH) for line in lines)
    path.write_text(f"{before}{MARKS[0]}{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
