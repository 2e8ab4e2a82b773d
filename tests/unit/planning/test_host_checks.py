"""What a run needs of its host is compared with what the host has, before any rank starts."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config import device_support
from megatron_ds.launch import device
from megatron_ds.model.flops import parameters_per_rank
from megatron_ds.planning import disk_rate, host_checks, host_memory, libaio, swap_disk
from megatron_ds.planning.disk_rate import DiskRate
from megatron_ds.planning.memory_estimate import planned_memory
from tests.problems import codes
from tests.unit.engine.ds_files import merged
from tests.unit.engine.passed_key_files import KEYS

VOCAB = 32000
NVME = "--zero-stage 3 --nvme-optimizer --remote-device nvme"
DP_SIZE = 2
FAST = DiskRate(1e12, 1e12)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which everything fits, with a fast disk and libaio."""
    for name in ("total", "available", "lockable"):
        monkeypatch.setattr(host_memory, name, lambda: math.inf)
    monkeypatch.setattr(device, "kind", lambda: "cpu")
    monkeypatch.setattr(libaio, "find_problem", lambda: None)
    monkeypatch.setattr(disk_rate, "is_in_memory", lambda folder: False)
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda folder: Usage(0, 0, 10**15))


def check(
    flags: str, *, processes: int = 2, rate: DiskRate | None = FAST
) -> tuple[list[str], list[str]]:
    """Codes of the problems and of the warnings."""
    warnings: list[Problem] = []
    config = merged(flags).config.with_vocab(VOCAB)
    found = host_checks.problems(
        config, DP_SIZE, processes, rate if config.deepspeed.uses_nvme else None, warnings.append
    )
    return codes(found), codes(warnings)


def host_bytes(flags: str, processes: int) -> float:
    estimate = planned_memory(merged(flags).config.with_vocab(VOCAB), DP_SIZE, "cpu")
    return processes * (sum(estimate.host.values()) + estimate.peak)


@pytest.mark.parametrize("flags", ["", "--zero-stage 3 --cpu-optimizer --remote-device cpu"])
def test_memory_of_all_processes_of_the_host_counts(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: 1.1 * host_bytes(flags, 2))
    assert check(flags, processes=2) == ([], [])
    assert check(flags, processes=3) == (["host-memory-exceeded"], [])
    monkeypatch.setattr(host_memory, "available", lambda: 0.9 * host_bytes(flags, 2))
    assert check(flags, processes=2) == ([], ["host-memory-short"])


