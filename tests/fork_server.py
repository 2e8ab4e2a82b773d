"""A process that has imported torch and DeepSpeed, and forks processes that need them.

The imports take nine tenths of the time of a tiny run. A forked process has its own memory,
environment, arguments and output, and begins where a Python that has finished its imports begins:
no process group, random state or configuration of DeepSpeed survives from one to the next. The
server itself never trains, starts no thread and joins no process group.

Run as a program, this file is the server. It reads a JSON request per line and answers each with a
line:
    {"start": {"script", "argv", "folder", "environments", "logs"}}, the last two one per rank
        -> the pids of the ranks: one process group, led by the first
    {"poll": pid}
        -> null while it runs, then its status as subprocess gives it
    {"branch": {"modules", "requests", "answers"}}
        -> the pid of a server that has imported further modules, forked from this one; it reads
           and writes these two named pipes
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
DEADLINE = 300.0
"""Seconds after which a process is considered to hang."""
PRELOADED = (
    "megatron_ds.training.run",
    "megatron_ds.training.start.rank_settings",
    "megatron_ds.training.process",
    "megatron_ds.extend",
    "megatron_ds.planning.host_checks",
    "megatron_ds.tokenizer.null",
    "deepspeed.ops.adam",
    "deepspeed.moe.layer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "torch.utils.tensorboard",
    "torch.utils.cpp_extension",
    "torch._dynamo.utils",
    "numpy.ma",
    "numpy.random",
    "rich.console",
    "rich.table",
    "cpuinfo",
    "yaml",
    "hypothesis",
    "pytest",
)
"""What takes the time of the imports. The rest of the package is imported by each process."""
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM",
    "OMPI_",
    "MV2_",
    "PMI",
    "MPI_LOCAL",
    "TORCHELASTIC_",
    "CROSS_RANK",
)
"""The beginnings of their names."""
MARK = "MEGATRON_DS_TESTS", uuid.uuid4().hex
"""A variable, and its value in the environment of every process of this test session."""


def clean_environment() -> dict[str, str]:
    """This process's environment without a launcher's variables: CPU, one thread per process."""
    names = (name for name in os.environ if not name.startswith(LAUNCHER_VARIABLES))
    kept = {name: os.environ[name] for name in names}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def rank_environments(count: int, **other: str) -> list[dict[str, str]]:
    """The environment of each of `count` ranks on this machine, as a launcher sets it."""
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **other}
    ranks = map(str, range(count))
    return [{**clean_environment(), **world, "RANK": r, "LOCAL_RANK": r} for r in ranks]


def free_port() -> int:
    """A port that no other test of this worker has got, nor one of the other worker.

    It is below those that the kernel chooses, of which gloo takes hundreds: none of them can be
    this one until its server listens.
    """
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def _ports_of_worker() -> Iterator[int]:
    """Ports of this worker of pytest, in random order."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    first = 12_000 + 5_000 * number
    count = 5_000
    return iter(random.Random().sample(range(first, first + count), count))


_ports = _ports_of_worker()


class ForkServer:
    """A client of the server.

    Args:
        process: The server.
        requests: What it reads.
        answers: What it writes.
    """

    running: ClassVar[set[int]] = set()
    """The pids of all servers."""

    def __init__(
        self, process: subprocess.Popen[str] | ForkedProcess, requests: IO[str], answers: IO[str]
    ) -> None:
        self._process = process
        self._requests = requests
        self._answers = answers
        self.running.add(process.pid)
        assert self._answer() == "ready"

    @classmethod
    def launch(cls, preload: Path | None = None) -> ForkServer:
        """Starts a server in this process's environment.

        Args:
            preload: A library that the system loads into the server and its processes.
        """
        environment = {**clean_environment(), MARK[0]: MARK[1]}
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout)

    def branch(self, modules: Sequence[str]) -> ForkServer:
        """A server that has also imported these modules, which the processes of this one have not.

        It ends with this one.
        """
        with tempfile.TemporaryDirectory() as name:
            pipes = {pipe: str(Path(name, pipe)) for pipe in ("requests", "answers")}
            for path in pipes.values():
                os.mkfifo(path)
            pid = self.ask(branch={"modules": list(modules), **pipes})
            requests = open(pipes["requests"], "w", encoding="utf-8")  # noqa: SIM115
            answers = open(pipes["answers"], encoding="utf-8")  # noqa: SIM115 (both stay open)
        return ForkServer(ForkedProcess(self, pid), requests, answers)

    def start(
        self,
        script: Path,
        argv: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        folder: Path = REPOSITORY,
    ) -> list[ForkedProcess]:
        """Forks one process group.

        Args:
            script: Program that every process runs.
            argv: Its arguments.
            environments: Environment of each process.
            logs: File for the output of each process.
            folder: Working directory.
        """
        words = {"script": str(script), "argv": list(argv), "logs": [str(log) for log in logs]}
        words["folder"] = str(folder)
        pids = self.ask(start={**words, "environments": [dict(each) for each in environments]})
        return [ForkedProcess(self, pid) for pid in pids]

    def ask(self, **request: Any) -> Any:
        print(json.dumps(request), file=self._requests, flush=True)
        return self._answer()

    def close(self) -> None:
        self._requests.close()
        self._process.wait(timeout=DEADLINE)
        self._answers.close()
        self.running.remove(self._process.pid)

    def _answer(self) -> Any:
        line = self._answers.readline()
        assert line, f"the fork server ended with status {self._process.wait()}"
        return json.loads(line)


