"""Interrupted preprocessing: resumed at any point, it ends with the output of an uninterrupted run.

Kills at every step of a commit and a publication are covered by tests/unit/fileio/test_resumable.
"""

from __future__ import annotations

import dataclasses
import os
from itertools import count
from pathlib import Path

import pytest

from megatron_ds.config.problems import UserError
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.fileio import resumable
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.pipeline import Progress, preprocess
from megatron_ds.tokenizer.null import NullTokenizer
from tests.faults import is_killed_at
from tests.preprocess_runs import (
    KINDS,
    TOKENIZER,
    interrupt,
    interrupt_after,
    options,
    output_files,
    remove_output,
    resume,
    run_uninterrupted,
)
from tests.problems import codes, fields, raises_problem
from tests.proofs.cases import with_proofs


@pytest.fixture(autouse=True)
def commit_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power fails here, and it is slow


@pytest.mark.parametrize("name", with_proofs(KINDS, [kind for kind in KINDS if kind != "folder"]))
def test_killed_run_resumes_to_the_same_output(tmp_path: Path, name: str) -> None:
    """Claim (data): a killed and resumed preprocessing run ends with the bytes of an uninterrupted
    one"""
    chosen = options(tmp_path, name, chunk_size=20)
    done, expected = run_uninterrupted(chosen)
    if name != "in.parquet":
        assert sum(done.dropped.values()) > 3
        assert "out.quarantine" in expected
    for kills in count():
        killed = is_killed_at(
            f"os.fsync|os.replace|os.unlink:{1 + kills * 5}",
            lambda: preprocess(chosen, TOKENIZER, log=lambda line: None),
        )
        if not killed:
            break
        again, logged = resume(chosen, workers=2, chunk_size=3)
        assert output_files(tmp_path) == expected, (kills, logged)
        assert again == done
        remove_output(tmp_path)
    assert kills > 5


@pytest.mark.parametrize("name", with_proofs(KINDS, ["in.jsonl.gz", "in.parquet"]))
def test_repeatedly_interrupted_run_resumes_to_the_same_output(tmp_path: Path, name: str) -> None:
    chosen = options(tmp_path, name)
    done, expected = run_uninterrupted(chosen)
    for chunks in (1, 2, 1, 3, 1):
        notes = interrupt(dataclasses.replace(chosen, resume=True), chunks)
        assert str(tmp_path / "out.work") in notes[0]
        assert all(name.startswith("out.work/") for name in output_files(tmp_path))
    again, logged = resume(chosen, workers=3, chunk_size=7)
    assert again == done
    assert again.before is not None
    assert 16 < again.before.documents < 60
    assert str(again.before.documents) in logged[0]
    assert output_files(tmp_path) == expected