@pytest.mark.parametrize(
    ("free", "total", "devices", "mode", "expected"),
    [
        ("peak", "peak", 4, "error", ([], [])),
        ("peak", "peak", 2, "error", (["device-memory-exceeded"], [])),  # for two ranks each
        ("states", "peak", 4, "error", ([], ["device-memory-short"])),
        ("states", "states", 4, "error", ([], ["device-memory-short"])),
        ("nothing", "nothing", 4, "error", (["device-memory-exceeded"], [])),
        ("nothing", "nothing", 4, "warn", ([], ["device-memory-exceeded"])),
        ("nothing", "nothing", 4, "off", ([], [])),
    ],
)
def test_device_must_hold_the_states_and_should_hold_the_peak(
    free: str,
    total: str,
    devices: int,
    mode: str,
    expected: tuple[list[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimate = planned_memory(merged("").config.with_vocab(VOCAB), DP_SIZE, "xpu")
    sizes = {"nothing": 1, "states": estimate.states, "peak": estimate.peak}
    assert sizes["states"] < sizes["peak"] < 2 * sizes["states"]
    accelerator = MagicMock()
    accelerator.device_name.return_value = "xpu"
    accelerator.device_count.return_value = devices
    accelerator.total_memory.side_effect = {3 % devices: sizes[total]}.__getitem__
    accelerator.available_memory.side_effect = {3 % devices: sizes[free]}.__getitem__
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setattr(device, "kind", lambda: "xpu")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert check(f"--memory-check {mode}", processes=4) == expected


def test_a_device_of_its_own_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = MagicMock()
    accelerator.device_count.return_value = 1
    accelerator.available_memory.side_effect = ValueError("MIG-1")  # the name of a part of a device
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    found = [device.capacity(3, 4, is_shared=is_shared) for is_shared in (False, True)]
    assert [each.processes for each in found if each is not None] == [1, 4]


def test_host_memory_is_checked_as_the_flag_says_and_with_an_accelerator_for_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: 1.0)
    assert check("--memory-check warn") == ([], ["host-memory-exceeded"])
    assert check("--memory-check off") == ([], [])
    monkeypatch.setattr(device, "kind", lambda: "xpu")
    assert check("") == ([], [])
    assert check("--zero-stage 3 --cpu-optimizer")[0] == ["host-memory-exceeded"]


def test_locked_buffers_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "lockable", lambda: 8 * 2**20)
    assert check("--zero-stage 3 --cpu-optimizer") == ([], [])
    assert check(f"{NVME} --nvme-path {tmp_path}") == (["locked-memory-exceeded"], [])


def test_disk_holds_states_of_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients, two moments and parameters in fp32; a slow one is a warning."""
    flags = f"{NVME} --nvme-path {tmp_path}"
    config = merged(flags).config.with_vocab(VOCAB)
    host = planned_memory(config, DP_SIZE, "cpu").host
    assert {"master weights", "moments"}.isdisjoint(host)
    model = config.model
    stored = 2 * 5 * 4 * -(-parameters_per_rank(model, 1) // DP_SIZE)
    assert check(flags, rate=DiskRate(1e6, 1e6)) == ([], ["nvme-takes"])
    for free, expected in ((stored, []), (stored - 1, ["nvme-path-too-small"])):
        usage = Usage(0, 0, free)
        monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda folder, usage=usage: usage)
        assert check(flags) == (expected, [])
    assert check(flags, rate=None) == ([], [])


def test_disk_in_memory_counts_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{NVME} --nvme-path {tmp_path}"
    monkeypatch.setattr(host_memory, "total", lambda: 1.1 * host_bytes(flags, 2))
    assert check(flags) == ([], [])
    monkeypatch.setattr(disk_rate, "is_in_memory", lambda folder: True)
    assert check(flags) == (["host-memory-exceeded"], ["nvme-path-in-memory"])


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
        flags = f"{NVME} --nvme-path {tmp_path} --deepspeed_config {path}"
        assert check(flags) == (expected, [])


def test_unusable_folder_and_missing_library_are_found_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libaio, "find_problem", lambda: Problem("nvme-without-libaio", error=""))
    file = tmp_path / "file"
    file.touch()
    rate, problems = swap_disk.check(file)
    assert rate is None
    assert codes(problems) == ["nvme-without-libaio", "nvme-path-unusable"]


def test_folder_is_created_and_measured_and_left_empty(tmp_path: Path) -> None:
    try:
        expected = disk_rate.measure(tmp_path)
    except OSError as error:
        pytest.skip(f"the temporary folder has no direct access: {error}")
    rate, problems = swap_disk.check(tmp_path / "a" / "b")
    assert (min(expected) > 0, problems) == (True, [])
    assert rate is not None
    assert min(rate) > 0
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_file_systems_in_memory_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mounts = "/dev/a / ext4 rw 0 0\nb /mem tmpfs rw 0 0\n/dev/c /mem/disk xfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: mounts)
    found = [disk_rate.is_in_memory(Path(path)) for path in ("/x", "/mem/x", "/mem/disk/x")]
    assert found == [False, True, False]


def test_keys_are_passed_on_only_where_deepspeed_supports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    for key, (values, flags) in KEYS.items():
        path.write_text(json.dumps(values))
        config = merged(f"{flags} --deepspeed_config {path}").config.with_vocab(VOCAB)
        for reason in ("no such device", None):
            monkeypatch.setattr(device_support, "find_obstacle", lambda _, reason=reason: reason)
            warnings: list[Problem] = []
            found = host_checks.problems(config, DP_SIZE, 2, None, warnings.append)
            assert codes(found) == (["passed-key-unsupported"] if reason else [])
            quantized = "passed-key-approximates"
            expected = quantized if "quantized" in key else "passed-key-unverified"
            assert codes(warnings) == ([] if reason else [expected])
