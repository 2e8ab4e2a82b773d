"""Merged pairs equal the output of one preprocessing run."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from megatron_ds.config.problems import UserError
from megatron_ds.data.token_files import indexed_writer
from megatron_ds.data.token_files.indexed_writer import WriteCounts
from megatron_ds.data.token_files.merge import MergeProgress, merge, prefixes_in
from tests.foreign_files import CASES
from tests.problems import codes, raises_problem
from tests.token_files import write_pair


def content(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_merged_bytes_equal_those_of_one_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """In the given order, with an input twice, for several block sizes."""
    a = [[1, 2, 3], [4]]
    b = [[5] * 10]
    c = [[6, 7], [8], [9]]
    prefixes = [
        write_pair(tmp_path / name, texts) for name, texts in (("c", c), ("a", a), ("b", b))
    ]
    expected = write_pair(tmp_path / "expected", [*c, *a, *b, *c])
    monkeypatch.setattr(indexed_writer, "BLOCK_ITEMS", block)
    reports: list[MergeProgress] = []
    done = merge([*prefixes, prefixes[0]], str(tmp_path / "out"), reports.append)
    assert content(tmp_path / "out") == content(expected)
    assert done == MergeProgress(4, WriteCounts(22, 9, 9), 44, 44)
    assert [merged.written.documents for merged in reports] == [3, 5, 6, 9]


def test_empty_pair_adds_nothing(tmp_path: Path) -> None:
    full = write_pair(tmp_path / "full", [[1]])
    empty = write_pair(tmp_path / "empty", [])
    merge([empty, full, empty], str(tmp_path / "out"))
    assert content(tmp_path / "out") == content(full)


def test_pairs_of_a_folder_are_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b", "a.x", "c"):
        write_pair(tmp_path / name, [[1]])
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "sub").mkdir()
    assert prefixes_in(str(tmp_path)) == [str(tmp_path / name) for name in ("a.x", "b", "c")]
    (tmp_path / "a.x.bin").unlink()
    (tmp_path / "c.idx").unlink()
    with pytest.raises(UserError) as raised:
        prefixes_in(str(tmp_path))
    assert codes(raised.value.problems) == ["incomplete-pair"] * 2
    first, second = raised.value.problems
    assert ("a.x.idx" in str(first), "c.bin" in str(second)) == (True, True)
    with raises_problem("folder-without-pairs", "input"):
        prefixes_in(str(tmp_path / "sub"))
    with raises_problem("folder-missing", "input"):
        prefixes_in(str(tmp_path / "none"))


def test_a_folder_of_another_format_is_named(tmp_path: Path) -> None:
    for case, code in (("llm.c", "data-of-other-trainer"), ("torch", "data-in-records")):
        CASES[case].write(tmp_path / case)
        with raises_problem(code, contains=case):
            prefixes_in(str(tmp_path / case))


def test_all_problems_are_reported_before_anything_is_written(tmp_path: Path) -> None:
    small = write_pair(tmp_path / "small", [[1]])
    wide = write_pair(tmp_path / "wide", [[1]], "int32")
    truncated = write_pair(tmp_path / "truncated", [[1, 2]])
    Path(truncated + ".bin").write_bytes(b"\x01\x00")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError) as raised:
        merge([small, wide, truncated, str(tmp_path / "none")], f"{small}.bin/out")
    assert codes(raised.value.problems) == [
        "not-a-folder",
        "token-file-size-mismatch",
        "token-file-missing",
        "merging-different-dtypes",
    ]
    assert sorted(os.listdir(tmp_path)) == before


def test_folder_of_the_output_is_created(tmp_path: Path) -> None:
    small = write_pair(tmp_path / "small", [[1]])
    assert merge([small], str(tmp_path / "a" / "b" / "all")).written.tokens == 1
    assert content(str(tmp_path / "a" / "b" / "all")) == content(small)


def test_output_that_is_an_input_is_rejected(tmp_path: Path) -> None:
    small = write_pair(tmp_path / "small", [[1]])
    before = content(small)
    with raises_problem("output-is-an-input", "output_prefix"):
        merge([small], f"{tmp_path}/../{tmp_path.name}/small")
    assert content(small) == before


def test_merge_of_more_pairs_than_file_descriptors(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / str(number), [[number]]) for number in range(40)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/dev/fd"))) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        assert merge(prefixes, str(tmp_path / "all")).written.tokens == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