def test_complete_run_is_not_repeated(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    done = preprocess(chosen, TOKENIZER)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")}
    again, logged = resume(chosen, chunk_size=1)
    assert len(logged) == 1
    assert (again.documents, again.tokens, again.dropped) == (60, done.tokens, done.dropped)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")} == times
    with raises_problem("resumed-run-differs", "append_eod"):
        resume(chosen, append_eod=False)
    os.utime(tmp_path / "in.jsonl")
    with raises_problem("resumed-run-differs", contains=str(tmp_path / "in.jsonl")):
        resume(chosen)


@pytest.mark.parametrize("is_complete", [False, True])
def test_run_is_resumed_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    chosen = options(tmp_path, "folder", chunk_size=2)
    monkeypatch.chdir(tmp_path)
    started = dataclasses.replace(chosen, inputs=InputSpec(("folder",)), output_prefix="out")
    if is_complete:
        preprocess(started, TOKENIZER)
    else:
        interrupt(started, 20)
    monkeypatch.chdir(tmp_path / "folder")
    moved = dataclasses.replace(chosen, inputs=InputSpec((".",)), output_prefix="../out")
    done, logged = resume(moved)
    assert done.before is not None
    assert (done.documents, done.before.documents == 60) == (60, is_complete)
    assert len(logged) == 1


def test_other_settings_are_reported_together(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    interrupt(chosen, 3)
    before = output_files(tmp_path)
    inputs = dataclasses.replace(chosen.inputs, max_document_bytes=1000, format="jsonl")
    with pytest.raises(ValueError) as raised:
        resume(chosen, inputs=inputs, append_eod=False)
    problems = raised.value.problems  # type: ignore[attr-defined]
    assert codes(problems) == ["resumed-run-differs"] * 3
    assert fields(problems) == [("append_eod",), ("format",), ("max_document_bytes",)]
    assert "1000" in str(problems[2])
    assert "134217728" in str(problems[2])
    with raises_problem("resumed-run-differs", contains='"vocab_size": 101'):
        preprocess(dataclasses.replace(chosen, resume=True), NullTokenizer(200))
    with raises_problem("resumed-run-differs", "json_keys"):
        resume(chosen, json_keys=("b", "a"))
    with raises_problem("strict-resume-after-rejects", "fail_on_bad_document", "resume"):
        resume(chosen, fail_on_bad_document=True)
    assert output_files(tmp_path) == before
    assert resume(chosen)[0].documents == 60


def test_without_resume_a_run_starts_over_with_a_warning(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    done, expected = run_uninterrupted(chosen)
    interrupt(chosen, 3)
    logged: list[str] = []
    assert preprocess(chosen, TOKENIZER, log=logged.append) == done
    assert codes(logged) == ["interrupted-run-replaced"]
    assert output_files(tmp_path) == expected
    logged.clear()
    preprocess(chosen, TOKENIZER, log=logged.append)
    assert logged == [], "the run before is complete"


def test_resume_without_earlier_work_starts_with_a_warning(tmp_path: Path) -> None:
    done, logged = resume(options(tmp_path))
    assert done.documents == 60
    assert codes(logged) == ["nothing-to-resume"]


def test_run_that_fails_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "COMMIT_SECONDS", 1e9)
    with pytest.raises(KeyboardInterrupt):
        preprocess(options(tmp_path), TOKENIZER, interrupt_after(5))
    assert list(tmp_path.glob("out*")) == []


def test_standard_input_cannot_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dataclasses.replace(options(tmp_path), inputs=InputSpec(("-",)))
    with raises_problem("resume-of-unseekable-input", "resume", "paths"):
        resume(chosen)
    with open(tmp_path / "in.jsonl") as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(KeyboardInterrupt):
            preprocess(chosen, TOKENIZER, interrupt_after(5))
    assert list(tmp_path.glob("out*")) == []
    with open(tmp_path / "in.jsonl") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert preprocess(chosen, TOKENIZER).documents == 60


def test_changed_added_and_removed_inputs_are_refused(tmp_path: Path) -> None:
    chosen = options(tmp_path, "folder", chunk_size=2)
    files = sorted((tmp_path / "folder").iterdir())
    interrupt(chosen, 20)
    before = output_files(tmp_path)
    content = files[1].read_bytes()
    files[1].write_bytes(content + b"\n")
    with raises_problem("resumed-run-differs", contains=str(files[1])):
        resume(chosen)
    files[1].unlink()
    with pytest.raises(UserError, match=str(files[1])):
        resume(chosen)
    files[1].write_bytes(content)
    new = tmp_path / "folder" / "zzz.jsonl"
    new.write_text('{"a": "1 2 3", "b": "4"}')
    with pytest.raises(UserError, match=str(new)):
        resume(chosen)
    assert output_files(tmp_path) == before


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    first = tmp_path / "first.jsonl"
    second = tmp_path / "second.jsonl"
    for path in (first, second):
        path.write_text('{"a": "1 2", "b": "3"}\n' * 200)
    chosen = options(tmp_path, "folder", chunk_size=2)
    in_order = dataclasses.replace(chosen, inputs=InputSpec(paths=(str(first), str(second))))
    interrupt(in_order, 20)
    swapped = dataclasses.replace(chosen, inputs=InputSpec(paths=(str(second), str(first))))
    with raises_problem("resumed-run-differs"):
        resume(swapped)


def test_input_without_documents_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("[\n" * 50)
    with raises_problem("no-documents", contains="50 broken JSON") as raised:
        preprocess(options(tmp_path), TOKENIZER)
    assert "format" in raised.problem.mentioned, "plain text may be called .jsonl"
    assert list(tmp_path.glob("out*")) == []


def test_second_run_of_a_prefix_is_refused(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    done, expected = run_uninterrupted(chosen)
    interrupt(chosen, 3)
    refused = []

    def start_second(progress: Progress) -> None:
        if not refused:
            for second in (chosen, resumed):
                with raises_problem("output-in-use", contains=str(tmp_path / "out")) as raised:
                    preprocess(second, TOKENIZER)
                refused.append(raised)

    resumed = dataclasses.replace(chosen, resume=True)
    assert preprocess(resumed, TOKENIZER, start_second, lambda line: None) == done
    assert output_files(tmp_path) == expected


def test_older_pair_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    preprocess(chosen, TOKENIZER)
    before = IndexedDataset(tmp_path / "out_a_document").tokens.tolist()
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('\n{"a": "9 9 9", "b": "1"}')
    interrupt(chosen, 5)
    assert IndexedDataset(tmp_path / "out_a_document").tokens.tolist() == before
    resume(chosen)
    assert IndexedDataset(tmp_path / "out_a_document").tokens.tolist() == [*before, 9, 9, 9, 100]
