#!/usr/bin/env python
"""Runs pretrain_gpt.py in the workers of Ray Train, one process per worker.

    python examples/clusters/ray_train.py --ray-workers 16 --ray-storage DIR FLAGS

FLAGS are those of pretrain_gpt.py. The nodes of the Ray cluster have this repository and its
environment under the same paths, and Ray Train besides: pip install 'ray[train]'.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

PRETRAIN = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"


def run_rank(settings: dict[str, Any]) -> None:
    """Runs one rank: in a process of its own, since signals and exit statuses need one.

    The kernel kills the process with its worker, which Ray ends when another one has failed.
    """
    context = train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        address, port = broadcast_from_rank_zero(
            (ray.util.get_node_ip_address(), free.getsockname()[1])
        )
    ranks = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, PRETRAIN, *settings["flags"]]
    status = subprocess.run(command, cwd=settings["folder"], env=environment).returncode
    if status:
        raise RuntimeError(f"rank {ranks['RANK']} on {socket.gethostname()}: exit status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ray-workers", type=int, required=True, help="number of ranks")
    parser.add_argument("--ray-cpus", type=float, default=1, help="cores of a rank")
    parser.add_argument("--ray-no-gpu", action="store_true", help="do not give each rank a GPU")
    parser.add_argument("--ray-storage", type=Path, default="ray_results", help="shared folder")
    options, flags = parser.parse_known_args()
    ray.init()
    DataParallelTrainer(
        run_rank,
        train_loop_config={"flags": flags, "folder": os.getcwd()},
        scaling_config=train.ScalingConfig(
            num_workers=options.ray_workers,
            use_gpu=not options.ray_no_gpu,
            resources_per_worker={"CPU": options.ray_cpus},
        ),
        run_config=train.RunConfig(storage_path=str(options.ray_storage.absolute())),
    ).fit()


if __name__ == "__main__":
    main()
