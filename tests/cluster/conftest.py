"""Fixtures: two nodes for the tests of a file, and runs of one machine to compare with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, find_obstacle, start_slurm
from tests.e2e.conftest import base, corpus, environment, launcher  # noqa: F401
from tests.e2e.runs import Launcher, Settings, losses

LAYOUTS: dict[str, Settings] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 4},
    "pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "ulysses": {"ds_sequence_parallel_size": 4},
}
"""Of four ranks, whose groups of that name contain ranks of both nodes."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, which end with the tests of the file."""
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)
    nodes = Cluster(tmp_path_factory.mktemp("cluster"))
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def slurm(cluster: Cluster) -> None:
    """Slurm on both nodes."""
    if (obstacle := find_obstacle("slurmctld", "slurmd", "srun")) is not None:
        pytest.skip(obstacle)
    start_slurm(cluster)


@pytest.fixture(autouse=True)
def _no_process_left_on_a_node(request: pytest.FixtureRequest) -> Iterator[None]:
    """A run ends on all nodes before its launcher returns, or a few seconds later."""
    yield
    if "cluster" not in request.fixturenames:
        return
    nodes = request.getfixturevalue("cluster").nodes
    end = time.monotonic() + 10
    while any(left := [node.left_over() for node in nodes]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(left)


@pytest.fixture(scope="session")
def run_settings(base: Settings) -> Callable[[str, Path], Settings]:  # noqa: F811
    """Settings of a run of a layout, which saves into a folder."""

    def settings(layout: str, save: Path) -> Settings:
        return {**base, **LAYOUTS[layout], "global_batch_size": 8, "train_iters": 3, "save": save}

    return settings


@pytest.fixture(scope="session")
def one_machine(
    launcher: Launcher,  # noqa: F811
    run_settings: Callable[[str, Path], Settings],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], list[float]]:
    """Losses of a layout on four ranks of this machine, outside of the cluster."""

    @functools.cache
    def train(layout: str) -> list[float]:
        save = tmp_path_factory.mktemp(layout)
        launcher.start(run_settings(layout, save), ranks=4).succeed()
        return losses(save)

    return train
