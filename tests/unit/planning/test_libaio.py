"""The check that DeepSpeed's asynchronous file operations can be built and used."""

from __future__ import annotations

import shutil

import pytest
from deepspeed import git_version_info

from megatron_ds.launch import device
from megatron_ds.planning import host_checks, swap_disk
from tests.problems import codes

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


def found() -> list[str]:
    problem = swap_disk.find_problem()
    return [] if problem is None else codes([problem])


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert found() == ["op-without-compiler"]


@needs_compiler
@pytest.mark.parametrize(("home", "is_installed"), [(None, False), (None, True), ("/cuda", False)])
def test_missing_toolkit_is_found(
    home: str | None, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_is_known_to_be_cpu", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", home)
    monkeypatch.setitem(git_version_info.installed_ops, "async_io", is_installed)
    assert ("nvme-without-toolkit" in found()) is (home is None and not is_installed)


@needs_compiler
def test_missing_header_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_disk, "PROBE", "#include <no-such-header.h>")
    assert found() == ["nvme-without-libaio"]


@pytest.mark.libaio
def test_refusing_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_disk, "PROBE", "int main() { return 0; }")
    assert found() == []
    monkeypatch.setattr(swap_disk, "PROBE", "int main() { return 1; }")
    assert found() == ["nvme-refused-by-kernel"]


def test_host_has_memory() -> None:
    assert 0 < host_checks.available_memory() <= host_checks.total_memory()
    assert host_checks.lockable_memory() >= 0
