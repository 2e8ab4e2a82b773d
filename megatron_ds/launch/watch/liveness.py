"""Liveness checks of the other ranks of this host and of the launcher.

Reads /proc where it exists and sends signal 0 elsewhere. Knows no process group, and
starts no thread.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass
from megatron_ds.launch.environment import core_numbers, host_suffix
from megatron_ds.launch.exit_codes import ExitCode

PROC = Path("/proc")
STAT_STATE = 0
"""Position in /proc/PID/stat after the command's name: field 3 of proc(5)."""
STAT_PARENT = 1
"""Position in /proc/PID/stat after the command's name: field 4 of proc(5)."""
STAT_START_TIME = 19
"""Position in /proc/PID/stat after the command's name: field 22 of proc(5)."""
STAT_EXIT_CODE = 49
"""Position in /proc/PID/stat after the command's name: field 52 of proc(5)."""

DEEPSPEED_AGENT = "deepspeed.launcher.launch"
"""The process of the `deepspeed` command that starts the ranks of one host."""
DEEPSPEED_WRAPPERS = ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner")
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
LAUNCHER_ARGUMENTS = 4
"""Leading arguments of a command line that may be the program: python -u -m NAME."""


@dataclass(frozen=True)
class ProcessHandle:
    """A process, identified by its PID and start time: PIDs are reused."""

    pid: int
    started: str | None
    """None without /proc."""

    @classmethod
    def of(cls, pid: int) -> ProcessHandle:
        fields = _stat(pid)
        return cls(pid, fields[STAT_START_TIME] if fields else None)

    def is_alive(self) -> bool:
        """Whether the process runs; a zombie counts as dead."""
        fields = _stat(self.pid)
        if self.started is None or not fields:  # also if this process is out of file descriptors
            return _exists(self.pid)
        return fields[STAT_START_TIME] == self.started and fields[STAT_STATE] not in "ZX"

    def is_stopped(self) -> bool:
        """Whether the process was stopped by a signal (SIGSTOP), until another one continues it."""
        fields = _stat(self.pid)
        return bool(fields) and fields[STAT_START_TIME] == self.started and fields[0] == "T"

    def kill(self) -> None:
        """Ends the process, if it is alive."""
        with suppress(OSError):
            if self.is_alive():
                os.kill(self.pid, signal.SIGKILL)

    def exit_status(self) -> int | None:
        """Exit status in the convention of `subprocess`, negative for a signal; None once the
        zombie was reaped."""
        fields = _stat(self.pid)
        if len(fields) <= STAT_EXIT_CODE or fields[STAT_START_TIME] != self.started:
            return None
        return os.waitstatus_to_exitcode(int(fields[STAT_EXIT_CODE]))


