"""A Ray cluster of two nodes on this machine, which a test controls by lines of its input.

`PYTHONPATH=build/ray python tests/cluster/ray_nodes.py` prints the address of the cluster and the
pids of the nodes' raylets. The word `remove` kills all processes of the second node. The cluster
ends with its input, and so with the test's process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

ON_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # nodes of one machine; otherwise its network address
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables of all processes of the cluster and of its drivers."""
PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): processes whose parent has died become children of this one."""
SETTINGS = {
    "num_cpus": 1,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "no_monitor": True,
}


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        # Ray writes the cluster's address below RAY_TMPDIR whatever `temp_dir` is, and creates
        # no folder for it.
        os.environ.update(ON_LOOPBACK, RAY_TMPDIR=folder)
        Path(folder, "ray").mkdir()
        from ray.cluster_utils import Cluster

        try:
            nodes = Cluster(initialize_head=True, head_node_args=SETTINGS)
            second = nodes.add_node(**SETTINGS)
            pids = (
                node.all_processes["raylet"][0].process.pid for node in (nodes.head_node, second)
            )
            print(nodes.address, *pids, flush=True)
            for line in sys.stdin:
                if line.strip() == "remove":
                    nodes.remove_node(second, allow_graceful=False)
                    print("removed", flush=True)
            nodes.shutdown()
        finally:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


if __name__ == "__main__":
    main()
