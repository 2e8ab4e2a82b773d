"""The nodes of a Ray cluster on which commands run; tests/cluster has a real one."""

from __future__ import annotations

import sys
from functools import partial
from itertools import count
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


class RayError(Exception):
    """ray.exceptions.RayError."""


class LocalRayletDiedError(RayError):
    """ray.exceptions.LocalRayletDiedError."""


@pytest.mark.parametrize(
    ("failure", "failures", "is_lost"),
    [
        (LocalRayletDiedError, 1, False),
        (LocalRayletDiedError, ray_cluster.RETRIES, False),
        (LocalRayletDiedError, ray_cluster.RETRIES + 1, True),
        (RayError, 1, True),
    ],
)
def test_command_that_the_raylet_did_not_take_is_repeated(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception], failures: int, is_lost: bool
) -> None:
    """Up to the number of retries, and no other command with it."""
    started: list[list[str]] = []

    def start(command: list[str], *arguments: object) -> int:
        started.append(command)
        return next(references)

    def get(reference: int) -> tuple[int, str]:
        if started[reference] == ["a.py"] and started.count(["a.py"]) <= failures:
            raise failure
        return 0, ""

    references = count()
    task = SimpleNamespace(remote=start)
    fake = SimpleNamespace(
        remote=lambda function: SimpleNamespace(options=lambda **options: task),
        wait=lambda pending, timeout: (pending[:1], pending[1:]),
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1}}],
        get=get,
        exceptions=SimpleNamespace(RayError=RayError, LocalRayletDiedError=LocalRayletDiedError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    run = partial(RayCluster("auto").run, {"a": ["a.py"], "b": ["b.py"]}, 1)
    if is_lost:
        with raises_problem("ray-task-lost"):
            run(log=lambda text: None)
    else:
        texts: list[str] = []
        run(log=texts.append)
        assert texts == ["1 of 2 shards are complete", "2 of 2 shards are complete"]
        assert started.count(["b.py"]) == 1
        assert started.count(["a.py"]) == failures + 1
