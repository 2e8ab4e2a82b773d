"""Eight processes share one index cache and encounter faults: all succeed, or report an error."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.cache_processes import PROCESSES, STORE
from tests.token_files import write_pair

SERVER = Path(__file__).with_name("cache_processes.py")
Answers = list[dict[str, Any]]
Ask = Callable[..., Answers]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder that other users may enter, unlike the temporary folders of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def data(root: Path) -> Iterator[list[str]]:
    """A blend of two token files, as --data-path, in a folder without write permission."""
    folder = root / "data"
    folder.mkdir()
    for name, first in (("a", 0), ("b", 500)):
        write_pair(
            folder / name, [range(first + i, first + 2 * i + 3) for i in range(60)], "uint16"
        )
    folder.chmod(0o555)
    yield ["2", str(folder / "a"), "1", str(folder / "b")]
    folder.chmod(0o755)


@pytest.fixture(scope="module", name="ask")
def start_server(root: Path, data: list[str]) -> Iterator[Ask]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin = process.stdin
    stdout = process.stdout

    def ask(**request: Any) -> Answers:
        marks = Path(tempfile.mkdtemp(dir=root))
        marks.chmod(0o777)
        stdin.write(json.dumps({"paths": data, "marks": str(marks), **request}) + "\n")
        stdin.flush()
        answers: Answers = json.loads(stdout.readline())
        return answers

    ask(warm=True, cache=str(root / "warm"))
    yield ask
    stdin.close()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def samples(root: Path, ask: Ask) -> str:
    """The SHA-256 of the samples that eight processes read from a complete cache."""
    answers = ask(cache=str(root / "warm"))
    (found,) = {answer["samples"] for answer in answers}
    return str(found)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def outcomes(answers: Answers) -> list[str]:
    assert len(answers) == PROCESSES
    assert not [answer for answer in answers if "traceback" in answer or "hung" in answer]
    return [next(key for key in answer if key != "reports") for answer in answers]


def check_complete(ask: Ask, cache: Path, samples: str) -> None:
    """The cache is complete, contains nothing else, and is reused unchanged."""
    assert not list(cache.glob("*.partial"))
    before = {path.name: path.stat().st_ino for path in cache.iterdir()}
    assert sum(name.endswith(".json") for name in before) == 6
    assert {answer["samples"] for answer in ask(cache=str(cache))} == {samples}
    assert {path.name: path.stat().st_ino for path in cache.iterdir()} == before


def test_empty_cache_is_built_once(ask: Ask, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache))
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    check_complete(ask, cache, samples)


@pytest.mark.parametrize(
    "fault",
    [
        *(f"{STORE}:{number}:kill" for number in (1, 3)),
        *(f"os.fsync:{number}:truncate-kill" for number in (1, 2, 4, 5, 8)),
        *(f"os.replace:{number}:kill" for number in (1, 2, 4)),
    ],
)
def test_peers_finish_when_the_builder_is_killed(
    ask: Ask, cache: Path, samples: str, fault: str
) -> None:
    answers = ask(cache=str(cache), fault=fault)
    assert sorted(outcomes(answers)) == ["killed"] + ["samples"] * (PROCESSES - 1)
    assert {answer.get("samples", samples) for answer in answers} == {samples}
    check_complete(ask, cache, samples)


def test_incomplete_cache_is_completed(ask: Ask, cache: Path, root: Path, samples: str) -> None:
    cache.mkdir()
    for path in (root / "warm").iterdir():
        content = path.read_bytes()
        if path.suffix == ".npy":
            (cache / path.name).write_bytes(content[: len(content) // 2])
            (cache / f"{path.name}.0123.partial").write_bytes(content[:9])
        elif path.name.startswith("a-"):
            (cache / path.name).write_bytes(content)
    answers = ask(cache=str(cache))
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    check_complete(ask, cache, samples)


def test_peers_give_up_when_the_builder_hangs(ask: Ask, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache), fault=f"{STORE}:1:stop", patience=1.0)
    assert sorted(outcomes(answers)) == ["error"] * (PROCESSES - 1) + ["stopped"]
    stopped = next(answer["stopped"] for answer in answers if "stopped" in answer)
    for answer in answers:
        if "error" in answer:
            assert str(stopped) in answer["error"]
            assert f"{cache}/blend-" in answer["error"]
            assert answer["codes"] == ["lock-wait-timeout"]
    assert {answer.get("samples") for answer in ask(cache=str(cache))} == {samples}


def test_waiting_process_reports_what_it_waits_for(ask: Ask, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache), fault="wait-for-peers")
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    reports = [text for answer in answers for text in answer["reports"]]
    assert any(f"{cache}/blend-" in report for report in reports)


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_file_system_without_locks(ask: Ask, cache: Path, samples: str, code: str) -> None:
    answers = ask(cache=str(cache), fault=f"fcntl.flock:1+:{code}")
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    check_complete(ask, cache, samples)


@pytest.mark.parametrize("room", [0, 200, 400])
def test_full_disk_is_reported(ask: Ask, cache: Path, room: int) -> None:
    answers = ask(cache=str(cache), fault=f"limit-file-size:{room}")
    assert outcomes(answers) == ["error"] * PROCESSES
    for answer in answers:
        assert answer["codes"] == ["index-cache-not-writable"]
        assert f"{cache}: File too large" in answer["error"]
    assert not list(cache.glob("*.partial"))


def test_folder_deleted_once_is_rebuilt(ask: Ask, cache: Path, samples: str) -> None:
    answers = ask(cache=str(cache), fault="delete-cache:once")
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES


def test_folder_deleted_repeatedly_is_reported(ask: Ask, cache: Path) -> None:
    for answer in ask(cache=str(cache), fault="delete-cache:always"):
        assert answer["codes"] == ["index-cache-not-writable"]
        assert f"{cache}: " in answer["error"]


@pytest.mark.skipif(
    not all(path.stat().st_mode & stat.S_IXOTH for path in Path(__file__).resolve().parents),
    reason="the tests are in a folder that other users cannot read",
)
def test_read_only_data_folder_uses_the_fallback(
    ask: Ask, root: Path, data: list[str], samples: str
) -> None:
    answers = ask(nobody=True)
    assert outcomes(answers) == ["error"] * PROCESSES
    for answer in answers:
        assert answer["codes"] == ["index-cache-not-writable"]
        assert f"{root}/data/index-cache: Permission denied" in answer["error"]
    fallback = Path(tempfile.mkdtemp(dir=root))
    fallback.chmod(0o777)
    answers = ask(nobody=True, fallback=str(fallback))
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
    assert sum(path.suffix == ".json" for path in fallback.iterdir()) == 6
    assert sorted(os.listdir(root / "data")) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_complete_cache_in_a_read_only_folder(ask: Ask, root: Path, samples: str) -> None:
    cache = Path(tempfile.mkdtemp(dir=root))
    ask(cache=str(cache))
    cache.chmod(0o555)
    answers = ask(cache=str(cache), nobody=True)
    cache.chmod(0o755)
    assert [answer.get("samples") for answer in answers] == [samples] * PROCESSES