@dataclass(frozen=True)
class HostLocation:
    """A process with its host and PID namespace: ranks of one host can watch each other."""

    host: str
    process: ProcessHandle
    cores: frozenset[int] = frozenset()
    """Numbers of the cores that the process may use."""

    @property
    def name(self) -> str:
        """The name of the host."""
        return self.host.partition(" ")[0]

    @classmethod
    def here(cls) -> HostLocation:
        """The location of this process.

        The PID namespace separates containers of one host, the boot ID hosts of one name.
        """
        namespace = ""
        boot = ""
        with suppress(OSError):
            namespace = os.readlink(PROC / "self" / "ns" / "pid")
        with suppress(OSError):
            boot = (PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        host = f"{socket.gethostname()} {boot} {namespace}"
        return cls(host, ProcessHandle.of(os.getpid()), frozenset(core_numbers()))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cores": sorted(self.cores)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HostLocation:
        process = ProcessHandle(**values["process"])
        cores = frozenset(values["cores"])
        return cls(**{**values, "process": process, "cores": cores})


@dataclass(frozen=True)
class RankExit:
    """The exit of a rank.

    Attributes:
        rank: Global rank.
        reason: Reason of the exit: `failed: ...`, `was killed by ...`.
        code: Exit status.
        host: ` on HOST`, if the run has several.
    """

    rank: int
    reason: str
    code: int
    host: str = field(default_factory=host_suffix)

    @property
    def place(self) -> str:
        """Rank and host, for messages."""
        return f"{self.rank}{self.host}"


def find_dead_peer(peers: Mapping[int, ProcessHandle]) -> RankExit | None:
    """The exit of a rank whose process is gone; None while all are alive."""
    for rank, process in peers.items():
        if not process.is_alive():
            return RankExit(rank, describe_death(process), ExitCode.PEER_LOST)
    return None


def describe_death(process: ProcessHandle) -> str:
    """Describes the death of a process that posted no reason."""
    status = process.exit_status()
    signum = -status if status else signal.SIGKILL
    if signum < 0:
        return f"(process {process.pid}) exited with status {status} without a message"
    names = {int(known): f" ({known.name})" for known in signal.Signals}
    name = f"signal {int(signum)}{names.get(signum, '')}"
    if signum == signal.SIGABRT:
        return (
            f"(process {process.pid}) was aborted ({name}), as torch does when a collective "
            "exceeds --distributed-timeout-minutes; see its own output"
        )
    if signum != signal.SIGKILL:
        return f"(process {process.pid}) was killed by {name}"
    known = f"was killed by {name}" if status else f"is gone, as after {name}"
    return f"(process {process.pid}) {known}. {Problem('out-of-host-memory')}"


def describe_silence(
    ranks: Iterable[int], peers: Mapping[int, ProcessHandle], hosts: Mapping[int, str]
) -> dict[int, str]:
    """Describes ranks that do not answer.

    Args:
        ranks: Their numbers.
        peers: Processes of the ranks of this host.
        hosts: Names of the hosts of ranks, as far as this one knows them.
    """
    reasons = {}
    for rank in ranks:
        process = peers.get(rank)
        host = hosts.get(rank)
        if process is None:
            where = "" if host is None else f"on {host} "
            reach = f"{host or 'its host'} cannot be reached"
            reasons[rank] = f"{where}does not answer: it is stopped, or {reach}"
        else:
            stopped = " is stopped (SIGSTOP), and" if process.is_stopped() else ""
            reasons[rank] = f"(process {process.pid}){stopped} does not answer"
    return reasons


def find_launchers() -> tuple[ProcessHandle, ...]:
    """The launcher processes of this rank, which must exit when they do.

    The `deepspeed` command has two: a wrapper, which the user sees and signals, and an agent below
    it, which does not notice the wrapper's death. On other hosts the session of sshd, in which the
    agent was started, ends with it. Other parents (a shell, a scheduler's step) are not launchers:
    they may exit while their program continues.
    """
    parent = os.getppid()
    if runs(parent, (DEEPSPEED_AGENT,)):
        above = parent_of(parent) or 0
        launcher = above if runs(above, DEEPSPEED_WRAPPERS) else _ssh_session(above)
        pids = (parent, launcher) if launcher else (parent,)
        return tuple(ProcessHandle.of(pid) for pid in pids)
    return (ProcessHandle.of(parent),) if runs(parent, TORCHRUN) else ()


def _ssh_session(pid: int) -> int | None:
    """The session of sshd that started a process as its command, or as its shell's."""
    shell = command_of(pid)
    if len(shell) > 1 and shell[1] == "-c":
        pid = parent_of(pid) or 0
    return pid if command_of(pid)[0:1] and command_of(pid)[0].startswith("sshd") else None


def runs(pid: int, programs: tuple[str, ...]) -> bool:
    """Whether a process runs one of some programs, or a module of such a name."""
    return any(Path(word).name in programs for word in command_of(pid)[:LAUNCHER_ARGUMENTS])


def parent_of(pid: int) -> int | None:
    """Pid of a process's parent; None without a parent, or if it is unknown."""
    fields = _stat(pid)
    return int(fields[STAT_PARENT]) or None if fields else None


def initial_environment(pid: int) -> frozenset[str]:
    """Names of a process's initial environment variables; empty if unreadable."""
    with suppress(OSError):
        text = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
        return frozenset(entry.split("=")[0] for entry in text.split("\0"))
    return frozenset()


def command_of(pid: int) -> list[str]:
    """Program and arguments of a process; empty if unreadable."""
    with suppress(OSError):
        line = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        return line.rstrip("\0").split("\0")
    return []


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name (it may contain spaces); empty if unreadable."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
