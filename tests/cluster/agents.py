"""Runs of torchrun, one agent per node, that something happens to while they train."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen

import psutil

from tests.cluster.cluster import Cluster, Node
from tests.e2e.runs import FAULTS, Launcher, Settings, losses, steps, to_flags
from tests.fork_server import DEADLINE

SHARES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
VARIABLES = {
    "FAULT": "iteration:1+:pause"  # lest the run is far ahead when a test has noticed something
}
BANNER = "DeepSpeed info: "


class Agents:
    """The agents of a run, and what they and their ranks print.

    Args:
        cluster: The nodes.
        command: Of an agent, without the program; `{node}` in it is the number of the node.
        settings: Of the run.
        shares_store: Whether torchrun keeps its store when it starts the ranks again.
        variables: Of the environment, instead of or besides `VARIABLES`.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: str,
        settings: Settings,
        *,
        shares_store: bool = False,
        variables: Mapping[str, str] = VARIABLES,
    ) -> None:
        self._cluster = cluster
        self._command = command
        self._variables = {**VARIABLES, **variables, SHARES: "0" if shares_store else "1"}
        self._flags = to_flags(settings)
        self._started: list[tuple[Popen[bytes], Path]] = []

    def start(self, node: Node) -> Callable[[], str]:
        """Starts the agent of a node; returns the reader of its output."""
        command = self._command.format(node=self._cluster.nodes.index(node))
        log = self._cluster.new_log()
        process = node.start([*command.split(), FAULTS, *self._flags], log, self._variables)
        self._started.append((process, log))
        return log.read_text

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Waits for a condition; fails if all agents end, or are stuck, before it holds."""
        end = time.monotonic() + DEADLINE
        while not reached():
            ended = all(process.poll() is not None for process, _ in self._started)
            if ended or time.monotonic() > end:
                raise AssertionError("".join(log.read_text() for _, log in self._started)[-20_000:])
            time.sleep(0.05)

    def wait_for_iterations(self, output: Callable[[], str], ranks: str, count: int) -> None:
        """Waits until the ranks have trained so long since they were started last.

        Args:
            output: Of the agent whose rank prints.
            ranks: Their number, as in `2 processes`.
            count: Iterations.
        """

        def reached() -> bool:
            start = output().rpartition(BANNER)[2]
            return f" {ranks} on cpu" in start and start.count("\n iteration ") >= count

        self.wait_for(reached)

    def wait_for_end(self) -> list[int]:
        """Waits for all agents; returns their exit statuses."""
        self.wait_for(lambda: all(process.poll() is not None for process, _ in self._started))
        return [process.wait() for process, _ in self._started]


def last_rank_of(node: Node) -> psutil.Process:
    """The process of the last rank on a node."""
    found = [each for each in node.processes() if str(FAULTS) in each.cmdline()[1:3]]
    return max(found, key=lambda process: process.pid)


def uninterrupted(launcher: Launcher, settings: Settings, folder: Path) -> list[float]:
    """Losses of as many iterations as a run has trained, of two ranks that nothing happens to."""
    count = len(steps(Path(settings["save"])))
    without = dict.fromkeys(
        ("load", "kill_switch_path", "local_checkpoint_dir", "local_save_interval")
    )
    alone = {**settings, **without, "save": folder, "exit_interval": count}
    launcher.start(alone, ranks=2).succeed()
    return losses(folder)
