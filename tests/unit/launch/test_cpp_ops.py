"""Building DeepSpeed's C++ ops: what is said, and what happens without a compiler."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.accelerator import get_accelerator

from megatron_ds.launch import cpp_ops, output
from megatron_ds.launch.cpp_ops import ASYNC_IO, CPU_ADAM
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


def test_a_long_wait_names_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch waits for the lock of another build without a word."""
    monkeypatch.setattr(output, "SILENT_WAIT_S", 0.0)
    builds(monkeypatch, lambda verbose: time.sleep(0.2))

    cpp_ops.build([CPU_ADAM])

    assert f"by the one that holds {folder}/cpu_adam/lock" in capsys.readouterr().err


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
