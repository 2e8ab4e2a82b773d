"""The nodes of a Ray cluster on which commands run; tests/cluster has a real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ds.launch.ranks import ray_cluster
from megatron_ds.launch.ranks.ray_cluster import RayCluster
from tests.problems import raises_problem


def test_commands_for_which_no_node_is_left_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that returns in time is used."""
    nodes = [
        {"Alive": alive, "Resources": {"CPU": cpus}} for alive, cpus in ((True, 2), (False, 8))
    ]
    waits: list[float | None] = []
    task = SimpleNamespace(remote=lambda *command: "reference")

    def wait(references: list[Any], timeout: float | None) -> tuple[list[Any], list[Any]]:
        waits.append(timeout)
        nodes[1]["Alive"] = len(waits) == 2
        now[0] += 200.0
        return [], references

    now = [0.0]
    fake = SimpleNamespace(
        remote=lambda function: SimpleNamespace(options=lambda **options: task),
        wait=wait,
        nodes=lambda: nodes,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: now[0])
    with raises_problem("ray-node-lost", contains="no node of the Ray cluster"):
        RayCluster("auto").run({"1 of 2": ["script.py"]}, 8, lambda text: None)
    assert waits == [ray_cluster.LOOK_S] * 4
