"""Two nodes on this machine, for runs that several machines start.

Each node has namespaces of Linux for its processes, network, host name and mounts (machine.sh).
Nodes share the kernel, its cores and clock, and all files but those of `scratch`. All of their
processes end with the process that started the cluster, however that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fork_server import DEADLINE, clean_environment

MACHINE = Path(__file__).with_name("machine.sh")
SLOW_LINK = Path(__file__).with_name("slow_link.py")
NODES = ("node1", "node2")
SLOTS = 2
"""Ranks per node."""
NAMESPACES = ("--mount", "--net", "--uts", "--pid", "--fork")
PATH = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd")


def find_obstacle(*programs: str) -> str | None:
    """Why there can be no cluster here, for `pytest.skip`; None if there can.

    Args:
        programs: What a test needs besides the nodes.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a cluster needs Linux and root: sudo make test-cluster"
    if missing := [name for name in (*PROGRAMS, *programs) if not shutil.which(name, path=PATH)]:
        return f"not installed: {', '.join(missing)} (make cluster-packages)"
    probe = "mount -t tmpfs tmpfs /run && ip link add probe type bridge"
    command = ["unshare", *NAMESPACES, "sh", "-c", probe]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no namespaces or no bridge: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Done:
    """Exit status and output (both streams) of a command on a node."""

    code: int
    output: str

    def succeed(self) -> str:
        assert self.code == 0, f"exit status {self.code}:\n{self.output[-20_000:]}"
        return self.output


class Node:
    """A node, by the pid of its first process."""

    def __init__(self, name: str, pid: int, cluster: Cluster) -> None:
        self.name = name
        self.pid = pid
        self._cluster = cluster
        self.accept_processes()

    def start(
        self, words: Sequence[object], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command in the shared folder; it is killed when the deadline has passed.

        Args:
            words: The command.
            log: For its output.
            environment: Variables in addition to those of a new shell on the node.
        """
        inside = ["nsenter", "--target", str(self.pid), "--all", f"--wd={self._cluster.shared}"]
        limited = ["timeout", "--kill-after=5", str(DEADLINE), *map(str, words)]
        with log.open("wb") as output:
            return subprocess.Popen(
                [*inside, "--", *limited],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._cluster.environment, **(environment or {})},
            )

    def run(self, *words: object, environment: Mapping[str, str] | None = None) -> Done:
        """Runs a command in the shared folder."""
        log = self._cluster.new_log()
        code = self.start(words, log, environment).wait()
        return Done(code, log.read_text(errors="replace"))

    def set_link(self, *, is_up: bool) -> None:
        """Plugs the cable of the node in, or pulls it out: no connection is closed then."""
        state = "up" if is_up else "down"
        self._cluster.run("ip", "link", "set", f"to-{self.name}", state).succeed()

    def kill(self) -> None:
        """Ends all processes besides those of the node itself, and its link, as a power failure."""
        self.set_link(is_up=False)
        while left := self.processes() - self._own:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)

    def accept_processes(self) -> None:
        """Takes the present processes for those of the node itself, such as its daemons."""
        self._own = self.processes()

    def left_over(self) -> list[str]:
        """Command lines of the processes besides those of the node itself."""
        found = []
        for process in self.processes() - self._own:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found.append(" ".join(process.cmdline()))
        return found

    def processes(self) -> set[psutil.Process]:
        """All processes of the node."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = set()
        for process in psutil.process_iter():
            with suppress(OSError):  # it has ended meanwhile
                if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace:
                    found.add(process)
        return found


class Cluster:
    """Starts the nodes.

    Args:
        folder: For their files; it must be empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.scratch = folder / "scratch"
        """A folder that has this path, and other contents, on each node."""
        self.shared.mkdir()
        self.environment = {**clean_environment(), "PATH": PATH, "HOME": str(self.scratch)}
        self._logs = 0
        command = ["unshare", *NAMESPACES, "--kill-child", "--mount-proc", "bash", MACHINE, folder]
        with (folder / "machine.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *map(str, command), *NODES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PATH": PATH},
            )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.end()
            raise RuntimeError((folder / "machine.log").read_text())
        (machine,) = psutil.Process(self._process.pid).children()
        self._machine = ["nsenter", "--target", str(machine.pid), "--all", "--"]
        parents = {each.cmdline()[-1]: each for each in machine.children()}
        self.nodes = [Node(name, parents[name].children()[0].pid, self) for name in NODES]

    def new_log(self) -> Path:
        self._logs += 1
        return self.folder / f"{self._logs}.log"

    def run(self, *words: object) -> Done:
        """Runs a command on the machine between the nodes, which has their switch."""
        command = [*self._machine, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout + done.stderr)

    @contextmanager
    def slow_link(self, node: Node, delay_s: float, loss: float) -> Iterator[None]:
        """Between a node and the switch, frames are late and some are lost, in both directions."""
        words = [*self._machine, sys.executable, SLOW_LINK, f"to-{node.name}", delay_s, loss]
        with subprocess.Popen(list(map(str, words)), stdin=-1, stdout=-1) as link:
            assert link.stdout is not None
            assert link.stdout.readline() == b"ready\n"
            yield
            link.communicate()  # the end of its input ends it
            assert link.returncode == 0

    def run_on_all(
        self, *words: object, environment: Mapping[str, str] | None = None
    ) -> list[Done]:
        """Runs a command on all nodes at the same time; `{node}` in a word is the node's number."""
        logs = [self.new_log() for _ in self.nodes]
        started = [
            node.start([str(word).format(node=number) for word in words], log, environment)
            for number, (node, log) in enumerate(zip(self.nodes, logs, strict=True))
        ]
        codes = [process.wait() for process in started]
        return [
            Done(code, log.read_text(errors="replace"))
            for code, log in zip(codes, logs, strict=True)
        ]

    def end(self) -> None:
        """Ends all processes of all nodes."""
        self._process.kill()
        self._process.wait()


SLURM = """\
ClusterName=cluster
SlurmctldHost=node1
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/slurm
SlurmctldPidFile={scratch}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={scratch}
SlurmdPidFile={scratch}/slurmd.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=1
NodeName=node1,node2 CPUs={slots} State=UNKNOWN
PartitionName=all Nodes=node1,node2 Default=YES State=UP OverSubscribe=NO
"""
"""Without munge, cgroups and accounting, which would need more of the machine."""


def start_slurm(cluster: Cluster) -> None:
    """Starts Slurm on all nodes, whose commands then find it.

    Raises:
        TimeoutError: A node is not idle within 30 seconds.
    """
    configuration = cluster.folder / "slurm.conf"
    values = {"folder": cluster.folder, "scratch": cluster.scratch, "slots": SLOTS}
    configuration.write_text(SLURM.format(**values))
    configuration.with_name("cgroup.conf").write_text("IgnoreSystemd=yes\n")
    (cluster.folder / "slurm").mkdir()
    cluster.environment["SLURM_CONF"] = str(configuration)
    cluster.nodes[0].run("slurmctld").succeed()
    for done in cluster.run_on_all("slurmd"):
        done.succeed()
    end = time.monotonic() + 30
    while cluster.nodes[0].run("sinfo", "-h", "-o", "%D %T").output.split() != ["2", "idle"]:
        if time.monotonic() > end:
            logs = cluster.folder.glob("slurm*.log")
            raise TimeoutError("".join(path.read_text()[-3000:] for path in logs))
        time.sleep(0.2)
    for node in cluster.nodes:
        node.accept_processes()
