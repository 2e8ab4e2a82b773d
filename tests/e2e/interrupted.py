"""Preprocessing runs that are interrupted or killed, for tests."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_ds.preprocess.document_readers import InputSpec
from megatron_ds.preprocess.pipeline import PreprocessOptions, Progress, preprocess
from megatron_ds.tokenizer.null import NullTokenizer
from tests.faults import is_killed, is_killed_at, kill

TOKENIZER = NullTokenizer(100)
ROWS = [{"a": f"{n % 100} {n % 7}", "b": " ".join(["5"] * (n % 4))} for n in range(60)]
LINES = [json.dumps(row) for row in ROWS]
# Bad ones at the beginning, in the middle and at the end.
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
    given = {"keys": ("a", "b"), "append_eod": True, "chunk_size": 4, "workers": 1, **values}
    return PreprocessOptions(InputSpec((str(path),)), str(folder / "out"), **given)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("out*"))}


def remove(folder: Path) -> None:
    for path in folder.glob("out*"):
        path.unlink()


def undisturbed(options: PreprocessOptions) -> tuple[Progress, dict[str, bytes]]:
    """What a whole run gives; its files are removed."""
    folder = Path(options.output_prefix).parent
    done = preprocess(options, TOKENIZER)
    found = contents(folder)
    remove(folder)
    return done, found


def resume(options: PreprocessOptions, **values: Any) -> tuple[Progress, list[str]]:
    said: list[str] = []
    changed = dataclasses.replace(options, resume=True, **values)
    return preprocess(changed, TOKENIZER, say=said.append), said


def stop_after(chunks: int) -> Callable[[Progress], None]:
    """Ctrl-C after so many."""
    numbers = count(1)

    def report(progress: Progress) -> None:
        if next(numbers) == chunks:
            raise KeyboardInterrupt

    return report


def interrupt(options: PreprocessOptions, chunks: int) -> list[str]:
    """Ctrl-C after so many chunks; the notes on what is left."""
    with pytest.raises(KeyboardInterrupt) as raised:
        preprocess(options, TOKENIZER, stop_after(chunks), say=lambda line: None)
    return raised.value.__notes__


def killed_after(options: PreprocessOptions, chunks: int) -> bool:
    """Runs in a process that is killed when so many chunks are written."""
    numbers = count(1)

    def report(progress: Progress) -> None:
        if next(numbers) == chunks:
            kill()

    return is_killed(lambda: preprocess(options, TOKENIZER, report, say=lambda line: None))


def killed_at(options: PreprocessOptions, step: int) -> bool:
    """Whether a process is killed before its nth sync, renaming or removal of a file."""
    return is_killed_at(
        f"os.fsync|os.replace|os.unlink:{step}",
        lambda: preprocess(options, TOKENIZER, say=lambda line: None),
    )


def check_kills(folder: Path, name: str, every: int) -> int:
    """Kills a run at each so many of its steps, goes on, and compares; returns how many kills.

    The steps are those that make files durable or name them; what lies between only adds to files.
    """
    chosen = options(folder, name, chunk_size=20)
    done, expected = undisturbed(chosen)
    if name != "in.parquet":
        assert sum(done.dropped.values()) > 3
        assert "out.quarantine" in expected
    for kills in count():
        if not killed_at(chosen, 1 + kills * every):
            return kills
        again, said = resume(chosen, workers=2, chunk_size=3)
        assert contents(folder) == expected, (kills, said)
        assert again == done
        remove(folder)
    raise AssertionError
