"""Building DeepSpeed's C++ ops: what is said, what happens without a compiler, stale locks."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.accelerator import get_accelerator

from megatron_ds.launch import cpp_ops, output
from megatron_ds.launch.cpp_ops import ASYNC_IO, CPU_ADAM, find_stale_locks
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


def test_a_lock_that_no_process_holds_is_an_error(tmp_path: Path) -> None:
    """Also in torch's default folder, which has one level more."""
    shallow, deep = tmp_path / "cpu_adam" / "lock", tmp_path / "py311_cpu" / "comm" / "lock"
    for lock in (shallow, deep):
        lock.parent.mkdir(parents=True)
        lock.touch()
    (tmp_path / "cpu_adam" / "main.o").touch()

    assert find_stale_locks(tmp_path) == sorted([shallow, deep])
    for lock in (shallow, deep):
        with raises_problem("stale-build-lock", contains=str(lock)):
            cpp_ops.require_no_stale_locks(tmp_path)
    cpp_ops.require_no_stale_locks(tmp_path / "missing")


def test_lock_is_stale_once_its_builder_was_killed(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    command = [sys.executable, "-S", "-c", HOLD, str(lock)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    builder = subprocess.Popen(command, **pipes, text=True)
    try:
        assert (builder.stdout.readline(), find_stale_locks(tmp_path)) == ("held\n", [])
    finally:
        builder.kill()
        builder.communicate()

    assert find_stale_locks(tmp_path) == [lock]
