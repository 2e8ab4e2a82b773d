"""Liveness of processes, and recognition of launchers."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from megatron_ds.config.problems import Problem
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.watch import liveness
from megatron_ds.launch.watch.liveness import (
    HostLocation,
    ProcessHandle,
    describe_death,
    find_dead_peer,
    find_launchers,
)
from tests.tables import tables

TABLES = tables(__file__)

SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPS)
    yield process
    process.kill()
    process.wait()


def kill_without_reaping(child: subprocess.Popen[bytes], number: int) -> None:
    """Leaves the process as a zombie."""
    child.send_signal(number)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_this_process_is_alive() -> None:
    assert ProcessHandle.of(os.getpid()).is_alive()
    assert find_dead_peer({0: ProcessHandle.of(os.getpid())}) is None


@linux
def test_zombie_is_dead_and_its_signal_is_known(child: subprocess.Popen[bytes]) -> None:
    process = ProcessHandle.of(child.pid)
    assert process.is_alive()
    kill_without_reaping(child, signal.SIGSEGV)
    assert not process.is_alive()
    assert process.exit_status() == -signal.SIGSEGV
    found = find_dead_peer({3: process})
    assert (found.rank, found.code) == (3, ExitCode.PEER_LOST)
    assert str(child.pid) in found.reason
    assert "signal 11 (SIGSEGV)" in found.reason


@linux
@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (signal.SIGKILL, str(Problem("out-of-host-memory"))),
        (signal.SIGABRT, "--distributed-timeout-minutes"),
    ],
)
def test_signal_hints_at_its_cause(
    number: signal.Signals, hint: str, child: subprocess.Popen[bytes]
) -> None:
    process = ProcessHandle.of(child.pid)
    kill_without_reaping(child, number)
    assert f"signal {int(number)} ({number.name})" in describe_death(process)
    assert hint in describe_death(process)
    child.wait()
    assert process.exit_status() is None
    assert str(Problem("out-of-host-memory")) in describe_death(process)


@linux
def test_reused_pid_is_another_process() -> None:
    assert not ProcessHandle(os.getpid(), started="1").is_alive()
    assert ProcessHandle(os.getpid(), started="1").exit_status() is None


@linux
def test_liveness_without_free_file_descriptors(child: subprocess.Popen[bytes]) -> None:
    process = ProcessHandle.of(child.pid)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    try:
        assert process.is_alive()
        child.kill()
        child.wait()
        assert not process.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_liveness_without_proc(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(liveness, "PROC", tmp_path / "nothing")
    process = ProcessHandle.of(child.pid)
    assert process == ProcessHandle(child.pid, None)
    assert process.is_alive()
    child.kill()
    child.wait()
    assert not process.is_alive()
    assert "signal 9" in describe_death(process)
    assert find_launchers() == ()


@pytest.mark.parametrize(("error", "alive"), [(PermissionError, True), (ProcessLookupError, False)])
def test_a_process_of_another_user_is_alive_without_proc(
    error: type[OSError], alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", MagicMock(side_effect=error))
    assert ProcessHandle(os.getpid(), None).is_alive() == alive


def test_ranks_of_one_host_and_pid_namespace_share_a_location() -> None:
    here = HostLocation.here()
    assert here.process.pid == os.getpid()
    assert here.host == HostLocation.here().host
    if Path("/proc/self/ns/pid").is_symlink():
        assert os.readlink("/proc/self/ns/pid") in here.host


def test_hosts_of_one_name_differ_by_boot_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Outside containers their PID namespaces have the same name, too."""
    hosts = set()
    for name in ("one", "other"):
        random = tmp_path / name / "sys" / "kernel" / "random"
        random.mkdir(parents=True)
        (random / "boot_id").write_text(f"{name}\n")
        monkeypatch.setattr(liveness, "PROC", tmp_path / name)
        hosts.add(HostLocation.here().host)
    assert len(hosts) == 2


@pytest.mark.parametrize(("parent", "above", "watched"), TABLES["command_lines"])
def test_launchers_are_recognized_by_their_command_lines(
    parent: str, above: str, watched: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for pid, up, line in ((4711, 4700, parent), (4700, 1, above)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_bytes("\0".join([*shlex.split(line), ""]).encode())
        (folder / "stat").write_text(f"{pid} (a (strange) name) S {up} " + "0 " * 17 + f"{pid}0 0")
    monkeypatch.setattr(liveness, "PROC", tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    expected = (ProcessHandle(4711, "47110"), ProcessHandle(4700, "47000"))
    assert find_launchers() == expected[:watched]