def shared_fork_server(preload: Path | None = None, modules: tuple[str, ...] = ()) -> ForkServer:
    """The server of this test session; it ends with this process.

    Args:
        preload: As for `ForkServer.launch`.
        modules: As for `ForkServer.branch`, if there are some.
    """
    return _shared_fork_server(preload, modules)


@functools.cache  # for which a default and the same value, when given, are two calls
def _shared_fork_server(preload: Path | None, modules: tuple[str, ...]) -> ForkServer:
    if modules:
        server = _shared_fork_server(preload, ()).branch(modules)
    else:
        server = ForkServer.launch(preload)
    atexit.register(server.close)  # a branch ends before its server
    return server


class ForkedProcess:
    """A process that the fork server forked.

    The kernel says when it has ended: asking the server all the time would take a part of the two
    cores on which the processes run.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.ending = _ending_of(pid)
        """A descriptor that is readable once the process has ended. None: the system has none."""
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and wait_for_any([self], 0.0):
            self._code = self._server.ask(poll=self.pid)
            if self._code is not None and self.ending is not None:
                os.close(self.ending)
                self.ending = None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (DEADLINE if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or DEADLINE)
            wait_for_any([self], max(0.0, end - time.monotonic()))
        return code


def _ending_of(pid: int) -> int | None:
    if sys.platform != "linux":
        return None
    return os.pidfd_open(pid)  # not yet another process: the server has not read its status


def wait_for_any(processes: Sequence[ForkedProcess], seconds: float) -> bool:
    """Waits until one of some processes may have ended; returns whether one may have."""
    endings = [process.ending for process in processes]
    waiting = select.poll()
    for ending in endings:
        if ending is None:  # known to have ended, or only the server knows
            time.sleep(min(seconds, 0.01))
            return True
        waiting.register(ending, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


# The server.


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until the client closes; a forked process runs its script from here."""
    print(json.dumps("ready"), file=answers, flush=True)
    running: set[int] = set()
    for line in requests:
        request = json.loads(line)
        answer: Any
        if "start" in request:
            answer = fork_ranks(**request["start"])
            running.update(answer)
        elif "branch" in request:
            answer = fork_server(**request["branch"])
            running.add(answer)
        else:
            answer = poll(request["poll"])
            if answer is not None:
                running.discard(request["poll"])
        print(json.dumps(answer), file=answers, flush=True)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fork_server(modules: list[str], requests: str, answers: str) -> int:
    """Forks a server that imports further modules."""
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        with (
            open(requests, encoding="utf-8") as read,
            open(answers, "w", encoding="utf-8") as write,
        ):
            import_and_freeze(modules)
            serve(read, write)
        exit_without_teardown(0)
    return pid


def ask_for_the_processor_once() -> None:
    """DeepSpeed asks whenever it builds an optimizer on the host, which starts programs."""
    import cpuinfo

    facts = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: dict(facts)


def import_and_freeze(modules: Sequence[str]) -> None:
    """Collections in the forked processes skip, and do not copy, what is imported here."""
    for name in modules:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork of several threads may hang"
    gc.collect()
    gc.freeze()


def fork_ranks(
    script: str, argv: list[str], folder: str, environments: list[dict[str, str]], logs: list[str]
) -> list[int]:
    pids: list[int] = []
    for environment, log in zip(environments, logs, strict=True):
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            os.setpgid(0, pids[0] if pids else 0)
            os.chdir(folder)
            run_script(script, argv, environment, log)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def end_with_parent() -> None:
    """Ends this process with the server, also where a signal ends the server."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def run_script(script: str, argv: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """Runs the script as the main program of this process."""
    for descriptor, path in ((0, os.devnull), (1, log)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (it lives as long as the process)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *argv]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))  # as Python does
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    exit_without_teardown(status)


def exit_without_teardown(status: int) -> NoReturn:
    """Ends this process as the interpreter does, but does not release every imported module.

    That would copy the memory which this process shares with the server, for about a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    sys.path[0] = str(REPOSITORY)
    from megatron_ds.cli import flags
    from megatron_ds.config import problems
    from megatron_ds.launch import environment

    environment.prepare_environment()
    ask_for_the_processor_once()
    problems.catalogue()
    flags.training_flags().find("")  # their tables, which every run reads
    import_and_freeze(PRELOADED)
    serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
