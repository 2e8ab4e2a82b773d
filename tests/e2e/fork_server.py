"""A process that has imported what a run needs, and forks runs: they start in a blink. No test.

Importing torch and DeepSpeed is nine tenths of a tiny run's time. A forked run is a process of its
own, with its own memory, environment, arguments and output; it begins where a Python that has
finished its imports begins. The zygote itself never trains, starts no thread and joins no group.

It reads a JSON request per line and answers each with a line:
    {"start": {"script", "argv", "environments", "logs"}}, the last two one per rank
        -> the pids of the ranks: one process group, led by the first
    {"poll": pid}
        -> null while it runs, then its status as subprocess gives it
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parent.parent.parent)
PRELOADED = (
    "megatron_ds.training.trainer",
    "deepspeed.ops.adam",
    "torch.utils.tensorboard",
)


@dataclass(frozen=True)
class Child:
    """What a forked process is to run."""

    script: str
    argv: list[str]
    environment: dict[str, str]
    log: str

    def become(self) -> None:
        """Takes this process over; returns to nobody."""
        for descriptor, path in ((0, os.devnull), (1, self.log)):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.dup2(1, 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (it lives as long as the process)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = [self.script, *self.argv]
        runpy.run_path(self.script, run_name="__main__")


def serve() -> Child | None:
    """Answers requests; gives, in a forked process, what to run there."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if "start" in request:
            started = fork_ranks(**request["start"])
            if isinstance(started, Child):
                return started
            answer = started
        else:
            answer = poll(request["poll"])
        print(json.dumps(answer), flush=True)
    return None


def fork_ranks(
    script: str, argv: list[str], environments: list[dict[str, str]], logs: list[str]
) -> list[int] | Child:
    """The pids in the zygote; in a forked process, its part."""
    pids: list[int] = []
    for environment, log in zip(environments, logs, strict=True):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            return Child(script, argv, environment, log)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    sys.path.insert(0, ROOT)
    from megatron_ds.launch import environment

    environment.prepare_environment()
    for name in PRELOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork of several threads may hang"
    print(json.dumps("ready"), flush=True)
    child = serve()
    if child is not None:
        child.become()


if __name__ == "__main__":
    main()
