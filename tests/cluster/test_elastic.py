"""A run that torchrun starts again after a rank, or a node with its disk, is lost."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.agents import BANNER, Agents, last_rank_of, uninterrupted
from tests.cluster.cluster import Cluster
from tests.e2e.runs import ENDLESS, PROGRAMS, REPOSITORY, Launcher, Settings, losses, steps

DOCUMENTED = (REPOSITORY / "docs" / "running" / "stopping_and_failures.md").read_text()
"""The source of the command that is tested."""
LOCAL_SAVE_INTERVAL = 5


def documented_command(ranks: int, restarts: int) -> str:
    """The command of docs/running/stopping_and_failures.md without the flags of the run."""
    block = re.search(r"1 (torchrun --nnodes 1:2.*?) pretrain_gpt.py", DOCUMENTED, re.DOTALL)
    assert block is not None
    words = block[1].replace("\\\n", " ")
    for flag, number in (("--nproc-per-node", ranks), ("--max-restarts", restarts)):
        words, count = re.subn(rf"{flag} \d+", f"{flag} {number}", words)
        assert count == 1
    return f"{PROGRAMS}/{words}"


ONE_NODE = f"{PROGRAMS}/torchrun --nproc-per-node 2 --max-restarts 2"
STATIC = f"""{PROGRAMS}/torchrun --nnodes 2 --node-rank {{node}} --nproc-per-node 1
    --master-addr node1 --master-port 29500 --max-restarts 2"""


@pytest.mark.proof
@pytest.mark.parametrize(
    ("command", "nodes", "shares_store"),
    [
        pytest.param(documented_command(ranks=1, restarts=2), 2, True, id="shared store"),
        pytest.param(STATIC, 2, False, id="fixed addresses"),
        pytest.param(ONE_NODE, 1, False, id="one node"),
        pytest.param(f"{ONE_NODE} --standalone", 1, False, id="one node, --standalone"),
    ],
)
def test_a_run_survives_a_killed_rank_with_other_rendezvous(
    command: str,
    nodes: int,
    shares_store: bool,
    cluster: Cluster,
    base: Settings,
    launcher: Launcher,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id
    save = cluster.shared / name
    stop = cluster.shared / f"stop {name}"
    settings = {**base, "global_batch_size": 8, "train_iters": ENDLESS, "kill_switch_path": stop}
    settings |= {"save": save, "load": save, "save_interval": 3}
    agents = Agents(cluster, command, settings, shares_store=shares_store)
    outputs = [agents.start(node) for node in cluster.nodes[:nodes]]

    def output() -> str:
        return max((read() for read in outputs), key=len)  # of the agent whose rank prints

    agents.wait_for_iterations(output, "2 processes", 4)
    killed_at = time.monotonic()
    last_rank_of(cluster.nodes[nodes - 1]).kill()
    agents.wait_for(lambda: sum(read().count(BANNER) for read in outputs) == 2)
    agents.wait_for(lambda: len(steps(save)) > 3 and "loading checkpoint from" in output())
    print(f"the run has continued after {time.monotonic() - killed_at:.1f} s")
    before = len(steps(save))
    agents.wait_for(lambda: len(steps(save)) > before + 1)
    stop.touch()
    assert agents.wait_for_end() == [0] * nodes
    assert ("[restarts-with-old-store]" in output()) == shares_store
    assert losses(save) == uninterrupted(launcher, settings, tmp_path / "whole")


def test_a_run_survives_a_killed_rank_and_a_lost_node_and_takes_it_in_again(
    cluster: Cluster, base: Settings, launcher: Launcher, tmp_path: Path
) -> None:
    """The node that is lost has rank 0, the store of the ranks, and the lock of --save.

    Claim (command-line): with `torchrun --nnodes 1:2`, a run continues after a killed rank, and on
    the other node after the loss of a node with its disk, from the copies of at most
    `--local-save-interval` iterations before, and takes the node in again; the losses equal an
    uninterrupted run, bit for bit until the loss of the node and to 1e-5 afterwards
    """
    first, second = cluster.nodes
    save = cluster.shared / "run"
    stop = cluster.shared / "stop"
    settings = {**base, "global_batch_size": 8, "train_iters": ENDLESS, "host_timeout": 10}
    settings |= {"save": save, "load": save, "kill_switch_path": stop}
    settings |= {"local_checkpoint_dir": cluster.scratch / "local"}
    settings |= {"local_save_interval": LOCAL_SAVE_INTERVAL}
    agents = Agents(cluster, documented_command(ranks=1, restarts=2), settings)
    output = agents.start(first)
    other_output = agents.start(second)
    agents.wait_for_iterations(output, "2 processes", LOCAL_SAVE_INTERVAL + 1)
    last_rank_of(second).kill()
    agents.wait_for(lambda: output().count(BANNER) == 2)
    agents.wait_for_iterations(output, "2 processes", LOCAL_SAVE_INTERVAL + 1)

    first.kill()
    shutil.rmtree(cluster.folder / first.name / "local")
    killed_at = time.monotonic()
    trained = len(steps(save))
    agents.wait_for_iterations(other_output, "1 process", 1)
    print(f"the other node has continued after {time.monotonic() - killed_at:.1f} s")
    restored = int(other_output().rpartition("successfully loaded checkpoint")[2].split()[4])
    assert trained - LOCAL_SAVE_INTERVAL <= restored <= trained
    agents.wait_for_iterations(other_output, "1 process", 3)

    first.set_link(is_up=True)
    output = agents.start(first)
    agents.wait_for_iterations(output, "2 processes", 2)
    assert "exiting program after receiving SIGTERM" in other_output()
    stop.touch()
    assert agents.wait_for_end() == [-9, 0, 0]

    numbers = [step["iteration"] for step in steps(save)]
    assert numbers == list(range(1, len(numbers) + 1))
    expected = uninterrupted(launcher, settings, tmp_path / "whole")
    difference = np.abs(np.subtract(losses(save), expected))
    print(f"the losses of {len(numbers)} iterations differ by up to {difference.max():.1e}")
    assert not difference[:restored].any()
    assert difference.max() < 1e-5
