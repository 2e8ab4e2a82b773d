"""The check that DeepSpeed's asynchronous file operations can be built and used."""

from __future__ import annotations

import shutil

import pytest

from megatron_ds.launch import host_memory, libaio
from tests.problems import codes

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


def found() -> list[str]:
    problem = libaio.find_problem()
    return [] if problem is None else codes([problem])


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert found() == ["nvme-without-compiler"]


@needs_compiler
def test_missing_header_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libaio, "PROBE", "#include <no-such-header.h>")
    assert found() == ["nvme-without-libaio"]


@pytest.mark.libaio
def test_refusing_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libaio, "PROBE", "int main() { return 0; }")
    assert found() == []
    monkeypatch.setattr(libaio, "PROBE", "int main() { return 1; }")
    assert found() == ["nvme-refused-by-kernel"]


def test_host_has_memory() -> None:
    assert 0 < host_memory.available() <= host_memory.total()
    assert host_memory.lockable() >= 0
