"""Environment variables, the process group, the device, printing and the time of start-up."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import numpy as np
import pytest
import torch

from megatron_ds.config import RuntimeConfig
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.blend.blend_schedule import blend_order
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.launch import device, environment, output, startup_timer
from megatron_ds.launch.ranks import distributed
from megatron_ds.launch.startup_timer import StartupTimer, process_age
from megatron_ds.launch.watch.liveness import HostLocation, ProcessHandle
from megatron_ds.training.loggers.jsonl_logger import JsonLines
from tests.problems import raises_problem


@pytest.fixture
def single_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that no launcher started, as the script `pretrain_gpt.py`."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["folder/pretrain_gpt.py"])
    return monkeypatch


@pytest.fixture
def clean_environment(single_process: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Undoes what `prepare_environment` sets."""
    single_process.setenv("PATH", os.environ["PATH"])
    single_process.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    single_process.setattr(environment, "_silence_libraries", lambda: None)
    return single_process


def test_ops_are_stored_in_the_virtual_environment(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clean_environment.setattr(sys, "prefix", str(tmp_path / "venv"))
    clean_environment.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))

    (tmp_path / "venv").mkdir()
    folder = environment.prepare_environment()

    assert folder == tmp_path / "venv" / "torch_extensions" / environment.cpu_type()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
    assert os.environ["PATH"].split(os.pathsep)[0] == str(tmp_path / "venv" / "bin")
    clean_environment.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "mine"))
    assert environment.prepare_environment() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_deprecated_names_of_collectives_are_not_reported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed and older versions of torch have no others."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        environment._silence_libraries()
        with pytest.raises(ValueError, match="process group"):
            getattr(torch.distributed, name)(torch.ones(2), torch.ones(2))
    assert reported == []


