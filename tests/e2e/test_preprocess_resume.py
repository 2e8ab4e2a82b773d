"""Interrupted preprocessing goes on: killed at any step, it ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.preprocess import output_files, run_record
from megatron_ds.preprocess.document_readers import InputSpec
from megatron_ds.preprocess.pipeline import Progress, preprocess
from megatron_ds.tokenizer.null import NullTokenizer
from tests.e2e.interrupted import (
    KINDS,
    TOKENIZER,
    check_kills,
    contents,
    interrupt,
    killed_after,
    options,
    remove,
    resume,
    stop_after,
    undisturbed,
)


@pytest.fixture(autouse=True)
def record_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "RECORD_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power fails here, and it is slow


def test_killed_at_some_steps_it_ends_as_if_undisturbed(tmp_path: Path) -> None:
    assert check_kills(tmp_path, "in.jsonl", every=9) > 2


@pytest.mark.parametrize("name", KINDS)
def test_interrupted_again_and_again(tmp_path: Path, name: str) -> None:
    chosen = options(tmp_path, name)
    done, expected = undisturbed(chosen)
    before = 0
    for chunks in (1, 2, 1, 3, 1):
        notes = interrupt(dataclasses.replace(chosen, resume=True), chunks)
        assert "--resume goes on after them" in notes[0]
        words = notes[0].split()
        assert int(words[words.index("documents") - 1]) > before
        before = int(words[words.index("documents") - 1])
        assert all(".partial" in n or n == "out.run.json" for n in contents(tmp_path))
    again, said = resume(chosen, workers=3, chunk_size=7)
    assert said == [f"going on after {before} documents"]
    assert again == done
    assert again.before is not None
    assert again.before.documents == before
    assert contents(tmp_path) == expected


def test_a_complete_run_is_not_done_again(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    done = preprocess(chosen, TOKENIZER)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")}
    again, said = resume(chosen, chunk_size=1)
    assert said == [f"{tmp_path / 'out'} is complete: nothing is left to do"]
    assert (again.documents, again.tokens, again.dropped) == (60, done.tokens, done.dropped)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")} == times
    with pytest.raises(ValueError, match="--append-eod is False, and was True"):
        resume(chosen, append_eod=False)
    os.utime(tmp_path / "in.jsonl")
    with pytest.raises(ValueError, match=r"is complete, made of 1 files; .* means 1 files now"):
        resume(chosen)
    os.unlink(tmp_path / "out_b_document.bin")
    assert "out_b_document.bin is not there" in resume(chosen)[1][0]
    assert (tmp_path / "out_b_document.bin").exists()


def test_other_settings_are_named_together(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    interrupt(chosen, 3)
    before = contents(tmp_path)
    inputs = dataclasses.replace(chosen.inputs, max_document_bytes=1000, format="jsonl")
    with pytest.raises(ValueError) as raised:
        resume(chosen, inputs=inputs, append_eod=False)
    found = str(raised.value).splitlines()
    assert [line.split(" and ")[0] for line in found] == [
        "--resume: --append-eod is False,",
        "--resume: --input-format is jsonl,",
        "--resume: --max-document-bytes is 1000,",
    ]
    assert "was 134217728 in the run that" in found[2]
    with pytest.raises(ValueError, match=r"(?s)was .*\"vocab_size\": 101.* in the run"):
        preprocess(dataclasses.replace(chosen, resume=True), NullTokenizer(200))
    with pytest.raises(ValueError, match="--json-keys is b a, and was a b"):
        resume(chosen, keys=("b", "a"))
    with pytest.raises(
        ValueError, match="--strict: the interrupted run has left out 1 broken JSON"
    ):
        resume(chosen, strict=True)
    assert contents(tmp_path) == before
    assert resume(chosen)[0].documents == 60


def test_without_resume_it_begins_anew_and_says_so(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    done, expected = undisturbed(chosen)
    interrupt(chosen, 3)
    said: list[str] = []
    assert preprocess(chosen, TOKENIZER, say=said.append) == done
    assert "an unfinished run had done 11 documents" in said[0]
    assert "--resume would have gone on" in said[0]
    assert contents(tmp_path) == expected
    said.clear()
    preprocess(chosen, TOKENIZER, say=said.append)
    assert said == [], "the run before is complete"


def test_nothing_to_go_on_with_is_said(tmp_path: Path) -> None:
    done, said = resume(options(tmp_path))
    assert done.documents == 60
    assert "out.run.json, nothing to go on with; the run begins anew" in said[0]


def test_a_run_that_fails_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "RECORD_SECONDS", 1e9)
    chosen = options(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        preprocess(chosen, TOKENIZER, stop_after(5))
    assert contents(tmp_path) == {}


def test_what_is_read_once_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dataclasses.replace(options(tmp_path), inputs=InputSpec(("-",)))
    with pytest.raises(ValueError, match="--resume: --input - can be read only once"):
        resume(chosen)
    with open(tmp_path / "in.jsonl") as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(KeyboardInterrupt):
            preprocess(chosen, TOKENIZER, stop_after(5))
    assert contents(tmp_path) == {}
    with open(tmp_path / "in.jsonl") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert preprocess(chosen, TOKENIZER).documents == 60


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """The files before it stay; so does a run go on after a damaged file was put right."""
    chosen = options(tmp_path, "folder", chunk_size=2)
    files = sorted((tmp_path / "folder").iterdir())
    damaged = files[3].rename(str(files[3]) + ".gz")
    whole = gzip.compress(damaged.read_bytes())
    damaged.write_bytes(whole)
    done, expected = undisturbed(chosen)
    damaged.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"027\.jsonl\.gz: is damaged or cut off") as raised:
        preprocess(chosen, TOKENIZER)
    assert "--resume goes on after them" in raised.value.__notes__[0]
    damaged.write_bytes(whole)
    again, said = resume(chosen)
    assert "has changed since it was read" in said[0]
    assert said[0].endswith("it is read from its beginning")
    assert again == done
    assert again.before is not None
    assert 15 < again.before.documents < 27
    found = contents(tmp_path)
    assert found.pop("out.run.json") != expected.pop("out.run.json"), "the file's time"
    assert found == expected


def test_files_that_changed_or_went_cannot_go_on(tmp_path: Path) -> None:
    chosen = options(tmp_path, "folder", chunk_size=2)
    files = sorted((tmp_path / "folder").iterdir())
    interrupt(chosen, 20)
    before = contents(tmp_path)
    content = files[1].read_bytes()
    files[1].write_bytes(content + b"\n")
    with pytest.raises(ValueError, match=r"009\.jsonl has changed since it was read: it had \d+"):
        resume(chosen)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"009\.jsonl was read, and in its place comes .*018"):
        resume(chosen)
    with pytest.raises(ValueError, match=r"009\.jsonl was read, and is not among the inputs now"):
        resume(chosen, inputs=InputSpec((str(files[0]),)))
    assert contents(tmp_path) == before


def test_files_that_come_after_what_was_read_may_be_new(tmp_path: Path) -> None:
    chosen = options(tmp_path, "folder", chunk_size=2)
    interrupt(chosen, 4)
    (tmp_path / "folder" / "zzz.jsonl").write_text('{"a": "1 2 3", "b": "4"}')
    done, _ = resume(chosen)
    found = contents(tmp_path)
    remove(tmp_path)
    assert preprocess(chosen, TOKENIZER) == done
    assert contents(tmp_path) == found


def test_a_strict_run_goes_on_after_the_line_was_repaired(tmp_path: Path) -> None:
    chosen = options(tmp_path, "folder", chunk_size=2, strict=True)
    files = sorted((tmp_path / "folder").iterdir())
    for path in files:
        good = [line for line in path.read_text().splitlines() if line.startswith('{"a": "')]
        path.write_text("\n".join(line for line in good if '"b": "5' in line and "x" not in line))
    done, expected = undisturbed(chosen)
    good_text = files[4].read_text()
    files[4].write_text(good_text + "\n{")
    with pytest.raises(ValueError, match=r"036\.jsonl:\d+: not JSON") as raised:
        preprocess(chosen, TOKENIZER)
    assert raised.value.__notes__
    files[4].write_text(good_text)
    again, _ = resume(chosen)
    assert again == done
    found = contents(tmp_path)
    assert {**found, "out.run.json": b""} == {**expected, "out.run.json": b""}


def test_only_bad_lines_leave_nothing_to_go_on_with(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("[\n" * 50)
    with pytest.raises(ValueError, match="has no documents"):
        preprocess(options(tmp_path), TOKENIZER)
    assert contents(tmp_path) == {}


def test_a_full_disk_costs_nothing_that_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(tmp_path)
    done, expected = undisturbed(chosen)
    for failing in (1, 2, 5, 9, 12, 15):  # there are 16 even if nothing is recorded on the way
        calls = count(1)

        def full(descriptor: int, calls: Iterator[int] = calls, failing: int = failing) -> None:
            if next(calls) >= failing:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}"):
                preprocess(chosen, TOKENIZER, say=lambda line: None)
        if failing == 1:
            assert contents(tmp_path) == {}
        final = [name for name in contents(tmp_path) if name.endswith((".bin", ".idx"))]
        assert final == []
        assert resume(chosen)[0] == done
        assert contents(tmp_path) == expected
        remove(tmp_path)


def test_two_runs_do_not_go_on_at_once(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    done, expected = undisturbed(chosen)
    interrupt(chosen, 3)
    refused = []

    def second(progress: Progress) -> None:
        if not refused:
            with pytest.raises(ValueError, match="another process is writing") as error:
                resume(chosen)
            refused.append(error)

    again = preprocess(dataclasses.replace(chosen, resume=True), TOKENIZER, second, lambda line: 0)
    assert again == done
    assert contents(tmp_path) == expected


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], Any]:
    """The files of an interrupted run, and what a whole one gives."""
    folder = tmp_path_factory.mktemp("halfway")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_files, "RECORD_SECONDS", 0.0)
        expected = undisturbed(options(folder))
        interrupt(options(folder), 6)
    return folder, contents(folder), expected


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damage_means_a_new_beginning_and_never_wrong_data(
    halfway: tuple[Path, dict[str, bytes], Any], data: st.DataObject
) -> None:
    """Torn, cut or changed records and lists of files, and files that are shorter than recorded."""
    folder, files, (done, expected) = halfway
    remove(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    name = data.draw(st.sampled_from(sorted(files)), "file")
    size = data.draw(st.integers(0, len(files[name]) - 1), "size")
    damaged = files[name][:size]
    if name in ("out.run.json", "out.sources.partial") and data.draw(st.booleans(), "changed"):
        damaged += data.draw(st.binary(min_size=1, max_size=3), "bytes")
        damaged += files[name][len(damaged) :]
    (folder / name).write_bytes(damaged)
    again, said = resume(options(folder))
    assert again == done
    assert contents(folder) == expected
    assert said[0].endswith(("the run begins anew", "going on after 23 documents"))
    whole = len(damaged) >= len(files[name])
    if not whole and "begins anew" not in said[0]:
        assert damaged.strip() == files[name].strip()


def test_a_pair_is_read_while_the_next_one_is_under_way(tmp_path: Path) -> None:
    """The pair of an earlier run stands until the new one is complete, interrupted or not."""
    chosen = options(tmp_path)
    preprocess(chosen, TOKENIZER)
    before = IndexedDataset(tmp_path / "out_a_document").tokens.tolist()
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('\n{"a": "9 9 9", "b": "1"}')
    interrupt(chosen, 5)
    assert IndexedDataset(tmp_path / "out_a_document").tokens.tolist() == before
    resume(chosen)
    assert IndexedDataset(tmp_path / "out_a_document").tokens.tolist() == [*before, 9, 9, 9, 100]


def test_a_record_tells_only_of_what_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each record all files are synced, with at least as much as it tells of."""
    on_disk: dict[str, int] = {}

    def sync(descriptor: int) -> None:
        on_disk[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    write = run_record.write
    states = []

    def checked(path: str, record: run_record.RunRecord) -> None:
        states.append(record.state)
        last = record.last
        out = str(tmp_path / "out")
        for key, written in zip("ab", last.pairs, strict=True):
            assert on_disk.get(f"{out}_{key}_document.bin.partial", 0) >= 2 * written.tokens
            index = on_disk.get(f"{out}_{key}_document.idx.partial", 0)
            assert index >= (34 + 4 * written.sequences) * (written.sequences > 0)
            ends = on_disk.get(f"{out}_{key}_document.documents.partial", 0)
            assert ends >= 8 * written.documents
        assert on_disk.get(out + ".quarantine.partial", 0) >= last.quarantine
        assert on_disk.get(out + ".sources.partial", 0) >= last.sources
        write(path, record)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(run_record, "write", checked)
    preprocess(options(tmp_path), TOKENIZER)
    assert states[0] == "running"
    assert states[-2:] == ["sealed", "finished"]


def test_what_a_killed_new_run_wrote_is_not_taken_for_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one, of other settings, dies before its first record, with more than the old had."""
    chosen = options(tmp_path)
    done, expected = undisturbed(chosen)
    interrupt(chosen, 2)
    monkeypatch.setattr(output_files, "RECORD_SECONDS", 1e9)
    other = dataclasses.replace(chosen, append_eod=False)
    reached = output_files.OutputWriter.checkpoint_progress

    def at_once(self: output_files.OutputWriter, *arguments: Any) -> None:
        reached(self, *arguments)
        self._flush()

    monkeypatch.setattr(output_files.OutputWriter, "checkpoint_progress", at_once)
    assert killed_after(other, chunks=9)
    again, said = resume(chosen)
    assert "begins anew" in said[0]
    assert again == done
    assert contents(tmp_path) == expected


def test_one_wrong_digit_in_a_record_is_found(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    done, expected = undisturbed(chosen)
    interrupt(chosen, 3)
    path = tmp_path / "out.run.json"
    content = path.read_text()
    assert '"documents": 11' in content
    path.write_text(content.replace('"documents": 11', '"documents": 12'))
    again, said = resume(chosen)
    assert said == [
        f"{path} is damaged: its checksum is not that of its content; the run begins anew"
    ]
    assert again == done
    assert contents(tmp_path) == expected
