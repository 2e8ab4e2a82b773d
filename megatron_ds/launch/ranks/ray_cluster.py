"""Commands on the nodes of a Ray cluster, repeated when a process or a node dies.

Each command is a Ray task, which runs it as a process of its own: a command needs nothing of Ray.
Knows no command.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import user_error

RETRIES = 5
"""Times that a command is repeated after its process or its node has died."""
PATIENCE_S = 120.0
"""Time for which a command is repeated while its output is locked: a file system may hold the lock
of a process that has died on another node."""
PROBE_S = 10.0
"""Time within which a cluster accepts a connection."""
LOOK_S = 10.0
"""Interval of the check that a live node has enough CPUs."""
NODE_S = 300.0
"""Time for which this check may fail before the run ends."""
SHOWN_CHARACTERS = 4000
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent exits."""


class RayCluster:
    """A context manager of the connection to a running cluster.

    Args:
        address: `auto` for the cluster of this machine, or `HOST:PORT`.

    Attributes:
        cores: CPUs of the nodes that have some, as Ray counts them.

    Raises:
        UserError: On entry, if there is no such cluster, or no node has a CPU.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.cores: list[int] = []

    def __enter__(self) -> RayCluster:
        import ray

        try:
            _probe(self._address)
            ray.init(self._address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise user_error("ray-not-reached", address=self._address, reason=error) from error
        self.cores = _cores()
        if not self.cores:
            ray.shutdown()
            raise user_error("ray-without-cores", address=self._address)
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        ray.shutdown()  # ends what still runs

    def run(
        self,
        commands: Mapping[str, Sequence[str]],
        cores: int,
        log: Callable[[str], None],
        *,
        noun: str = "shards",
    ) -> None:
        """Run commands of Python in the current folder, until all have succeeded.

        Args:
            commands: Script and arguments, by name.
            cores: CPUs that a command occupies.
            log: Takes messages.
            noun: What the commands make, for messages.

        Raises:
            UserError: If a command ends with an error, with its message, or is killed again and
                again, or no node has `cores` CPUs any longer. The remaining commands are ended
                then.
        """
        import ray

        task = ray.remote(_task()).options(
            num_cpus=cores,
            max_retries=RETRIES,
            retry_exceptions=[ChildProcessError],
            scheduling_strategy="SPREAD",
        )
        arguments = (str(Path.cwd()), PATIENCE_S)
        pending = {task.remote(command, *arguments): name for name, command in commands.items()}
        retries = dict.fromkeys(commands, RETRIES)
        seen = time.monotonic()
        while pending:
            ready = ray.wait(list(pending), timeout=LOOK_S)[0]
            if any(cores <= available for available in _cores()):
                seen = time.monotonic()
            elif time.monotonic() - seen > NODE_S:  # Ray itself would wait forever
                raise user_error("ray-node-lost", workers=cores, seconds=NODE_S)
            for reference in ready:
                name = pending.pop(reference)
                try:
                    code, errors = ray.get(reference)
                except ray.exceptions.RayError as error:
                    # Ray repeats no task that it could not hand to this machine's raylet, which a
                    # busy machine may cause; the end of the raylet would end this process.
                    if isinstance(error, ray.exceptions.LocalRayletDiedError) and retries[name]:
                        retries[name] -= 1
                        pending[task.remote(commands[name], *arguments)] = name
                        continue
                    raise user_error("ray-task-lost", name=name, reason=error) from error
                if code:
                    shown = errors[-SHOWN_CHARACTERS:].strip()
                    raise user_error("ray-task-failed", name=name, status=code, errors=shown)
                log(f"{len(commands) - len(pending)} of {len(commands)} {noun} are complete")


def _cores() -> list[int]:
    """CPUs of the nodes that are alive and have some."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [cpus for node in alive if (cpus := int(node.get("CPU", 0)))]


def _probe(address: str) -> None:
    """Raises OSError or ValueError if nothing listens there; Ray itself would wait minutes."""
    if address != "auto" and "://" not in address:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), PROBE_S).close()


def exit_with_task() -> None:
    """Makes this process, which a task runs, exit when the task's process dies (on Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _task() -> Callable[[Sequence[str], str, float], tuple[int, str]]:
    """The function of a task. As a local one it is sent by value: nodes need not import it."""

    def run(command: Sequence[str], folder: str, patience: float) -> tuple[int, str]:
        import subprocess
        import sys
        import time

        end = time.monotonic() + patience
        while True:
            done: Any = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode < 0:  # Ray repeats the task, possibly on another node
                raise ChildProcessError(f"killed by signal {-done.returncode}")
            if "[output-in-use]" not in done.stderr or time.monotonic() > end:
                return done.returncode, done.stderr
            time.sleep(1)

    return run
