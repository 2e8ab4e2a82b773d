"""A run that torchrun starts again after a rank, or a node with its disk, is lost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from tests.cluster.cluster import Cluster, Node
from tests.e2e.runs import ENDLESS, FAULTS, PROGRAMS, Launcher, Settings, losses, steps, to_flags
from tests.fork_server import DEADLINE

ELASTIC = f"""{PROGRAMS}/torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 2
    --rdzv-backend c10d --rdzv-endpoint node2:29400 --rdzv-id run
    --rdzv-conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"""
"""The command of docs/stopping_and_failures.md: the restarts are for a rank and for a node."""
NOT_SHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SLOWLY = {"FAULT": "iteration:1+:pause"}
"""Lest a run is far ahead when the test has noticed something."""
SAVE_INTERVAL, LOCAL_SAVE_INTERVAL = 1000, 5
BANNER = "DeepSpeed info: "


class Agents:
    """The commands on the nodes, and what their ranks print."""

    def __init__(self, cluster: Cluster, settings: Settings, command: str) -> None:
        self._cluster, self._save = cluster, Path(settings["save"])
        self._words = [*command.split(), FAULTS, *to_flags(settings)]
        self._started: list[tuple[Popen[bytes], Path]] = []

    def start(self, node: Node) -> Callable[[], str]:
        """Starts the command on a node; returns the reader of its output."""
        log = self._cluster.new_log()
        self._started.append((node.start(self._words, log, {**NOT_SHARED, **SLOWLY}), log))
        return log.read_text

    def wait_for(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not reached():
            ended = all(process.poll() is not None for process, _ in self._started)
            if ended or time.monotonic() > end:
                raise AssertionError("".join(log.read_text() for _, log in self._started)[-20_000:])
            time.sleep(0.05)

    def wait_for_iterations(self, output: Callable[[], str], ranks: str, count: int) -> None:
        """Waits for iterations of the latest start of the ranks, of which one prints here."""

        def reached() -> bool:
            start = output().rpartition(BANNER)[2]
            return f" {ranks} on cpu" in start and start.count("\n iteration ") >= count

        self.wait_for(reached)

    def wait_for_end(self) -> list[int]:
        """Exit statuses of the commands."""
        self.wait_for(lambda: all(process.poll() is not None for process, _ in self._started))
        return [process.wait() for process, _ in self._started]


@pytest.fixture
def settings(base: Settings, cluster: Cluster, request: pytest.FixtureRequest) -> Settings:
    """A run that the file `stop` ends."""
    folder = cluster.shared / request.node.name
    return {
        **base,
        **{"global_batch_size": 8, "train_iters": ENDLESS, "save_interval": SAVE_INTERVAL},
        **{"save": folder, "load": folder, "kill_switch_path": f"{folder}.stop"},
        **{"local_checkpoint_dir": cluster.scratch / "local", "host_timeout": 10},
        "local_save_interval": LOCAL_SAVE_INTERVAL,
    }


def rank_of(node: Node) -> psutil.Process:
    """The process of the last rank on a node."""
    found = [each for each in node.processes() if str(FAULTS) in each.cmdline()[1:3]]
    return max(found, key=lambda process: process.pid)


def uninterrupted(launcher: Launcher, settings: Settings, folder: Path) -> list[float]:
    """Losses of as many iterations of two ranks that nothing happens to."""
    count = len(steps(Path(settings["save"])))
    without = dict.fromkeys(
        ("load", "kill_switch_path", "local_checkpoint_dir", "local_save_interval")
    )
    alone = {**settings, **without, "save": folder, "exit_interval": count}
    launcher.start(alone, ranks=2).succeed()
    return losses(folder)


def test_a_run_survives_a_killed_rank_and_a_lost_node_and_takes_it_in_again(
    cluster: Cluster, settings: Settings, launcher: Launcher, tmp_path: Path
) -> None:
    """The node that is lost has rank 0, the store of the ranks, and the lock of --save."""
    (first, second), save = cluster.nodes, Path(settings["save"])
    agents = Agents(cluster, settings, ELASTIC)
    output, other_output = agents.start(first), agents.start(second)
    agents.wait_for_iterations(output, "2 processes", LOCAL_SAVE_INTERVAL + 1)
    rank_of(second).kill()
    agents.wait_for(lambda: output().count(BANNER) == 2)
    agents.wait_for_iterations(output, "2 processes", LOCAL_SAVE_INTERVAL + 1)

    first.kill()
    shutil.rmtree(cluster.folder / first.name / "local")
    killed_at, trained = time.monotonic(), len(steps(save))
    agents.wait_for_iterations(other_output, "1 process", 1)
    print(f"the other node has continued after {time.monotonic() - killed_at:.1f} s")
    restored = int(other_output().rpartition("successfully loaded checkpoint")[2].split()[4])
    assert trained - LOCAL_SAVE_INTERVAL <= restored <= trained
    agents.wait_for_iterations(other_output, "1 process", 3)

    first.set_link(is_up=True)
    output = agents.start(first)
    agents.wait_for_iterations(output, "2 processes", 2)
    assert "exiting program after receiving SIGTERM" in other_output()
    Path(settings["kill_switch_path"]).touch()
    assert agents.wait_for_end() == [-9, 0, 0]

    numbers = [step["iteration"] for step in steps(save)]
    assert numbers == list(range(1, len(numbers) + 1))
    expected = uninterrupted(launcher, settings, tmp_path / "whole")
    assert losses(save)[:restored] == expected[:restored]
    assert losses(save) == pytest.approx(expected, abs=1e-5)


def test_torchrun_of_one_node_starts_the_ranks_again_after_one_is_killed(
    cluster: Cluster, settings: Settings, launcher: Launcher, tmp_path: Path
) -> None:
    node, save = cluster.nodes[0], Path(settings["save"])
    command = f"{PROGRAMS}/torchrun --nproc-per-node 2 --max-restarts 1"
    agents = Agents(cluster, {**settings, "save_interval": 2}, command)
    output = agents.start(node)
    agents.wait_for_iterations(output, "2 processes", 3)
    rank_of(node).kill()
    agents.wait_for(lambda: output().count(BANNER) == 2)
    agents.wait_for_iterations(output, "2 processes", 3)
    Path(settings["kill_switch_path"]).touch()
    assert agents.wait_for_end() == [0]
    assert losses(save) == uninterrupted(launcher, settings, tmp_path / "whole")
