"""Processes that live and die, and the launchers above a rank."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ds.launch import liveness
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.liveness import (
    HostLocation,
    ProcessHandle,
    RankExit,
    describe_death,
    find_dead_peer,
    find_launchers,
)

SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPS)
    yield process
    process.kill()
    process.wait()


def end(child: subprocess.Popen[bytes], number: int) -> None:
    """Leaves it as a zombie: nobody has asked yet how it ended."""
    child.send_signal(number)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_this_process_is_alive() -> None:
    assert ProcessHandle.of(os.getpid()).alive()
    assert find_dead_peer({0: ProcessHandle.of(os.getpid())}) is None


@linux
def test_a_zombie_counts_as_dead_and_tells_its_signal(child: subprocess.Popen[bytes]) -> None:
    process = ProcessHandle.of(child.pid)
    assert process.alive()
    end(child, signal.SIGSEGV)
    assert not process.alive()
    assert process.exit_status() == -signal.SIGSEGV
    found = find_dead_peer({3: process})
    assert found is not None
    assert (found.rank, found.code) == (3, ExitCode.PEER_LOST)
    assert found.words == f"(process {child.pid}) was killed by signal 11 (SIGSEGV)"


@linux
def test_a_killed_process_is_likely_to_be_out_of_memory(child: subprocess.Popen[bytes]) -> None:
    process = ProcessHandle.of(child.pid)
    end(child, signal.SIGKILL)
    assert "was killed by signal 9 (SIGKILL). If nobody killed it" in describe_death(process)
    child.wait()
    assert process.exit_status() is None
    assert "is gone without a word, as after signal 9 (SIGKILL)." in describe_death(process)
    assert "out of host memory" in describe_death(process)


@linux
def test_an_aborted_process_names_the_timeout(child: subprocess.Popen[bytes]) -> None:
    process = ProcessHandle.of(child.pid)
    end(child, signal.SIGABRT)
    assert "--distributed-timeout-minutes" in describe_death(process)


@linux
def test_a_later_process_with_the_same_number_is_another_one() -> None:
    assert not ProcessHandle(os.getpid(), started="1").alive()
    assert ProcessHandle(os.getpid(), started="1").exit_status() is None


@linux
def test_a_process_that_can_open_no_file_takes_no_other_for_dead(
    child: subprocess.Popen[bytes],
) -> None:
    process = ProcessHandle.of(child.pid)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    try:
        assert process.alive()
        child.kill()
        child.wait()
        assert not process.alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_without_proc_a_process_is_asked_with_signal_0(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(liveness, "PROC", tmp_path / "nothing")
    process = ProcessHandle.of(child.pid)
    assert process == ProcessHandle(child.pid, None)
    assert process.alive()
    child.kill()
    child.wait()
    assert not process.alive()
    assert "signal 9" in describe_death(process)
    assert find_launchers() == ()


def test_ranks_of_one_machine_see_each_other_but_not_into_containers() -> None:
    here = HostLocation.here()
    assert here.process.pid == os.getpid()
    assert here.sees(HostLocation(here.machine, here.namespace, ProcessHandle(1, None)))
    assert not here.sees(HostLocation(here.machine, "pid:[1]", ProcessHandle(1, None)))
    assert not here.sees(HostLocation("elsewhere", here.namespace, ProcessHandle(1, None)))


def test_machines_of_one_name_are_told_apart_by_their_boot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their processes without a container seem to be of one namespace, too."""
    places = []
    for name in ("one", "other"):
        random = tmp_path / name / "sys" / "kernel" / "random"
        random.mkdir(parents=True)
        (random / "boot_id").write_text(f"{name}\n")
        monkeypatch.setattr(liveness, "PROC", tmp_path / name)
        places.append(HostLocation.here())
    assert places[0].sees(places[0])
    assert not places[0].sees(places[1])


def test_an_ending_comes_over_the_board_as_it_was() -> None:
    ending = RankExit(3, 'failed: "quotes" and ümlauts', ExitCode.ERROR)
    assert RankExit.from_json(ending.to_json()) == ending


PYTHON = "/venv/bin/python"
AGENT_LINE = [PYTHON, "-u", "-m", "deepspeed.launcher.launch", "--world_info=x", "train.py"]


@pytest.mark.parametrize(
    ("parent", "above", "watched"),
    [
        (AGENT_LINE, [PYTHON, "/venv/bin/deepspeed", "train.py"], 2),
        (AGENT_LINE, [PYTHON, "-m", "deepspeed.launcher.runner", "train.py"], 2),
        (AGENT_LINE, ["bash", "job.sh"], 1),
        ([PYTHON, "/venv/bin/torchrun", "train.py"], ["bash"], 1),
        ([PYTHON, "-m", "torch.distributed.run", "train.py"], ["bash"], 1),
        ([PYTHON, "-u", "-m", "torch.distributed.launch", "train.py"], ["bash"], 1),
        # What may end, or hand over to another parent, without the run being over.
        (["bash", "-c", "deepspeed train.py"], [PYTHON, "/venv/bin/deepspeed"], 0),
        (["nohup", "python", "train.py"], ["bash"], 0),
        (["slurmstepd: [1.0]"], ["slurmstepd"], 0),
    ],
)
def test_launchers_are_known_by_their_command_lines(
    parent: list[str],
    above: list[str],
    watched: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for pid, up, line in ((4711, 4700, parent), (4700, 1, above)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_bytes("\0".join([*line, ""]).encode())
        (folder / "stat").write_text(f"{pid} (a (strange) name) S {up} " + "0 " * 17 + f"{pid}0 0")
    monkeypatch.setattr(liveness, "PROC", tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    expected = (ProcessHandle(4711, "47110"), ProcessHandle(4700, "47000"))
    assert find_launchers() == expected[:watched]
