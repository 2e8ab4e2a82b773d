"""A run over a bad network is slow, and its losses are the same; without a network it ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.agents import Agents, uninterrupted
from tests.cluster.cluster import Cluster
from tests.e2e.runs import ENDLESS, PROGRAMS, Launcher, Settings, losses
from tests.problems import printed_codes

AGENT = f"""{PROGRAMS}/torchrun --nnodes 2 --node-rank {{node}} --nproc-per-node 1
    --master-addr node1 --master-port 29500"""


@pytest.mark.proof
def test_a_run_is_as_exact_over_a_bad_network_and_ends_without_one(
    cluster: Cluster, base: Settings, launcher: Launcher, tmp_path: Path
) -> None:
    """Claim (command-line): delayed and lost frames, and a link that is down for 5 s, change no
    loss; without a link all ranks end after `--host-timeout` and name the host"""
    if not Path("/dev/net/tun").exists():
        pytest.skip("a slow link needs /dev/net/tun")
    save = cluster.shared / "run"
    second = cluster.nodes[1]
    settings = {**base, "global_batch_size": 8, "train_iters": ENDLESS, "save": save}
    settings["host_timeout"] = 10
    agents = Agents(cluster, AGENT, settings)
    output, other_output = (agents.start(node) for node in cluster.nodes)

    def train(iterations: int) -> None:
        count = output().count("\n iteration ")
        start = time.monotonic()
        agents.wait_for_iterations(output, "2 processes", count + iterations)
        print(f"{(time.monotonic() - start) / iterations:.2f} s per iteration")

    train(2)
    with cluster.slow_link(second, delay_s=0.05, loss=0.05):
        train(2)
    train(1)
    second.set_link(is_up=False)
    time.sleep(5)
    second.set_link(is_up=True)
    train(1)
    second.set_link(is_up=False)
    try:
        assert agents.wait_for_end() == [1, 1]
    finally:
        second.set_link(is_up=True)
    for text, peer in ((output(), "rank 1 on node2"), (other_output(), "rank 0 on node1")):
        assert printed_codes(text) == ["peer-lost"]
        assert f"because {peer} has given no sign of life for 10 s" in text
    assert losses(save) == uninterrupted(launcher, settings, tmp_path / "whole")
