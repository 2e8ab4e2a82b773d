"""Preprocessing runs that are interrupted, killed and resumed, for tests."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import Progress, preprocess
from megatron_ds.tokenizer.null import NullTokenizer

TOKENIZER = NullTokenizer(100)
ROWS = [{"a": f"{n % 100} {n % 7}", "b": " ".join(["5"] * (n % 4))} for n in range(60)]
LINES = [json.dumps(row) for row in ROWS]
# Rejected ones at the start, in the middle and at the end.
LINES = ["{", *LINES[:20], '{"a": "1"}', "", *LINES[20:], '{"a": "x", "b": "1"}', "[]"]


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)


def write_many(path: Path) -> None:
    path.mkdir()
    for at in range(0, len(LINES), 9):
        (path / f"{at:03}.jsonl").write_text("\n".join(LINES[at : at + 9]))


KINDS: dict[str, Callable[[Path], object]] = {
    "in.jsonl": lambda path: path.write_text("\n".join(LINES)),
    "in.jsonl.gz": lambda path: path.write_bytes(gzip.compress("\n".join(LINES).encode())),
    "in.parquet": write_parquet,
    "folder": write_many,
}


def options(folder: Path, name: str = "in.jsonl", **values: Any) -> PreprocessOptions:
    path = folder / name
    if not path.exists():
        KINDS[name](path)
    given = {"json_keys": ("a", "b"), "append_eod": True, "chunk_size": 4, "workers": 1}
    given |= {"overwrite": True, **values}
    return PreprocessOptions(InputSpec((str(path),)), str(folder / "out"), **given)


def output_files(folder: Path) -> dict[str, bytes]:
    """Files of the output and of its work folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.relative_to(folder).parts[0].startswith("out")
    }


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    """A pair of token files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def remove_output(folder: Path) -> None:
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_uninterrupted(options: PreprocessOptions) -> tuple[Progress, dict[str, bytes]]:
    """Counts and files of an uninterrupted run. The files are removed."""
    folder = Path(options.output_prefix).parent
    done = preprocess(options, TOKENIZER)
    found = output_files(folder)
    remove_output(folder)
    return done, found


def resume(options: PreprocessOptions, **values: Any) -> tuple[Progress, list[str]]:
    """Resumes with other values. Returns the counts and the log."""
    logged: list[str] = []
    changed = dataclasses.replace(options, **{"resume": True, "overwrite": False, **values})
    return preprocess(changed, TOKENIZER, log=logged.append), logged


def interrupt_after(chunks: int) -> Callable[[Progress], None]:
    """Ctrl-C after so many chunks."""
    numbers = count(1)

    def report(progress: Progress) -> None:
        if next(numbers) == chunks:
            raise KeyboardInterrupt

    return report


def interrupt(options: PreprocessOptions, chunks: int) -> list[str]:
    """Interrupts a run after so many chunks. Returns the notes of the exception."""
    with pytest.raises(KeyboardInterrupt) as raised:
        preprocess(options, TOKENIZER, interrupt_after(chunks), log=lambda line: None)
    return raised.value.__notes__
