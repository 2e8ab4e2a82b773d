"""Who of a run is still alive: the other ranks of this machine, the launcher, and what the ranks
tell each other before they end.

Reads processes where the system lists them (/proc), and asks with signal 0 elsewhere. Knows no
process group, starts no thread and ends nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_ds.launch.exit_codes import ExitCode

PROC = Path("/proc")
STATE, PARENT, STARTED, STATUS = 0, 1, 19, 49
"""Places in /proc/PID/stat, counted from the first field behind the command's name: proc(5)'s
fields 3, 4, 22 and 52."""

DEEPSPEED_AGENT = "deepspeed.launcher.launch"
"""What starts the ranks of one machine for the `deepspeed` command."""
WRAPPERS = ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner")
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
LAUNCHER_WORDS = 4
"""So far into a command line its program may stand: python -u -m NAME."""


OUT_OF_HOST_MEMORY = (
    "If nobody killed it, the system did, being out of host memory (see: dmesg | grep -i 'out of "
    "memory'). What takes less of it: fewer ranks on this machine, a smaller --micro-batch-size, "
    "fewer --num-workers, nothing offloaded to the CPU"
)


@dataclass(frozen=True)
class ProcessHandle:
    """A process, told apart from a later one with the same number by when it started."""

    pid: int
    started: str | None
    """None where the system does not say."""

    @classmethod
    def of(cls, pid: int) -> ProcessHandle:
        fields = _stat(pid)
        return cls(pid, fields[STARTED] if fields else None)

    def alive(self) -> bool:
        """A process that has ended and waits for its parent to notice counts as dead."""
        fields = _stat(self.pid)
        if self.started is None or not fields:  # unreadable also when this process opens no file
            return _exists(self.pid)
        return fields[STARTED] == self.started and fields[STATE] not in "ZX"

    def exit_status(self) -> int | None:
        """As subprocess gives it: minus the signal's number. None if nobody knows (any more)."""
        fields = _stat(self.pid)
        if len(fields) <= STATUS or fields[STARTED] != self.started:
            return None
        return os.waitstatus_to_exitcode(int(fields[STATUS]))


@dataclass(frozen=True)
class HostLocation:
    """A process and where its number means something: ranks of one place can watch each other."""

    machine: str
    namespace: str
    process: ProcessHandle

    @classmethod
    def here(cls) -> HostLocation:
        """Containers of one machine number their processes apart, and two machines may have one
        name.
        """
        namespace = boot = ""
        with suppress(OSError):
            namespace = os.readlink(PROC / "self" / "ns" / "pid")
        with suppress(OSError):
            boot = (PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        machine = f"{socket.gethostname()} {boot}"
        return cls(machine, namespace, ProcessHandle.of(os.getpid()))

    def sees(self, other: HostLocation) -> bool:
        return (self.machine, self.namespace) == (other.machine, other.namespace)


@dataclass(frozen=True)
class RankExit:
    """How a rank came to its end."""

    rank: int
    words: str
    """What the rank did: "failed: ...", "was killed by ..."."""
    code: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankExit:
        return cls(**json.loads(text))


class ExitBoard(Protocol):
    """Where all ranks of a run, on whatever machine, read what ended the first of them."""

    def post(self, ending: RankExit) -> RankExit:
        """Puts an ending there unless there is one; gives the one that is there."""
        ...

    def read(self) -> RankExit | None: ...

    def count(self, what: str, more: int) -> int:
        """Adds to a count of all ranks, and gives it."""
        ...


def find_dead_peer(peers: Mapping[int, ProcessHandle]) -> RankExit | None:
    """A rank that is gone, in words; None while all are there."""
    for rank, process in peers.items():
        if not process.alive():
            return RankExit(rank, describe_death(process), ExitCode.PEER_LOST)
    return None


def describe_death(process: ProcessHandle) -> str:
    """How a process died that did not tell it itself."""
    status = process.exit_status()
    number = -status if status else signal.SIGKILL
    if number < 0:
        return f"(process {process.pid}) ended with status {status}, without saying why"
    names = {int(known): f" ({known.name})" for known in signal.Signals}
    name = f"signal {int(number)}{names.get(number, '')}"
    if number == signal.SIGABRT:
        return (
            f"(process {process.pid}) was aborted ({name}), as torch does when a collective waits "
            "longer than --distributed-timeout-minutes: what it printed says more"
        )
    if number != signal.SIGKILL:
        return f"(process {process.pid}) was killed by {name}"
    known = f"was killed by {name}" if status else f"is gone without a word, as after {name}"
    return f"(process {process.pid}) {known}. {OUT_OF_HOST_MEMORY}"


def find_launchers() -> tuple[ProcessHandle, ...]:
    """The processes that started this one as a rank, and without which it has no business.

    DeepSpeed's command has two: a wrapper, which the user sees and signals, and below it an agent,
    which does not notice the wrapper's death. A shell, a scheduler's step or anything else that is
    no launcher may end without its program ending.
    """
    parent = os.getppid()
    if _runs(parent, (DEEPSPEED_AGENT,)):
        above = int((_stat(parent) or ["?", "0"])[PARENT])
        pids = (parent, above) if _runs(above, WRAPPERS) else (parent,)
        return tuple(ProcessHandle.of(pid) for pid in pids)
    return (ProcessHandle.of(parent),) if _runs(parent, TORCHRUN) else ()


def _runs(pid: int, programs: tuple[str, ...]) -> bool:
    try:
        line = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(Path(word).name in programs for word in line.split("\0")[:LAUNCHER_WORDS])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything; empty without one."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
