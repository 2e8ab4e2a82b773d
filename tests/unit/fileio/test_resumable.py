"""The folder of a run that is under way: what counts, what is cut off, who may have it."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.fileio.resumable import RECORD, ResumableOutput, pack_record, read_records


def work(folder: Path, resume: bool = True, **settings: Any) -> ResumableOutput:
    return ResumableOutput(str(folder / "out.jsonl"), settings, {"a": "", "b": ".gz"}, resume)


def test_what_was_written_after_the_last_commit_is_cut_off(tmp_path: Path) -> None:
    with work(tmp_path) as first:
        first.files["a"].write(b"one\n")
        first.files["b"].write(b"eins\n")
        first.commit({"done": 1})
        first.files["a"].write(b"two\n")
        first.files["b"].write(b"zwei\n")
        first.files["a"].flush()
    with work(tmp_path) as second:
        assert second.progress == {"done": 1}
        second.files["a"].write(b"TWO\n")
        second.files["b"].write(b"ZWEI\n")
        second.commit({"done": 2}, finished=True)
        second.publish({"a": str(tmp_path / "A"), "b": str(tmp_path / "B")})
    assert (tmp_path / "A").read_bytes() == b"one\nTWO\n"
    assert gzip.decompress((tmp_path / "B").read_bytes()) == b"eins\nZWEI\n"
    assert sorted(os.listdir(tmp_path)) == ["A", "B"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ""])
def test_compressed_bytes_have_no_time_and_no_name(tmp_path: Path, suffix: str) -> None:
    written: list[bytes] = []
    for name in ("x", "y"):
        with ResumableOutput(str(tmp_path / name), {}, {name: suffix}, False) as one:
            one.files[name].write(b"text\n" * 100)
            one.commit({}, finished=True)
            one.publish({name: str(tmp_path / "final")})
        written.append((tmp_path / "final").read_bytes())
    assert written[0] == written[1]
    assert suffix == "" or len(written[0]) < 200


def test_work_is_not_overwritten_and_other_settings_are_named(tmp_path: Path) -> None:
    with work(tmp_path, size=1, names=["a", "b"], gone=None) as first:
        first.commit({})
    with pytest.raises(ValueError, match=r"has the work of an interrupted run: --resume goes on"):
        work(tmp_path, resume=False, size=1, names=["a", "b"]).__enter__()
    with pytest.raises(ValueError) as caught:
        work(tmp_path, size=2, names=["a"]).__enter__()
    assert str(caught.value).splitlines()[1:] == [
        "names: the interrupted run had a b, this one has a",
        "size: the interrupted run had 1, this one has 2",
    ]
    with work(tmp_path, size=1, names=["a", "b"]) as again:
        assert again.progress == {}


def test_work_of_another_process_is_left_alone(tmp_path: Path) -> None:
    with work(tmp_path) as first:
        first.commit({})
        with pytest.raises(ValueError, match=r"out\.jsonl: another process is writing it"):
            work(tmp_path).__enter__()
        assert (tmp_path / "out.jsonl.work" / RECORD).exists()


def test_a_run_that_committed_nothing_leaves_nothing(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), work(tmp_path, resume=False) as first:
        first.files["a"].write(b"x")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_changed_files_and_a_damaged_record_are_named(tmp_path: Path) -> None:
    with work(tmp_path) as first:
        first.files["a"].write(b"one\n")
        first.commit({})
    folder = tmp_path / "out.jsonl.work"
    (folder / "a").write_bytes(b"on")
    with pytest.raises(ValueError, match="a has 2 bytes, and its record says 4: it was changed"):
        work(tmp_path).__enter__()
    (folder / RECORD).write_text(json.dumps({})[:1])
    with pytest.raises(ValueError, match=r"record\.json is damaged"):
        work(tmp_path).__enter__()


def test_keys_come_back(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [b"one", b"", b"three" * 100]
    path.write_bytes(b"".join(map(pack_record, keys)) + b"cut off")
    assert list(read_records(path, path.stat().st_size - 7)) == keys
