from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ds.launch.cpp_ops import ASYNC_IO, CPU_ADAM, FUSED_ADAM, SHARED_MEMORY_OP
from megatron_ds.planning import build_ops


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_missing_compiler_is_reported_with_a_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")

    assert build_ops.main(["adam"]) == 1

    message = capsys.readouterr().err
    assert "[op-without-compiler]" in message
    assert "no-such-compiler" in message


def test_stale_lock_is_reported_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()

    os.utime(lock, (0, 0))
    os.utime(lock.parent, (0, 0))

    build_ops.clear_stale_locks([CPU_ADAM])

    assert not lock.exists()
    assert str(lock) in capsys.readouterr().out


def test_failed_build_prints_the_end_of_its_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_ops, "BUILD", "raise SystemExit('linker failed')")

    assert not build_ops.build([CPU_ADAM], folder)

    printed = capsys.readouterr()
    assert "FAILED" in printed.out
    assert "linker failed" in printed.err
    assert str(folder / "cpu_adam.log") in printed.err


def test_ops_exist_in_deepspeed() -> None:
    from deepspeed.ops.op_builder import cpu

    for op in (CPU_ADAM, ASYNC_IO, FUSED_ADAM):
        assert op.name == getattr(cpu, op.builder).NAME
    assert cpu.ShareMemCommBuilder.NAME == SHARED_MEMORY_OP
