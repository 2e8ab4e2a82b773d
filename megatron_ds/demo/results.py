"""The folder of the demo's results: what it deletes of an earlier demo, and what it shows."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import user_error

OUTPUTS = (
    "corpus.jsonl",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "text_text_document.bin",
    "text_text_document.idx",
    "index-cache",
    "checkpoints",
    "unigram.json",
    "loss.png",
)
"""All results, and so all that the demo ever deletes."""
MARK = ".demo"
"""A file that marks a folder of results."""
WARM_UP = 10
"""First steps, whose times are not typical."""
BARS = "▁▂▃▄▅▆▇█"
BAR_COUNT = 40


def clear(folder: Path, data: Path | None) -> None:
    """Delete the results of an earlier demo, and only those.

    Raises:
        UserError: If that would delete other files.
    """
    if data is not None and not data.is_file():
        raise user_error("demo-data-missing", data=data)
    old = [folder / name for name in OUTPUTS if (folder / name).exists()]
    if data is not None and any(data.resolve().is_relative_to(path.resolve()) for path in old):
        raise user_error("demo-data-among-results", data=data, folder=folder)
    if old and not (folder / MARK).exists():
        raise user_error("demo-folder-not-empty", path=old[0])
    for path in old:
        print(f"Removing {path} of an earlier demo")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def read_unigram_loss(path: Path) -> float:
    """The loss that tools/unigram_loss.py has written."""
    return float(json.loads(path.read_text())["loss"])


def step_seconds(checkpoints: Path) -> float:
    """Seconds of a typical step of the run that has written a folder."""
    steps: list[float] = [
        record["seconds"] for record in read_metrics(checkpoints) if "lm_loss" in record
    ]
    return statistics.median(steps[WARM_UP:] or steps)


def read_metrics(checkpoints: Path) -> list[dict[str, Any]]:
    """The steps and evaluations of a run."""
    lines = (checkpoints / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def bars(values: list[float]) -> str:
    """A curve in one line of text."""
    count = min(BAR_COUNT, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low = min(means)
    width = max(means) - low or 1.0
    return "".join(BARS[int((value - low) / width * (len(BARS) - 1))] for value in means)


def summary(folder: Path, seconds: float, next_commands: dict[str, str]) -> str:
    """What was made, how good it is, and what to do next.

    Args:
        folder: The results.
        seconds: Time that the demo took.
        next_commands: What to do next, with the command or page.
    """
    losses: dict[str, float] = {}
    training: list[float] = []
    for record in read_metrics(folder / "checkpoints"):
        losses.update(record)
        training += [record["lm_loss"]] if "lm_loss" in record else []
    unigram = read_unigram_loss(folder / "unigram.json")
    better = unigram - losses["validation_loss"]
    width = max(map(len, next_commands))
    commands = [f"  {what:{width}}  {words}" for what, words in next_commands.items()]
    lines = (
        f"\n== Done in {int(seconds) // 60}:{int(seconds) % 60:02}. Everything is in {folder}/\n",
        f"  training loss       {training[0]:.4f} {bars(training)} {training[-1]:.4f}"
        f" in {len(training)} iterations",
        f"  validation loss     {losses['validation_loss']:.4f} nats per token",
        f"  test loss           {losses['test_loss']:.4f}",
        f"  unigram model       {unigram:.4f}: the GPT is {abs(better):.2f} "
        f"{'better' if better > 0 else 'WORSE'} on the validation data\n",
        "  checkpoints/        the trained model, and metrics.jsonl",
        "  loss.png            the loss curve\n",
        "Next:\n",
        *commands,
    )
    return "\n".join(lines)
