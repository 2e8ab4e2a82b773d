"""The folder of the demo's results: what it deletes of an earlier demo, and what it shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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


def summary(folder: Path) -> str:
    """The final losses, compared with the unigram model."""
    losses: dict[str, float] = {}
    for line in (folder / "checkpoints" / "metrics.jsonl").read_text("utf-8").splitlines():
        losses.update(json.loads(line))
    unigram = read_unigram_loss(folder / "unigram.json")
    better = unigram - losses["validation_loss"]
    return (
        f"\n== Done. Everything is in {folder}/\n\n"
        f"  validation loss     {losses['validation_loss']:.4f} nats per token\n"
        f"  test loss           {losses['test_loss']:.4f}\n"
        f"  unigram model       {unigram:.4f}: the GPT is {abs(better):.2f} "
        f"{'better' if better > 0 else 'WORSE'} on the validation data\n\n"
        "  checkpoints/        the trained model, and metrics.jsonl\n"
        "  loss.png            the loss curve"
    )
