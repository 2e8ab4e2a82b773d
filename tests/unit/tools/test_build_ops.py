from __future__ import annotations

from pathlib import Path

import pytest

from tools import build_ops


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_missing_compiler_is_reported_with_a_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")

    assert build_ops.main([]) == 1

    message = capsys.readouterr().err
    assert "no-such-compiler" in message
    assert "apt install g++" in message


def test_stale_lock_is_reported_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()

    build_ops.clear_stale_locks(folder)

    assert not lock.exists()
    assert str(lock) in capsys.readouterr().out


def test_failed_build_prints_the_end_of_its_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_ops, "BUILD", "raise SystemExit('linker failed')")

    assert not build_ops.build("CPUAdamBuilder", folder)

    printed = capsys.readouterr()
    assert "FAILED" in printed.out
    assert "linker failed" in printed.err
    assert str(folder / "CPUAdamBuilder.log") in printed.err


def test_ops_exist_in_deepspeed() -> None:
    from deepspeed.ops.op_builder import cpu

    for builder in build_ops.CPU_OPS:
        assert hasattr(cpu, builder)
