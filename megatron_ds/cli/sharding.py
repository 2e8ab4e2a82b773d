"""Flags of tools whose work is divided among processes or machines, and the command of one shard.

Owns how a process learns its shard: from the flag, a Slurm array, or Ray, which then starts the
same command once per shard. Knows no files; the tools define what a shard is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_ds.config.fields import ANY_VALUE, option_field, when
from megatron_ds.config.problems import Problem, counted, user_error
from megatron_ds.launch import environment

AUTO = "auto"
SHARDS_PER_TASK = 4
"""Shards for each task that a Ray cluster can run at a time. More of them lose less with a node."""


@dataclass(frozen=True)
class ShardOptions:
    """Several processes or machines with one file system. The output equals one process's."""

    shard: str | None = option_field(None, metavar="I/N")
    """Process only shard I of N, from 0/N to N-1/N; the last one to complete merges all; auto: the
    task of a Slurm array (default: all documents)."""
    ray: str | None = option_field(None, metavar="ADDRESS")
    """Process all shards on the Ray cluster of this address, or with auto on the one of this
    machine."""
    num_shards: int | None = option_field(
        None,
        help=f"number of shards (default: {SHARDS_PER_TASK} for each task that the cluster can run "
        "at a time; a repeated command keeps the number)",
        minimum=1,
        only_with=when(ray=ANY_VALUE),
    )
    given: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()

    @property
    def part(self) -> tuple[int, int] | None:
        """Index and number of the shards; None for the entire work."""
        if self.shard == AUTO:
            return environment.slurm_array_part()
        if self.shard is None:
            return None
        index, count = map(int, self.shard.split("/"))
        if not 0 <= index < count:
            raise ValueError(self.shard)
        return index, count

    @property
    def is_used(self) -> bool:
        """Whether the work is divided."""
        return self.shard is not None or self.ray is not None

    @property
    def merges(self) -> bool:
        """Whether the last shard merges all: with Ray, the process that started them does."""
        return self.ray is None

    def problems(self) -> Iterator[Problem]:
        try:
            part = self.part
        except ValueError:
            yield Problem("shard-invalid", settings=self)
            return
        if self.shard == AUTO and part is None:
            yield Problem("no-slurm-array")
        if self.ray is not None and part is None and importlib.util.find_spec("ray") is None:
            yield Problem("ray-missing")


@dataclass(frozen=True)
class RayShards:
    """A Ray cluster that runs shards.

    Attributes:
        count: Number of shards by default.
        run: Completes shards.
    """

    count: int
    run: Callable[[Sequence[object]], None]


@contextmanager
def connect_ray(
    options: ShardOptions, program: Sequence[str], workers: int, log: Callable[[str], None]
) -> Iterator[RayShards]:
    """Connects to the cluster of `options.ray`.

    Args:
        program: Words after `python` that start the tool, which is started for each shard.
        workers: Worker processes of a shard, if they were given; by default a node's cores.
        log: Takes messages.
    """
    from megatron_ds.launch.ranks.ray_cluster import RayCluster

    with RayCluster(str(options.ray)) as cluster:
        cores = workers if "workers" in options.given else min(cluster.cores)
        tasks = sum(count // cores for count in cluster.cores)
        if not tasks:
            raise user_error("ray-workers-exceed-node", workers=cores, cores=max(cluster.cores))

        def run(shards: Sequence[object]) -> None:
            start = [*program, *options.arguments, "--workers", str(cores)]
            commands = {str(shard): [*start, "--shard", str(shard)] for shard in shards}
            nodes = counted(len(cluster.cores), "node")
            per_node = counted(cores, "core")
            log(f"{counted(len(commands), 'shard')} on {nodes}, {per_node} each")
            cluster.run(commands, cores, log)

        yield RayShards(SHARDS_PER_TASK * tasks, run)
