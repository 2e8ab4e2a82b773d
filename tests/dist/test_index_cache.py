"""Eight processes at one index cache, and what may befall them: all end well, or in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.data.indexed_writer import IndexedWriter

CREW = Path(__file__).with_name("cache_processes.py")
PROCESSES = 8
Answers = list[dict[str, Any]]
Crew = Callable[..., Answers]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that other users may enter too, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def data(place: Path) -> Iterator[list[str]]:
    """A blend of two token files, as --data-path, in a folder that nobody may write."""
    folder = place / "data"
    folder.mkdir()
    for name, first in (("a", 0), ("b", 500)):
        with IndexedWriter(folder / name, "uint16") as writer:
            for number in range(60):
                writer.add_document(range(first + number, first + 2 * number + 3))
    folder.chmod(0o555)
    yield ["2", str(folder / "a"), "1", str(folder / "b")]
    folder.chmod(0o755)


@pytest.fixture(scope="module")
def ask(place: Path, data: list[str]) -> Iterator[Crew]:
    process = subprocess.Popen(
        [sys.executable, str(CREW)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def asked(**request: Any) -> Answers:
        marks = Path(tempfile.mkdtemp(dir=place))
        marks.chmod(0o777)
        stdin.write(json.dumps({"paths": data, "marks": str(marks), **request}) + "\n")
        stdin.flush()
        answers: Answers = json.loads(stdout.readline())
        return answers

    asked(warm=True, cache=str(place / "warm"))
    yield asked
    stdin.close()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def samples(place: Path, ask: Crew) -> str:
    """The SHA-256 of the right samples: what eight processes find in a cache that is complete."""
    answers = ask(cache=str(place / "warm"))
    (found,) = {answer["samples"] for answer in answers}
    return str(found)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def outcomes(answers: Answers) -> list[str]:
    assert len(answers) == PROCESSES
    assert not [answer for answer in answers if "traceback" in answer or "hung" in answer]
    return [next(key for key in answer if key != "said") for answer in answers]


def check_complete(ask: Crew, cache: Path, samples: str) -> None:
    """The cache is whole, holds nothing else, and is taken as it is."""
    assert not list(cache.glob("*.partial"))
    before = {path.name: path.stat().st_ino for path in cache.iterdir()}
    assert sum(name.endswith(".json") for name in before) == 6
    assert {answer["samples"] for answer in ask(cache=str(cache))} == {samples}
    assert {path.name: path.stat().st_ino for path in cache.iterdir()} == before


def test_an_empty_cache(ask: Crew, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache))
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    check_complete(ask, cache, samples)


@pytest.mark.parametrize(
    "fault",
    [
        *(f"killed_making:{store}" for store in (1, 3)),
        *(f"killed_writing:{fsync}" for fsync in (1, 2, 4, 5, 8)),
        *(f"killed_renaming:{replace}" for replace in (1, 2, 4)),
    ],
)
def test_the_builder_is_killed(ask: Crew, cache: Path, samples: str, fault: str) -> None:
    answers = ask(cache=str(cache), fault=fault)
    assert sorted(outcomes(answers)) == ["killed"] + ["samples"] * (PROCESSES - 1)
    assert {answer.get("samples", samples) for answer in answers} == {samples}
    check_complete(ask, cache, samples)


def test_a_half_built_cache(ask: Crew, cache: Path, place: Path, samples: str) -> None:
    cache.mkdir()
    for path in (place / "warm").iterdir():
        content = path.read_bytes()
        if path.suffix == ".npy":
            (cache / path.name).write_bytes(content[: len(content) // 2])
            (cache / f"{path.name}.0123.partial").write_bytes(content[:9])
        elif path.name.startswith("a-"):
            (cache / path.name).write_bytes(content)
    answers = ask(cache=str(cache))
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    check_complete(ask, cache, samples)


def test_the_builder_hangs(ask: Crew, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache), fault="stopped", patience=1.0)
    assert sorted(outcomes(answers)) == ["error"] * (PROCESSES - 1) + ["stopped"]
    stopped = next(answer["stopped"] for answer in answers if "stopped" in answer)
    for answer in answers:
        if "error" in answer:
            assert f"process {stopped} on " in answer["error"]
            assert f"{cache}/a-train-" in answer["error"]
            assert "if it hangs, end it" in answer["error"]
    assert {answer.get("samples") for answer in ask(cache=str(cache))} == {samples}


def test_a_waiting_process_says_what_it_waits_for(ask: Crew, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache), fault="waited_for")
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    said = [text for answer in answers for text in answer["said"]]
    assert said
    assert "waiting for " in said[0]
    assert f"{cache}/a-train-" in said[0]


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_without_locks(ask: Crew, cache: Path, samples: str, code: str) -> None:
    answers = ask(cache=str(cache), fault=f"without_locks:{code}")
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    check_complete(ask, cache, samples)


@pytest.mark.parametrize("room", [0, 200, 400])
def test_a_full_disk(ask: Crew, cache: Path, room: int) -> None:
    answers = ask(cache=str(cache), fault=f"no_room:{room}")
    assert outcomes(answers) == ["error"] * PROCESSES
    for answer in answers:
        assert f"cannot be written ({cache}: File too large)" in answer["error"]
        assert "--data-cache-path" in answer["error"]
    assert not list(cache.glob("*.partial"))


def test_the_folder_is_deleted_once(ask: Crew, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache), fault="deleted:once")
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES


def test_the_folder_is_deleted_always(ask: Crew, cache: Path) -> None:
    for answer in ask(cache=str(cache), fault="deleted:always"):
        assert f"the index cache cannot be written ({cache}: " in answer["error"]


def test_a_folder_of_data_that_cannot_be_written(
    ask: Crew, place: Path, data: list[str], samples: str
) -> None:
    answers = ask(nobody=True)
    assert outcomes(answers) == ["error"] * PROCESSES
    for answer in answers:
        assert f"{place}/data/index-cache: Permission denied" in answer["error"]
        assert "--data-cache-path" in answer["error"]
    fallback = Path(tempfile.mkdtemp(dir=place))
    fallback.chmod(0o777)
    answers = ask(nobody=True, fallback=str(fallback))
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    assert sum(path.suffix == ".json" for path in fallback.iterdir()) == 6
    assert sorted(os.listdir(place / "data")) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_a_complete_cache_in_a_folder_that_cannot_be_written(
    ask: Crew, place: Path, samples: str
) -> None:
    cache = Path(tempfile.mkdtemp(dir=place))
    ask(cache=str(cache))
    cache.chmod(0o555)
    answers = ask(cache=str(cache), nobody=True)
    cache.chmod(0o755)
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
