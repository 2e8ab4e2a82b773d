"""The array cache: complete or absent, made once, whoever asks and whoever dies."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.index_cache import ArrayCache, Arrays

REPOSITORY = Path(__file__).resolve().parents[3]
BUILDER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from megatron_ds.data.index_cache import ArrayCache

folder, die = Path(sys.argv[1]), sys.argv[2] == "die"

def make():
    with open(folder / "made", "a") as file:
        file.write("x")
    return {"a": np.arange(1 << 20), "b": np.arange(3)}

if die:
    replace = os.replace
    def once(*names):
        replace(*names)
        os.kill(os.getpid(), signal.SIGKILL)
    os.replace = once
arrays = ArrayCache([folder / "cache"]).get_or_build("kind", {"seed": 1}, make)
print(int(arrays["a"].sum()), arrays["b"].tolist())
"""
EXPECTED = f"{sum(range(1 << 20))} [0, 1, 2]"


class Maker:
    def __init__(self, values: Arrays | None = None) -> None:
        self.calls = 0
        self._values = values or {"a": np.arange(5), "b": np.ones((2, 3), dtype=np.uint32)}

    def __call__(self) -> Arrays:
        self.calls += 1
        return self._values


def start(folder: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(folder), mode],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_made_once_and_read_back(tmp_path: Path) -> None:
    cache, make = ArrayCache([tmp_path / "new" / "cache"]), Maker()
    for _ in range(2):
        arrays = cache.get_or_build("kind", {"seed": 1}, make)
        assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
        assert arrays["b"].dtype == np.uint32
        assert not arrays["b"].flags.writeable
    assert make.calls == 1
    cache.get_or_build("kind", {"seed": 2}, make)
    assert make.calls == 2


def test_an_entry_that_is_not_complete_is_made_again(tmp_path: Path) -> None:
    cache, make = ArrayCache([tmp_path]), Maker()
    cache.get_or_build("kind", {}, make)
    (array,) = tmp_path.glob("*.a.npy")
    content = array.read_bytes()
    other = tmp_path / "other.npy"
    np.save(other, np.arange(6))
    for damage in (content[:-1], b"", other.read_bytes()):
        array.write_bytes(damage)
        assert cache.get_or_build("kind", {}, make)["a"].tolist() == [0, 1, 2, 3, 4]
    assert make.calls == 4
    (description,) = tmp_path.glob("*.json")
    description.write_text("{")
    cache.get_or_build("kind", {}, make)
    array.unlink()
    cache.get_or_build("kind", {}, make)
    assert make.calls == 6


def test_a_changed_byte_anywhere_is_found(tmp_path: Path) -> None:
    cache, make = ArrayCache([tmp_path]), Maker()
    cache.get_or_build("kind", {}, make)
    files = [path for path in tmp_path.iterdir() if path.suffix in (".npy", ".json")]
    assert len(files) == 3
    for path in files:
        content = path.read_bytes()
        for at in range(0, len(content), 11):
            damaged = bytearray(content)
            damaged[at] ^= 1 + at % 255
            path.write_bytes(damaged)
            arrays = cache.get_or_build("kind", {}, make)
            assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
            assert arrays["b"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".partial") == []


@pytest.mark.parametrize(
    "text",
    ["[]", "5", '{"arrays": 5}', '{"arrays": {"a": 1}}', "[" * 100_000, "\0", '{"arrays": []}'],
)
def test_a_description_of_another_kind(tmp_path: Path, text: str) -> None:
    cache, make = ArrayCache([tmp_path]), Maker()
    cache.get_or_build("kind", {}, make)
    (description,) = tmp_path.glob("*.json")
    description.write_text(text)
    assert sorted(cache.get_or_build("kind", {}, make)) == ["a", "b"]


def test_a_disk_without_room_gives_way_to_the_next_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if "small" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    small, large, make = tmp_path / "small", tmp_path / "large", Maker()
    assert ArrayCache([small, large]).get_or_build("kind", {}, make)["a"].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert make.calls == 1
    assert not [path for path in small.iterdir() if path.suffix != ".lock"]
    with pytest.raises(ValueError, match=r"small: No space left on device.*--data-cache-path"):
        ArrayCache([small]).get_or_build("kind", {}, make)


def test_a_long_kind_and_a_failing_maker(tmp_path: Path) -> None:
    cache, make = ArrayCache([tmp_path]), Maker()
    for _ in range(2):
        cache.get_or_build("k" * 300, {}, make)
    assert make.calls == 1

    def fail() -> Arrays:
        raise ValueError("no tokens")

    with pytest.raises(ValueError, match="no tokens"):
        cache.get_or_build("kind", {}, fail)
    assert sorted(cache.get_or_build("kind", {}, make)) == ["a", "b"]


def test_a_later_folder_is_read_and_the_first_writable_one_written(tmp_path: Path) -> None:
    first, second, make = tmp_path / "file" / "x", tmp_path / "second", Maker()
    (tmp_path / "file").write_text("no folder can be made below a file")
    cache = ArrayCache([first, second])
    cache.get_or_build("kind", {}, make)
    assert list(second.glob("*.json"))
    cache.get_or_build("kind", {}, make)
    assert make.calls == 1
    with pytest.raises(ValueError, match="--data-cache-path"):
        ArrayCache([first]).get_or_build("kind", {}, make)


def test_four_processes_at_once_make_it_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, "live") for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == [EXPECTED] * 4
    assert (tmp_path / "made").read_text() == "x"


def test_a_builder_killed_midway_is_followed_by_another(tmp_path: Path) -> None:
    killed = start(tmp_path, "die")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [name for name in os.listdir(tmp_path / "cache") if name.endswith(".npy")]
    processes = [start(tmp_path, "live") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == [EXPECTED] * 2
    assert (tmp_path / "made").read_text() == "xx"
