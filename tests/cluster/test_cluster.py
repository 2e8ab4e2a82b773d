"""The nodes are separate, and end with the process that started them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster import NODES, Cluster, find_obstacle
from tests.fork_server import REPOSITORY

START = """
import sys
from pathlib import Path
from tests.cluster.cluster import Cluster
cluster = Cluster(Path(sys.argv[1]))
cluster.nodes[0].start(["sleep", "1000"], cluster.new_log())
cluster.nodes[1].run("setsid", "--fork", "sleep", "1000")
while not all(node.left_over() for node in cluster.nodes):
    pass
print(*(node.pid for node in cluster.nodes), flush=True)
input()
"""


def test_nodes_share_files_but_not_names_addresses_and_scratch(cluster: Cluster) -> None:
    write = f"hostname > {cluster.scratch}/name; cp {cluster.scratch}/name $(hostname)"
    cluster.run_on_all("sh", "-c", write)
    for name in NODES:
        assert (cluster.shared / name).read_text() == f"{name}\n"
    addresses = [done.output.split() for done in cluster.run_on_all("hostname", "-I")]
    assert addresses == [["10.99.1.1"], ["10.99.1.2"]]
    other = cluster.nodes[0].run("ssh", "node2", "cat", cluster.scratch / "name")
    assert other.succeed() == "node2\n"


def test_everything_ends_when_the_test_is_killed(tmp_path: Path) -> None:
    """Claim (command-line): no process of a run is left on any node; all nodes end when a test is
    killed"""
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)
    words = [sys.executable, "-c", START, tmp_path]
    with subprocess.Popen(words, cwd=REPOSITORY, stdin=-1, stdout=-1, text=True) as test:
        assert test.stdout is not None
        nodes = [psutil.Process(int(pid)) for pid in test.stdout.readline().split()]
        processes = [each for node in nodes for each in (node, *node.children(recursive=True))]
        test.kill()
    assert len(nodes) == len(NODES)
    end = time.monotonic() + 10
    while any(each.is_running() for each in processes) and time.monotonic() < end:
        time.sleep(0.05)
    assert [each.cmdline() for each in processes if each.is_running()] == []
