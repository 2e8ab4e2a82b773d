"""A corpus with all kinds of duplicates, and a cleaning that writes every kind of file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.preprocess.documents.inputs import InputSpec


def write(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in documents), encoding="utf-8")
    return path


def corpus(folder: Path) -> Path:
    """300 documents of which some are short, some double, some almost double."""
    documents: list[object] = []
    for number in range(300):
        words = [f"w{(number // 3) * 7 + at}" for at in range(60 if number % 10 else 3)]
        if number % 3 == 2:
            words[-1] = "other"
        documents.append({"text": " ".join(words), "id": number})
    path = write(folder / "in.jsonl", *documents)
    path.write_text(path.read_text() + "broken\n" + '{"text": "the last one of all"}\n')
    return path


def everything(folder: Path, **other: Any) -> CleaningOptions:
    """All that a run can write, in parts of which the corpus has four."""
    chosen = {
        "stages": ("length", "exact", "near"),
        "min_chars": 15,
        "output": str(folder / "out.jsonl.gz"),
        "dropped_output": str(folder / "dropped.jsonl"),
        "report": str(folder / "report.json"),
        "part_bytes": 30_000,
    }
    return CleaningOptions(InputSpec(paths=(str(folder / "in.jsonl"),)), **{**chosen, **other})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
