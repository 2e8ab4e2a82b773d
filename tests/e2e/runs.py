"""Starts pretrain_gpt.py as a user does, reads what it writes, and leaves no process behind.

The ranks of a run get the environment that a launcher sets and form one process group, so that one
signal reaches them all. They are forked from a process that has done the imports (fork_server.py)
or started as commands. Every process has a variable in its environment that identifies those that
outlive their test, however they were started.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from megatron_ds.checkpoint.metadata import check_names, list_checkpoints
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from tests.faults import faulty_disk
from tests.fork_server import (
    DEADLINE,
    MARK,
    REPOSITORY,
    ForkedProcess,
    ForkServer,
    clean_environment,
    free_port,
    rank_environments,
    shared_fork_server,
)

Settings = Mapping[str, Any]
Record = dict[str, Any]

PROGRAMS = Path(sys.executable).parent
PRETRAIN = REPOSITORY / "pretrain_gpt.py"
LAUNCHERS: dict[str, tuple[object, ...]] = {
    "deepspeed": (PROGRAMS / "deepspeed", "--num_gpus"),
    "torchrun": (PROGRAMS / "torchrun", "--nproc_per_node"),
    "python -m torch.distributed.run": (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
    ),
}
"""Name -> command up to the number of processes."""
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Runs a command in a terminal, whose lines are copied to the output."""
ENDLESS = 100_000
"""Iterations of a run that something else must end."""
RANKS = 2
"""Of the runs that are shared."""
SCHEDULE: Settings = {
    "global_batch_size": 8,
    "train_iters": 6,
    "save_interval": 2,
    "eval_interval": 3,
    "eval_iters": 1,
}
"""Of the run that the fixture `uninterrupted` has."""
FAULTS = REPOSITORY / "tests" / "faults.py"
TIMING_KEYS = ("seconds", "tokens_per_second", "tflops", "warm_up")
"""Keys of a step's record that differ between equal runs: timings, and whether it was a warm-up."""


def to_flags(settings: Settings | Sequence[str]) -> list[str]:
    """Command-line flags of fields; True is a flag without a value, None and False omit it."""
    if not isinstance(settings, Mapping):
        return list(settings)
    words: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, tuple) else (value,))]
    return words


@dataclass(frozen=True)
class Result:
    """Exit statuses and output of a finished run."""

    codes: tuple[int, ...]
    """Exit status of each process; the negative signal number if it was killed."""
    output: str
    """Output of all processes, concatenated."""