def test_deepspeed_can_parse_the_architectures_of_an_image(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    clean_environment.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 10.0f+PTX")
    environment.prepare_environment()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0 10.0+PTX"


@pytest.mark.parametrize("is_virtual", [True, False])
def test_ops_are_stored_at_home_without_a_writable_virtual_environment(
    is_virtual: bool, clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Per Python environment: each of them builds its own."""
    clean_environment.setattr(os, "access", lambda path, mode: False)
    clean_environment.setenv("HOME", str(tmp_path))
    folders = set()
    for name in ("one", "other"):
        clean_environment.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        clean_environment.setattr(sys, "prefix", name)
        clean_environment.setattr(sys, "base_prefix", "base" if is_virtual else name)
        folders.add(environment.prepare_environment())
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / ".cache" / "torch_extensions"}


def test_types_of_cpus_have_ops_of_their_own(tmp_path: Path) -> None:
    """The ops use the instructions of the CPU that built them; nodes may share the environment."""
    intel = "processor: {}\nmodel name: Xeon\ncpu MHz: {}\nflags: avx avx512f\n"
    texts = [
        intel.format(0, 1) + intel.format(1, 2),
        intel.format(0, 3),
        intel.replace(" avx512f", ""),
    ]
    names = []
    for text in texts:
        (tmp_path / "cpuinfo").write_text(text)
        names.append(environment.cpu_type(tmp_path / "cpuinfo"))
    assert names[0] == names[1] != names[2]
    assert environment.cpu_type(tmp_path / "missing")


@pytest.mark.usefixtures("single_process")
def test_user_error_exits_with_its_message(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, output.exit_without_traceback():
        raise UserError(Problem.of("some-code", "a message"))

    assert ended.value.code == 1
    out, err = capfd.readouterr()
    assert (out, err) == ("", "pretrain_gpt.py: a message [some-code]\n")


@pytest.mark.usefixtures("single_process")
def test_interrupt_and_closed_pipe_exit_without_a_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = KeyboardInterrupt()
    interrupt.add_note("a note")
    with pytest.raises(SystemExit) as ended, output.exit_without_traceback():
        raise interrupt
    assert ended.value.code == 130
    assert capfd.readouterr() == ("", "interrupted; a note\n")

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended, output.exit_without_traceback():
            print("unread")
    assert ended.value.code == 141
    assert capfd.readouterr() == ("", "")


def test_other_errors_keep_their_tracebacks(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="invalid literal"), output.exit_without_traceback():
        int("x")
    with pytest.raises(IndexError, match="of a dataset of 0"), output.exit_without_traceback():
        GPTDataset(MagicMock(cache=None), MagicMock(), 5)[0]

    assert capfd.readouterr().err == ""


def test_printing_survives_a_closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the `tee` of a pipe, while the run still has to save."""
    reading, writing = os.pipe()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output.print_on_rank("read")
        assert os.read(reading, 100) == b"read\n"
        os.close(reading)
        output.print_on_rank("unread")
        output.print_on_rank("also unread")


def test_torchrun_summary_shows_the_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    output.write_torchelastic_error_file("rank 1: failed: message")
    failure = ProcessFailure(local_rank=1, pid=5, exitcode=1, error_file=str(file))
    assert failure.message["extraInfo"]["py_callstack"] == "rank 1: failed: message"
    assert failure.timestamp > 0

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    output.write_torchelastic_error_file("other launchers have no summary")


@pytest.mark.parametrize(
    ("run", "restarts", "shares", "expected"),
    [
        ("run", "3", "True", True),
        ("run", "0", "True", False),
        ("run", "3", "False", False),
        ("none", "3", "True", False),
    ],
)
def test_torchrun_keeps_the_store_of_a_rendezvous_for_its_restarts(
    run: str, restarts: str, shares: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares)
    assert environment.restarts_with_old_store() == expected


def test_peers_are_the_other_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "ExitBoard", lambda: None)
    ranks = {
        pid: HostLocation(host, ProcessHandle(5 + pid, "1")) for pid, host in enumerate("abaa")
    }
    context = distributed.ProcessContext(2, 4, MagicMock(), "gloo", ranks)
    assert distributed.watched_peers(context)[1] == {0: ranks[0].process, 3: ranks[3].process}
    context = distributed.ProcessContext(0, 1, MagicMock(), "gloo", {0: ranks[0]})
    assert distributed.watched_peers(context)[:2] == (None, {})


@pytest.mark.parametrize(
    ("local_rank", "local_size", "count", "is_shared", "index"),
    [
        (0, 1, 1, False, 0),
        (3, 4, 8, True, 3),
        (3, 4, 4, False, 3),
        (3, 4, 1, False, 0),
        (2, None, 4, False, 2),
    ],
)
def test_device_of_a_rank(
    local_rank: int, local_size: int | None, count: int, is_shared: bool, index: int
) -> None:
    found = device.device_index(local_rank, local_size, count, is_shared=is_shared)
    assert found == index


@pytest.mark.parametrize(
    ("local_rank", "local_size", "count", "is_shared"),
    [(0, 2, 1, True), (0, 4, 2, False), (2, None, 2, True), (0, 1, 0, False)],
)
def test_more_processes_than_devices_are_an_error_on_every_rank(
    local_rank: int, local_size: int | None, count: int, is_shared: bool
) -> None:
    with raises_problem("more-processes-than-devices"):
        device.device_index(local_rank, local_size, count, is_shared=is_shared)


def test_deepspeed_uses_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the local rank for the index, and compares it with Open MPI's."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    monkeypatch.setenv(environment.GIVEN_LOCAL_RANK, "3")  # to be removed after the test
    environment.use_device(0)
    assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"
    assert environment.local_rank() == 3


@pytest.mark.parametrize(
    ("backend", "devices", "bound"), [(None, 4, "cuda:3"), ("gloo", 4, None), ("gloo", 2, None)]
)
def test_only_nccl_is_bound_to_the_device(
    backend: str | None, devices: int, bound: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch splits the groups of a bound backend, which gloo cannot. TF32 is set before."""
    set_precision = create_autospec(torch.set_float32_matmul_precision)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_precision)
    accelerator = MagicMock()
    accelerator.communication_backend_name.return_value = "nccl"
    accelerator.device_name = lambda index=None: "cuda" if index is None else f"cuda:{index}"
    accelerator.device = lambda index: torch.device("cuda", index)
    accelerator.device_count = lambda: devices
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    backends = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(backends, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(backends, "build_shm_op", lambda: None)
    init = create_autospec(torch.distributed.init_process_group, side_effect=InterruptedError)
    monkeypatch.setattr("torch.distributed.init_process_group", init)
    for name in ("RANK", "LOCAL_RANK", environment.GIVEN_LOCAL_RANK):
        monkeypatch.setenv(name, "3")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "4")
    config = RuntimeConfig(distributed_backend=backend, tf32=devices == 4)
    with pytest.raises(InterruptedError):
        distributed.init_distributed(config)
    assert [each.args for each in set_precision.mock_calls] == [("high",)] * (devices == 4)
    device = init.call_args.kwargs.get("device_id")
    assert (None if device is None else str(device)) == bound
    assert (os.environ["LOCAL_RANK"], environment.local_rank()) == (str(3 % devices), 3)


def test_deterministic_algorithms_are_chosen_before_the_device(
    single_process: pytest.MonkeyPatch,
) -> None:
    """No kernel may run, and no library of the device start, before the switch."""
    seen: list[tuple[str, bool, str | None]] = []

    def note(name: str) -> Any:
        def called(*_: object, **__: object) -> None:
            variable = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
            seen.append((name, torch.are_deterministic_algorithms_enabled(), variable))
            if name == "group":
                raise InterruptedError

        return called

    single_process.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    single_process.setattr(distributed, "_select_device", note("device"))
    single_process.setattr("torch.distributed.init_process_group", note("group"))
    try:
        for mode in (False, True):
            with pytest.raises(InterruptedError):
                distributed.init_distributed(RuntimeConfig(deterministic_mode=mode))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert seen == [
        *((name, False, None) for name in ("device", "group")),
        *((name, True, ":4096:8") for name in ("device", "group")),
    ]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_includes_freed_memory() -> None:
    peak = device.PeakMemory()
    start = peak.bytes()
    np.ones(2**23)  # 64 MiB, freed at once
    after = peak.bytes()
    assert after - start > 50 * 2**20
    peak.restart()
    restarted = peak.bytes()
    assert restarted < after - 50 * 2**20


def test_printing_survives_a_closed_terminal(single_process: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        os.close(ours)
        single_process.setattr(sys, "stdout", terminal)
        single_process.setattr(sys, "stderr", terminal)
        output.print_on_rank("a line of the log")
        output.print_error("an error")


def test_printing_survives_a_full_disk(single_process: pytest.MonkeyPatch) -> None:
    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    single_process.setattr(sys, "stderr", disk)
    output.print_error("lost")
    disk.full = False
    output.print_error("there is room")
    assert disk.getvalue() == "there is room\n"


def test_os_error_is_a_user_error_if_raised_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as in_package:
        JsonLines(tmp_path / "file" / "folder" / "metrics.jsonl", 0)
    with pytest.raises(OSError) as elsewhere:
        (tmp_path / "file" / "folder").mkdir()

    assert output.is_user_error(in_package.value)
    assert not output.is_user_error(elsewhere.value)


def test_value_error_of_the_package_is_a_defect() -> None:
    with pytest.raises(ValueError, match="0 sources") as raised:
        blend_order([], 3)
    assert not output.is_user_error(raised.value)


def test_phase_begins_at_the_end_of_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.5, 15.5])
    monkeypatch.setattr(startup_timer, "process_age", lambda: 0.25)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    start = StartupTimer()
    start.mark("settings")
    start.mark("libraries")
    assert start.phases == [("interpreter", 0.25), ("settings", 1.5), ("libraries", 4.0)]
    assert start.summary_line() == (
        "start-up (s) | interpreter: 0.25 | settings: 1.50 | libraries: 4.00 | all: 5.75 |"
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_process_age_increases() -> None:
    first = process_age()
    time.sleep(0.05)
    assert 0 < first < process_age()
