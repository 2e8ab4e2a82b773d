"""What a run needs of its host is compared with what the host has, before any rank starts."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from deepspeed import git_version_info
from torch.nn.attention import SDPBackend

from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config import passthrough
from megatron_ds.launch import device
from megatron_ds.launch.device import DeviceCapacity
from megatron_ds.model.declaration.architecture import model_spec
from megatron_ds.planning import host_checks, swap_disk
from megatron_ds.planning.host_checks import Host
from megatron_ds.planning.memory_estimate import planned_memory
from megatron_ds.planning.swap_disk import Disk, DiskRate
from tests.problems import codes
from tests.tables import tables
from tests.unit.engine.ds_files import merged
from tests.unit.engine.passed_key_files import KEYS

TABLES = tables(__file__)

VOCAB = 32000
NVME = "--zero-stage 3 --nvme-optimizer --remote-device nvme --nvme-path /disk"
DP_SIZE = 2
DISK = Disk(Path("/disk"), DiskRate(1e12, 1e12), free=10**15, is_in_memory=False)
HOST = Host("cpu", 2, total=math.inf, available=math.inf, lockable=math.inf)
"""Everything fits on it."""


def check(flags: str, **host: Any) -> tuple[list[str], list[str]]:
    """Codes of the problems and of the warnings.

    Args:
        host: What differs from `HOST`.
    """
    warnings: list[Problem] = []
    config = merged(flags).config.with_vocab(VOCAB)
    disk = DISK if config.deepspeed.uses_nvme else None
    here = dataclasses.replace(HOST, **{"disk": disk, **host})
    found = host_checks.problems(config, DP_SIZE, here, warnings.append)
    return codes(found), codes(warnings)


def host_bytes(flags: str, processes: int) -> float:
    estimate = planned_memory(merged(flags).config.with_vocab(VOCAB), DP_SIZE, "cpu")
    return processes * (sum(estimate.host.values()) + estimate.peak)


@pytest.mark.parametrize("flags", ["", "--zero-stage 3 --cpu-optimizer --remote-device cpu"])
def test_memory_of_all_processes_of_the_host_counts(flags: str) -> None:
    total = 1.1 * host_bytes(flags, 2)
    assert check(flags, total=total) == ([], [])
    assert check(flags, total=total, processes=3) == (["host-memory-exceeded"], [])
    available = 0.9 * host_bytes(flags, 2)
    assert check(flags, total=total, available=available) == ([], ["host-memory-short"])


@pytest.mark.parametrize(("free", "total", "ranks", "mode", "expected"), TABLES["devices"])
def test_device_must_hold_the_states_and_should_hold_the_peak(
    free: str, total: str, ranks: int, mode: str, expected: list[list[str]]
) -> None:
    """Claim (command-line): states that exceed the memory of an accelerator are an error before the
    start, a peak above what is free is a warning"""
    estimate = planned_memory(merged("").config.with_vocab(VOCAB), DP_SIZE, "xpu")
    sizes = {"nothing": 1, "states": estimate.states, "peak": estimate.peak}
    assert sizes["states"] < sizes["peak"] < 2 * sizes["states"]
    own = DeviceCapacity(sizes[free], sizes[total], ranks)
    assert [*check(f"--memory-check {mode}", kind="xpu", device=own)] == expected


def test_ranks_that_share_a_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def available_memory(index: int) -> int:
        if index == 0:
            raise ValueError("MIG-1")  # the name of a part of a device
        return 5

    accelerator = MagicMock(total_memory=(10, 11).__getitem__, available_memory=available_memory)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    for count, is_shared, expected in (
        (2, True, DeviceCapacity(5, 11, 2)),
        (1, True, DeviceCapacity(10, 10, 4)),
        (1, False, DeviceCapacity(10, 10, 1)),  # each process sees a device of its own
    ):
        accelerator.device_count.return_value = count
        assert device.capacity(3, 4, is_shared=is_shared) == expected


def test_host_memory_is_checked_as_the_flag_says_and_with_an_accelerator_for_its_part() -> None:
    assert check("--memory-check warn", total=1.0) == ([], ["host-memory-exceeded"])
    assert check("--memory-check off", total=1.0) == ([], [])
    assert check("", total=1.0, kind="xpu") == ([], [])
    offloaded = check("--zero-stage 3 --cpu-optimizer", total=1.0, kind="xpu")
    assert offloaded[0] == ["host-memory-exceeded"]


def test_locked_buffers_are_limited() -> None:
    assert check("--zero-stage 3 --cpu-optimizer", lockable=8 * 2**20) == ([], [])
    assert check(NVME, lockable=8 * 2**20) == (["locked-memory-exceeded"], [])


def test_disk_holds_states_of_all_processes() -> None:
    """Weights, gradients, two moments and parameters in fp32; a slow one is a warning."""
    config = merged(NVME).config.with_vocab(VOCAB)
    host = planned_memory(config, DP_SIZE, "cpu").host
    assert {"master weights", "moments"}.isdisjoint(host)
    stored = 2 * 5 * 4 * -(-model_spec(config.model).elements() // DP_SIZE)
    slow = dataclasses.replace(DISK, rate=DiskRate(1e6, 1e6))
    assert check(NVME, disk=slow) == ([], ["nvme-takes"])
    for free, expected in ((stored, []), (stored - 1, ["nvme-path-too-small"])):
        assert check(NVME, disk=dataclasses.replace(DISK, free=free)) == (expected, [])
    assert check(NVME, disk=None) == ([], [])


def test_disk_in_memory_counts_as_memory() -> None:
    total = 1.1 * host_bytes(NVME, 2)
    assert check(NVME, total=total) == ([], [])
    in_memory = dataclasses.replace(DISK, is_in_memory=True)
    found = check(NVME, total=total, disk=in_memory)
    assert found == (["host-memory-exceeded"], ["nvme-path-in-memory"])


@pytest.mark.parametrize(
    ("name", "key", "least"), [("offload_optimizer", "buffer_count", 4), ("offload_param", "", 0)]
)
def test_buffers_of_a_file_hold_what_is_swapped(
    name: str, key: str, least: int, tmp_path: Path
) -> None:
    config = merged("").config.with_vocab(VOCAB)
    key = key or "buffer_size"
    least = least or VOCAB * config.model.hidden_size // DP_SIZE
    path = tmp_path / "ds.json"
    for value, expected in ((least, []), (least - 1, ["ds-value-invalid"])):
        file = {"zero_optimization": {name: {"device": "nvme", key: value}}}
        path.write_text(json.dumps(file))
        assert check(f"{NVME} --deepspeed_config {path}") == (expected, [])


def test_unusable_folder_and_missing_library_are_found_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_disk, "find_problem", lambda: Problem("nvme-without-libaio", error=""))
    file = tmp_path / "file"
    file.touch()
    disk, problems = swap_disk.check(file)
    assert disk is None
    assert codes(problems) == ["nvme-without-libaio", "nvme-path-unusable"]


def test_folder_is_created_and_measured_and_left_empty(
    disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_disk, "find_problem", lambda: None)
    try:
        expected = swap_disk.measure(disk_folder)
    except OSError as error:
        pytest.skip(f"the temporary folder has no direct access: {error}")
    disk, problems = swap_disk.check(disk_folder / "a" / "b")
    assert (min(expected) > 0, problems) == (True, [])
    assert disk is not None
    assert min(disk.rate) > 0
    assert list((disk_folder / "a" / "b").iterdir()) == []


def test_file_systems_in_memory_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "/dev/a / ext4 rw 0 0\nb /mem tmpfs rw 0 0\n/dev/c /mem/disk xfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: mounts)
    found = [swap_disk.is_in_memory(Path(path)) for path in ("/x", "/mem/x", "/mem/disk/x")]
    assert found == [False, True, False]


def test_keys_are_passed_on_only_where_deepspeed_supports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    for key, (values, flags) in KEYS.items():
        path.write_text(json.dumps(values))
        config = merged(f"{flags} --deepspeed_config {path}").config.with_vocab(VOCAB)
        for reason in ("no such device", None):
            monkeypatch.setattr(passthrough, "unsupported_reason", lambda _, reason=reason: reason)
            warnings: list[Problem] = []
            found = host_checks.problems(config, DP_SIZE, HOST, warnings.append)
            assert codes(found) == (["passed-key-unsupported"] if reason else [])
            quantized = "passed-key-approximates"
            expected = quantized if "quantized" in key else "passed-key-unverified"
            assert codes(warnings) == ([] if reason else [expected])


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


def swapping_problems() -> list[str]:
    problem = swap_disk.find_problem()
    return [] if problem is None else codes([problem])


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert swapping_problems() == ["op-without-compiler"]


@needs_compiler
@pytest.mark.parametrize(("home", "is_installed"), [(None, False), (None, True), ("/cuda", False)])
def test_missing_toolkit_is_found(
    home: str | None, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_is_known_to_be_cpu", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", home)
    monkeypatch.setitem(git_version_info.installed_ops, "async_io", is_installed)
    assert ("nvme-without-toolkit" in swapping_problems()) is (home is None and not is_installed)


@needs_compiler
def test_missing_header_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_disk, "PROBE", "#include <no-such-header.h>")
    assert swapping_problems() == ["nvme-without-libaio"]


@pytest.mark.libaio
def test_refusing_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_disk, "PROBE", "int main() { return 0; }")
    assert swapping_problems() == []
    monkeypatch.setattr(swap_disk, "PROBE", "int main() { return 1; }")
    assert swapping_problems() == ["nvme-refused-by-kernel"]


def test_host_has_memory() -> None:
    assert 0 < host_checks.available_memory() <= host_checks.total_memory()
    assert host_checks.lockable_memory() >= 0


@pytest.mark.parametrize(("flags", "selected", "expected"), TABLES["refused"])
def test_a_kernel_of_attention_that_torch_refuses_is_an_error(
    flags: str, selected: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*_: Any, **__: Any) -> int:
        if selected is None:
            raise RuntimeError("No available kernel. Aborting execution.")
        return int(getattr(SDPBackend, selected).value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert check(flags, kind="meta")[0] == expected
    assert check(flags)[0] == []
    is_named = "--attention-backend" in flags
    assert check(flags)[1] == (["attention-backend-on-host"] if is_named else [])
