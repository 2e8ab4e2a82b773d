"""Folders that one node cannot write to and clocks that jump cost saves, and no step of the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_ds.checkpoint.metadata import check_names, list_checkpoints
from tests.cluster.agents import Agents, uninterrupted
from tests.cluster.cluster import Cluster, Node
from tests.cluster.test_network import AGENT
from tests.e2e.runs import ENDLESS, Launcher, Settings, losses
from tests.faults import compile_library
from tests.problems import printed_codes

SAVED = "successfully saved checkpoint at"
SAVED_LOCALLY = "saved local checkpoint at"
CLOCK = Path(__file__).with_name("node_clock.cpp")
HOUR = 3600


@pytest.fixture
def clocks(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    """Variables by which the clock of a node is wrong by the seconds of its `scratch/clock`."""
    library = compile_library(CLOCK, tmp_path)
    for node in cluster.nodes:
        set_clock(cluster, node, 0)
    return {"LD_PRELOAD": str(library), "NODE_CLOCK": str(cluster.scratch / "clock")}


def set_clock(cluster: Cluster, node: Node, seconds: int) -> None:
    (cluster.folder / node.name / "clock").write_text(str(seconds))


@pytest.mark.proof
@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_outlives_folders_that_a_node_cannot_write_and_clocks_that_jump(
    async_save: bool,
    cluster: Cluster,
    base: Settings,
    clocks: dict[str, str],
    launcher: Launcher,
    tmp_path: Path,
) -> None:
    """Claim (checkpoints): folders that one of two nodes cannot write to, since they are read-only
    or full, and clocks that jump by an hour, cost saves and no step"""
    save = cluster.shared / f"run-{async_save}"
    stop = cluster.shared / f"stop-{async_save}"
    local = cluster.scratch / f"local-{async_save}"
    second = cluster.nodes[1]
    cluster.run_on_all("mkdir", "-p", local)
    second.run("mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", local).succeed()
    settings = {**base, "global_batch_size": 8, "train_iters": ENDLESS, "kill_switch_path": stop}
    settings |= {"save": save, "load": save, "save_interval": 3, "async_save": async_save}
    settings |= {"local_checkpoint_dir": local, "local_save_interval": 2, "host_timeout": 10}
    settings |= {"keep_last": 3}
    agents = Agents(cluster, AGENT, settings, variables=clocks)
    outputs = [agents.start(node) for node in cluster.nodes]

    def count(text: str) -> int:
        return sum(output().count(text) for output in outputs)

    def wait_for_more(text: str, by: int = 1) -> None:
        start = time.monotonic()
        before = count(text)
        agents.wait_for(lambda: count(text) >= before + by)
        print(f"{text!r} after {time.monotonic() - start:.1f} s")

    wait_for_more(SAVED)
    for node in cluster.nodes:
        node.run("mount", "--bind", save, save).succeed()
        node.run("mount", "-o", "remount,bind,ro", save).succeed()
        wait_for_more("[save-skipped]", 2)
        assert f"Read-only file system on {node.name}: " in outputs[0]()
        node.run("umount", save).succeed()
        wait_for_more(SAVED)
    second.run("dd", "if=/dev/zero", f"of={local}/full", "bs=64k")
    wait_for_more("[local-save-failed]", 2)
    second.run("rm", local / "full").succeed()
    wait_for_more(SAVED_LOCALLY)
    for seconds in (HOUR, -HOUR):
        for node in cluster.nodes:
            set_clock(cluster, node, seconds)
            wait_for_more("\n iteration ", 15)
            wait_for_more(SAVED)
            wait_for_more(SAVED_LOCALLY)
    stop.touch()
    assert agents.wait_for_end() == [0, 0]
    second.run("umount", local).succeed()
    output = "".join(read() for read in outputs)
    assert "Traceback" not in output
    codes = set(printed_codes(output))
    assert codes == {"local-save-failed", "metrics-jsonl-unwritable", "save-skipped"}
    for path in list_checkpoints(save):
        assert check_names(path) is None
    assert {path.name for path in save.glob(".*")} == set()
    assert losses(save) == uninterrupted(launcher, settings, tmp_path / "whole")
