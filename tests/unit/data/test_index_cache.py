"""Entries of the array cache are complete or absent, and built once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.index_cache import ArrayCache, Arrays
from tests.problems import raises_problem

INVALID_DESCRIPTIONS = [
    "[]",
    "5",
    '{"arrays": 5}',
    '{"arrays": {"a": 1}}',
    "[" * 100_000,
    "\0",
    '{"arrays": []}',
]


class CountingBuilder:
    calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {"a": np.arange(5), "b": np.ones((2, 3), dtype=np.uint32)}


def test_entry_is_built_once(tmp_path: Path) -> None:
    cache = ArrayCache([tmp_path / "new" / "cache"])
    build = CountingBuilder()
    for _ in range(2):
        arrays = cache.get_or_build("kind", {"seed": 1}, build)
        assert (arrays["a"].tolist(), arrays["b"].dtype) == ([0, 1, 2, 3, 4], np.uint32)
        assert not arrays["b"].flags.writeable
    assert build.calls == 1
    cache.get_or_build("kind", {"seed": 2}, build)
    assert build.calls == 2


def test_damaged_entry_is_rebuilt(tmp_path: Path) -> None:
    cache = ArrayCache([tmp_path])
    build = CountingBuilder()
    cache.get_or_build("kind", {}, build)
    files = [path for path in tmp_path.iterdir() if path.suffix in (".npy", ".json")]
    assert len(files) == 3
    np.save(tmp_path / "other.npy", np.arange(6))
    other = (tmp_path / "other.npy").read_bytes()
    for path in files:
        content = path.read_bytes()
        damages: list[bytes | None] = [content[:-1], b"", other, None]
        for at in range(0, len(content), 11):
            damages.append(content[:at] + bytes([content[at] ^ (1 + at % 255)]) + content[at + 1 :])
        if path.suffix == ".json":
            damages += [text.encode() for text in INVALID_DESCRIPTIONS]
        for damage in damages:
            path.unlink()
            if damage is not None:
                path.write_bytes(damage)
            arrays = cache.get_or_build("kind", {}, build)
            assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
            assert arrays["b"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert not list(tmp_path.glob("*.partial"))


def test_full_disk_falls_back_to_the_next_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if "small" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    small = tmp_path / "small"
    large = tmp_path / "large"
    build = CountingBuilder()
    assert ArrayCache([small, large]).get_or_build("kind", {}, build)["a"].size == 5
    assert build.calls == 1
    assert not [path for path in small.iterdir() if path.suffix != ".lock"]
    with raises_problem("index-cache-not-writable", "data_cache_path", contains=str(small)):
        ArrayCache([small]).get_or_build("kind", {}, build)


def test_long_kind_and_failing_build(tmp_path: Path) -> None:
    cache = ArrayCache([tmp_path])
    build = CountingBuilder()
    for _ in range(2):
        cache.get_or_build("k" * 300, {}, build)
    assert build.calls == 1

    def fail() -> Arrays:
        raise ValueError("no tokens")

    with pytest.raises(ValueError, match="no tokens"):
        cache.get_or_build("kind", {}, fail)
    assert sorted(cache.get_or_build("kind", {}, build)) == ["a", "b"]


def test_first_writable_folder_is_used(tmp_path: Path) -> None:
    first = tmp_path / "file" / "x"
    second = tmp_path / "second"
    build = CountingBuilder()
    (tmp_path / "file").write_text("")
    cache = ArrayCache([first, second])
    cache.get_or_build("kind", {}, build)
    assert list(second.glob("*.json"))
    cache.get_or_build("kind", {}, build)
    assert build.calls == 1
    with raises_problem("index-cache-not-writable", "data_cache_path"):
        ArrayCache([first]).get_or_build("kind", {}, build)