class Run:
    """A started run: one process per rank, or one launcher."""

    def __init__(
        self, processes: Sequence[ForkedProcess | subprocess.Popen[bytes]], logs: Sequence[Path]
    ) -> None:
        self._processes = tuple(processes)
        self._logs = tuple(logs)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def stdout(self) -> str:
        """What a command wrote to it; of forked processes `output` has both."""
        return self._logs[0].read_text(errors="replace")

    @property
    def output(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def wait(self) -> Result:
        """Waits until all processes have exited.

        Raises:
            TimeoutError: The run hangs; it has been killed.
        """
        end = time.monotonic() + DEADLINE
        try:
            codes = [p.wait(timeout=max(0.0, end - time.monotonic())) for p in self._processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"the run hangs:\n{self.output[-20_000:]}") from None
        return Result(tuple(codes), self.output)

    def succeed(self) -> str:
        """Waits, requires that all processes succeed, and returns the output."""
        result = self.wait()
        assert not any(result.codes), f"exit status {result.codes}:\n{result.output[-20_000:]}"
        return result.output

    def wait_until(self, reached: Callable[[], bool], interval: float = 0.005) -> None:
        """Waits for a condition; fails if the run ends or hangs before it holds."""
        end = time.monotonic() + DEADLINE
        while not reached():
            ended = all(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() > end:
                raise AssertionError(
                    f"the run did not reach the condition:\n{self.output[-20_000:]}"
                )
            time.sleep(interval)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if any(process.poll() is None for process in self._processes):
            os.killpg(self._processes[0].pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


class Launcher:
    """Starts runs and finds all processes that they started.

    Args:
        folder: For the output of the runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[Run] = []

    def start(
        self,
        settings: Settings | Sequence[str],
        *,
        ranks: int = 1,
        script: Path = PRETRAIN,
        environment: Mapping[str, str] | None = None,
        per_rank: Sequence[Mapping[str, str]] | None = None,
        fault: str | None = None,
        fault_rank: int | None = None,
        disk_fault: str | None = None,
        folder: Path = REPOSITORY,
        modules: tuple[str, ...] = (),
    ) -> Run:
        """Forks `ranks` processes that run a script (pretrain_gpt.py), without a launcher.

        Args:
            settings: Flags by field name, or as words.
            ranks: Number of processes.
            script: Program to run.
            environment: Additional variables.
            per_rank: The variables by which each rank knows its own, instead of a launcher's.
            fault: Fault to inject, as tests/faults.py describes; runs pretrain_gpt.py.
            fault_rank: Rank on which the fault occurs. If None, it occurs on all ranks.
            disk_fault: Fault of the disk, as faulty_disk.cpp describes.
            folder: Working directory.
            modules: What the processes have imported besides, because all of them need it.
        """
        environment = dict(environment or {})
        if fault is not None:
            script = FAULTS
            environment["FAULT"] = fault
        if fault_rank is not None:
            environment["FAULT_RANK"] = str(fault_rank)
        if disk_fault is not None:
            environment["DISK_FAULT"] = disk_fault
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environments = rank_environments(ranks, **address, **environment)
        if per_rank is not None:
            environments = [{**clean_environment(), **environment, **own} for own in per_rank]
        environments = [{MARK[0]: MARK[1], **each} for each in environments]
        logs = [self._log() for _ in environments]
        server = shared_fork_server(None if disk_fault is None else faulty_disk(), modules)
        processes = server.start(script, to_flags(settings), environments, logs, folder)
        return self._register(Run(processes, logs))

    def launch(
        self, name: str, settings: Settings, script: Path = PRETRAIN, *, terminal: bool = False
    ) -> tuple[Run, int]:
        """Starts a script on two ranks with one of LAUNCHERS; returns the run and its port.

        Args:
            name: Of the launcher.
            settings: Of the run.
            script: What the ranks run.
            terminal: The launcher's output is a terminal.
        """
        port = free_port()
        command = [*LAUNCHERS[name], 2, "--master_port", port, script, *to_flags(settings)]
        if terminal:
            command = [sys.executable, "-c", TERMINAL, *command]
        return self.command(command), port

    def command(
        self,
        words: Sequence[object],
        environment: Mapping[str, str] | None = None,
        *,
        inherit_device: bool = False,
    ) -> Run:
        """Starts a command as a user does: a launcher, or plain Python.

        Args:
            words: The command.
            environment: Additional variables.
            inherit_device: Run on the device of the tests, which is the accelerator in those marked
                `gpu`, and not on the CPU.
        """
        variables = {**clean_environment(), MARK[0]: MARK[1], **(environment or {})}
        if inherit_device:
            del variables["DS_ACCELERATOR"]
            variables |= {k: v for k, v in os.environ.items() if k == "DS_ACCELERATOR"}
        logs = [self._log(), self._log()]
        with logs[0].open("wb") as stdout, logs[1].open("wb") as stderr:
            process = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=REPOSITORY,
                env=variables,
                process_group=0,
            )
        return self._register(Run([process], logs))

    def call(self, words: Sequence[str], cwd: Path, **streams: TextIO) -> int:
        """In place of `subprocess.call`: forks what Python, or the ranks of a launcher, would run.

        Args:
            words: Command with a script's name.
            cwd: Its working directory.
            streams: `stdout`.
        """
        at = next(at for at, word in enumerate(words) if word.endswith(".py"))
        options = dict(itertools.pairwise(words[:at]))
        ranks = options.get("--num_gpus") or options.get("--nproc_per_node") or "1"
        script = Path(cwd, words[at])
        run = self.start(words[at + 1 :], ranks=int(ranks), script=script, folder=Path(cwd))
        result = run.wait()
        print(result.output, file=streams.get("stdout"))
        return next(filter(None, result.codes), 0)

    def end_all(self) -> list[str]:
        """Kills all runs; returns the command lines of processes that outlived their run."""
        for run in self._runs:
            run.kill()
        self._runs.clear()
        end = time.monotonic() + 10
        while (left := self._marked()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return list(left.values())

    def wait_until_all_ended(self) -> None:
        """Waits for processes that outlive their launcher; raises TimeoutError if they remain."""
        end = time.monotonic() + DEADLINE
        while left := self._marked():
            if time.monotonic() > end:
                raise TimeoutError(f"processes outlived their run: {left}")
            time.sleep(0.05)

    def process_of_rank(self, rank: int) -> int:
        """The pid of a rank of the only active run, whose data loaders are its children."""
        pids = {pid for pid in self._marked() if f"RANK={rank}" in _environment_of(pid)}
        (found,) = (pid for pid in pids if psutil.Process(pid).ppid() not in pids)
        return found

    def _register(self, run: Run) -> Run:
        self._runs.append(run)
        return run

    def _log(self) -> Path:
        path = self._folder / f"{uuid.uuid4().hex}.log"
        path.touch()
        return path

    def _marked(self) -> dict[int, str]:
        """Running processes of the tests except fork servers: pid -> command line.

        Empty on a system without /proc.
        """
        mark = "=".join(MARK).encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) in ForkServer.running:
                continue
            try:
                if mark in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = b" ".join(words).decode(errors="replace")
            except OSError:
                continue  # it has exited meanwhile, or belongs to another user
        return found


def _environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def shared_memory_of(port: int) -> list[str]:
    """Names of shared memory that DeepSpeed created for the run with that port."""
    return [path.name for path in Path("/dev/shm").glob(f"deepspeed_*_{port}_*")]


def records(save: Path) -> list[Record]:
    """All objects of a run's metrics.jsonl."""
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps(save: Path) -> list[Record]:
    """The steps of a run's metrics.jsonl, without timings."""
    return [
        {key: value for key, value in record.items() if key not in TIMING_KEYS}
        for record in records(save)
        if "lm_loss" in record
    ]


def evaluations(save: Path) -> list[Record]:
    return [record for record in records(save) if "lm_loss" not in record]


def losses(save: Path) -> list[float]:
    return [record["lm_loss"] for record in steps(save)]


def has_trained(save: Path, iterations: int = 2) -> Callable[[], bool]:
    """A condition: metrics.jsonl, which is being written, has so many complete lines."""
    file = save / "metrics.jsonl"
    return lambda: file.exists() and file.read_text().count("\n") >= iterations


def assert_two_ranks(output: str, settings: Settings, *, short: bool) -> None:
    """A launcher started them, and their lines of iterations are those of a terminal or a file."""
    assert "2 processes on cpu" in output
    assert "data parallel 2" in output
    assert "built successfully" not in output  # every rank's line of a loaded op
    number = settings["train_iters"]
    interval = settings["log_interval"]
    form = rf"^ iteration +{interval}/ *{number} \| {'loss' if short else 'con'}"
    assert len(re.findall(form, output, flags=re.MULTILINE)) == 1, output


def assert_equal_runs(run: Path, whole: Path) -> None:
    """Both runs of SCHEDULE have the same log and, of the same iterations, the same checkpoints."""
    assert steps(run) == steps(whole)
    assert evaluations(run) == evaluations(whole)
    for path in list_checkpoints(run):
        assert check_names(path) is None
        if (whole / path.name).exists():
            found = checkpoint_differences(whole / path.name, path)
            assert not found, found[:10]
    assert (run / "latest").read_text() == "global_step6"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "6"


def checkpoint_differences(first: Path, second: Path) -> list[str]:
    """Lists where DeepSpeed's files of two checkpoints differ, compared bit for bit."""
    ours, theirs = (
        dict(_leaves({path.name: read_tensors(path) for path in folder.glob("*.pt")}))
        for folder in (first, second)
    )
    assert ours
    differing = [place for place in ours.keys() & theirs if not _same(ours[place], theirs[place])]
    return [*(ours.keys() ^ theirs.keys()), *differing]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of all that a value contains; of a container its type."""
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor):
        children = list(vars(value).items())
    else:
        yield place, value
        return
    yield place, type(value)
    for key, inner in children:
        yield from _leaves(inner, f"{place}[{key}]")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
