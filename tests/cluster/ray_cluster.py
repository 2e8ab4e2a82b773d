"""A cluster of two nodes of Ray, in processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.cluster.ray_nodes import ON_LOOPBACK
from tests.fork_server import DEADLINE, REPOSITORY

FOLDER = REPOSITORY / "build" / "ray"
"""Ray, where the environment has none."""
IS_IN_ENVIRONMENT = find_spec("ray") is not None
IS_INSTALLED = IS_IN_ENVIRONMENT or FOLDER.is_dir()
ATTEMPTS = 3
"""Starts of the nodes: Ray gives a node 30 seconds, which a busy machine may exceed."""


class RayNodes:
    """Two nodes in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            **ON_LOOPBACK,
            "OMP_NUM_THREADS": "1",
        }
        if not IS_IN_ENVIRONMENT:
            self.environment["PYTHONPATH"] = str(FOLDER)
        words: list[str] = []
        for _ in range(ATTEMPTS):
            with (folder / "nodes.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("ray_nodes.py")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=self.environment,
                )
            assert self._process.stdout is not None
            if words := self._process.stdout.readline().split():
                break
            self._process.wait(DEADLINE)
        assert words, (folder / "nodes.log").read_text()
        self.address, *pids = words
        self.raylets = [psutil.Process(int(pid)) for pid in pids]
        self.processes = psutil.Process(self._process.pid).children(recursive=True)

    def remove_second(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("remove\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "removed\n"

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, also if the one that inherited it has not noticed yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
