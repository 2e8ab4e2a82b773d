"""Two nodes without a shared disk for data train from URLs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.cluster import NODES, SLOTS, Cluster
from tests.e2e.runs import PRETRAIN, PROGRAMS, REPOSITORY, Settings, losses, to_flags
from tests.fork_server import DEADLINE

SERVER = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, {repository!r})
from tests.object_server import FolderServer
server = FolderServer(Path({folder!r}), address="10.99.1.1")
server.latency = 0.02
Path("variables.partial").write_text(json.dumps(server.variables))
Path("variables.partial").rename("variables")
while not Path("stop").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def store(cluster: Cluster, corpus: Path) -> Iterator[Mapping[str, str]]:
    """A server on the first node; the variables by which clients find it."""
    program = SERVER.format(repository=str(REPOSITORY), folder=str(corpus.parent))
    server = cluster.nodes[0].start([sys.executable, "-c", program], cluster.new_log())
    variables = cluster.shared / "variables"
    end = time.monotonic() + DEADLINE
    while not variables.exists():
        assert server.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    yield json.loads(variables.read_text())
    (cluster.shared / "stop").touch()
    server.wait()


def test_nodes_without_a_shared_disk_have_the_losses_of_one_machine(
    cluster: Cluster,
    store: Mapping[str, str],
    corpus: Path,
    one_machine: Callable[[str], list[float]],
    run_settings: Callable[[str, Path], Settings],
) -> None:
    """Each node has the blocks that its ranks read, and builds an index cache of its own.

    Claim (samples): two nodes without a shared disk train from a URL with the losses of one
    machine, each with blocks and index caches of its own
    """
    save = cluster.shared / "by-url"
    cache = {"object_storage_cache_path": cluster.scratch / "cache", "num_workers": 1}
    data = {"data_path": f"s3://bucket/{corpus.name}", **cache}
    flags = to_flags({**run_settings("data", save), **data})
    agent = f"{PROGRAMS}/torchrun --nnodes 2 --nproc-per-node {SLOTS}"
    agent += " --node-rank {node} --master-addr node1 --master-port 29500"
    for done in cluster.run_on_all(*agent.split(), PRETRAIN, *flags, environment=store):
        done.succeed()
    assert losses(save) == one_machine("data")
    for node in NODES:
        built = cluster.folder / node / "cache" / "index-cache"
        assert list(built.glob(f"{corpus.name}-train-*.npy"))
        assert list((built.parent).glob(f"blocks-*/*-{corpus.name}-*/content"))
