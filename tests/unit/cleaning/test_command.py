"""What the command lines of cleaning pass to the progress and to the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ds.cleaning import command
from megatron_ds.cleaning.command import CleaningCommand, MergeOptions, clean_and_report, work
from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.cli.sharding import ShardOptions
from megatron_ds.preprocess.documents.inputs import InputSpec


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The sizes that the progress gets."""
    passed: list[int | None] = []

    @contextlib.contextmanager
    def progress(task: str, total: int | None, interval: int) -> Iterator[Callable[..., None]]:
        passed.append(total)
        yield lambda *update: None

    monkeypatch.setattr(command, "progress", progress)
    return passed


def test_the_progress_knows_the_size_of_the_inputs_unless_other_processes_read_them(
    tmp_path: Path, totals: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "one"}\n')
    MergeOptions(json_path=(str(file),), output_file=str(tmp_path / "merged.jsonl")).run()
    assert totals == [file.stat().st_size]

    inputs = InputSpec(paths=(str(file),), format="jsonl")
    options = CleaningOptions(inputs, str(tmp_path / "out.jsonl"), stages=(), workers=1)
    shards = ShardOptions(shard="0/2")
    monkeypatch.setattr(command, "_clean_shards", lambda *arguments: None)
    work(CleaningCommand(cleaning=options, shards=shards))
    assert totals[1:] == [None]


def test_nothing_is_reported_before_the_output_is_complete(
    totals: list[int | None], capsys: pytest.CaptureFixture[str]
) -> None:
    options = CleaningOptions()
    clean_and_report(options, 1, lambda options, update: None, 5)
    assert (totals, capsys.readouterr().out) == ([5], "")
