"""Building DeepSpeed's C++ ops: what is said, what happens without a compiler, stale locks.

Claim (command-line): only runs with offload build C++ ops, with a message on every process that
waits
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from deepspeed.accelerator import get_accelerator

from megatron_ds.launch import cpp_ops, output
from megatron_ds.launch.cpp_ops import ASYNC_IO, CPU_ADAM
from megatron_ds.launch.watch.liveness import HostLocation, ProcessHandle
from tests.problems import codes, raises_problem


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path


def builds(monkeypatch: pytest.MonkeyPatch, load: object) -> None:
    monkeypatch.setattr(
        get_accelerator(), "create_op_builder", lambda name: SimpleNamespace(load=load)
    )


@pytest.mark.parametrize("is_built", [False, True])
def test_a_build_is_announced(
    is_built: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_built:
        (folder / "cpu_adam").mkdir()
        (folder / "cpu_adam" / "cpu_adam.so").touch()
    builds(monkeypatch, lambda verbose: None)

    cpp_ops.build([CPU_ADAM])

    assert (str(CPU_ADAM) in capsys.readouterr().err) != is_built


def test_a_long_wait_names_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits for the lock of another build without a word."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    lines: list[str] = []
    monkeypatch.setattr(output, "SILENT_WAIT_S", 0.0)
    monkeypatch.setattr(output, "print_error", said.put)
    builds(monkeypatch, lambda verbose: lines.append(said.get(timeout=30)))

    cpp_ops.build([CPU_ADAM])

    assert f"by the one that holds {folder}/cpu_adam/lock" in lines[0]


def test_a_failed_build_is_a_users_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(verbose: bool) -> None:
        raise RuntimeError("Error building extension: no such header")

    builds(monkeypatch, fail)
    with raises_problem("op-build-failed", contains="no such header"):
        cpp_ops.build([ASYNC_IO])


def test_a_compiler_is_needed_only_for_ops_that_are_not_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert codes(cpp_ops.problems([CPU_ADAM, ASYNC_IO])) == ["op-without-compiler"] * 2
    for op in (CPU_ADAM, ASYNC_IO):
        (folder / op.name).mkdir()
        (folder / op.name / f"{op.name}.so").touch()
    assert cpp_ops.problems([CPU_ADAM, ASYNC_IO]) == []
    assert cpp_ops.problems([]) == []


def test_missing_headers_of_python_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_ops.sysconfig, "get_path", lambda name: str(folder))
    assert codes(cpp_ops.problems([CPU_ADAM])) == ["op-without-headers"]


HOLD = """
import os, sys
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a build of `CPU_ADAM` that no process of this host holds open."""
    monkeypatch.setattr(cpp_ops, "POLL_S", 0.01)
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return lock


def builds_once(monkeypatch: pytest.MonkeyPatch, lock: Path) -> list[bool]:
    """Whether the lock exists when torch loads the op."""
    locked: list[bool] = []
    builds(monkeypatch, lambda verbose: locked.append(lock.exists()))
    return locked


@pytest.mark.parametrize("ahead", [0.0, 3 * cpp_ops.OLD_S])
def test_a_build_in_another_container_is_awaited(
    ahead: float, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes its folder, and no process of this host holds its lock. The clock of this host is
    hours ahead of the folder's."""
    now = time.time()
    monkeypatch.setattr(cpp_ops.time, "time", lambda: now + ahead)
    monkeypatch.setattr(cpp_ops, "BUILD_SILENCE_S", 0.2)
    locked = builds_once(monkeypatch, lock)
    steps = iter(range(20))
    sleep = time.sleep

    def build_a_step(seconds: float) -> None:
        sleep(seconds * 2)
        if next(steps, None) is None:
            lock.unlink(missing_ok=True)
        else:
            (lock.parent / "main.o").write_text("")

    monkeypatch.setattr(cpp_ops.time, "sleep", build_a_step)
    cpp_ops.build([CPU_ADAM])
    assert locked == [False]


@pytest.mark.parametrize(("silence_s", "age_s"), [(0.1, 0.0), (1e9, 2 * cpp_ops.OLD_S)])
def test_a_lock_whose_folder_does_not_change_is_an_error(
    silence_s: float, age_s: float, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For some time, or if the last change was long ago. The clock of the file system is read once,
    by one file, however long the lock is watched."""
    files = Mock(wraps=tempfile.TemporaryFile)
    monkeypatch.setattr(cpp_ops.tempfile, "TemporaryFile", files)
    monkeypatch.setattr(cpp_ops, "BUILD_SILENCE_S", silence_s)
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - age_s,) * 2)
    locked = builds_once(monkeypatch, lock)
    with raises_problem("stale-build-lock", contains=str(lock)):
        cpp_ops.build([CPU_ADAM])
    assert lock.exists()
    assert not locked
    assert files.call_count == 1


def test_the_lock_of_another_op_is_of_no_interest(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = builds_once(monkeypatch, lock)
    cpp_ops.build([ASYNC_IO])
    assert locked == [True]


def test_lock_is_stale_once_its_builder_was_killed(folder: Path) -> None:
    """At once: the builder has named itself."""
    lock = folder / "cpu_adam" / "lock"
    command = [sys.executable, "-S", "-c", HOLD, str(lock)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    cpp_ops.note_builder(CPU_ADAM)
    builder = subprocess.Popen(command, **pipes, text=True)
    note = {**HostLocation.here().to_json(), "process": asdict(ProcessHandle.of(builder.pid))}
    try:
        assert (builder.stdout.readline(), cpp_ops.find_stale_lock(CPU_ADAM)) == ("held\n", None)
        (lock.parent / cpp_ops.BUILDER).write_text(json.dumps(note))
        os.utime(lock.parent / cpp_ops.BUILDER, (1, 1))  # before it took the lock
    finally:
        builder.kill()
        builder.communicate()

    assert f"process {builder.pid}" in (cpp_ops.find_stale_lock(CPU_ADAM) or "")
