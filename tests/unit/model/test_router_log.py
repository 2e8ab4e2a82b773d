"""The names and units of what routers report."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.model.experts.router_log import RouterLog, router_metrics
from megatron_ds.parallel.mesh import Group


def test_loads_are_relative_to_a_uniform_distribution() -> None:
    log = RouterLog({})
    for dropped, load in ((0.0, (0.5, 0.25, 0.25, 0.0)), (0.5, (0.0, 0.25, 0.0, 0.75))):
        values = {
            "load_balancing_loss": torch.tensor(1.5),
            "z_loss": torch.tensor(2.0),
            "dropped": torch.tensor(dropped),
            "load": torch.tensor(load),
            "largest": torch.tensor(max(load)),
        }
        with log.recording(training=True):
            log.record(values)
    metrics = {name: float(value) for name, value in router_metrics(log.take()).items()}
    assert metrics == {
        "load_balancing_loss": 1.5,
        "router_z_loss": 2.0,
        "token_drop_rate": 0.25,
        "max_expert_load": 2.5,
        "expert_load/0": 1.0,
        "expert_load/1": 1.0,
        "expert_load/2": 0.5,
        "expert_load/3": 1.5,
    }


def recorded(*layers: dict[str, float]) -> RouterLog:
    log = RouterLog({"z_loss": (), "load": (2,), "next_token_loss": ()})
    with log.recording(training=True):
        for layer in layers:
            shapes = {name: () if name != "load" else (2,) for name in layer}
            log.record({name: torch.full(shapes[name], value) for name, value in layer.items()})
    return log


def test_each_value_is_the_mean_over_the_layers_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = {"z_loss": 1.0, "load": 2.0}, {"z_loss": 2.0, "load": 4.0}, {"next_token_loss": 7.0}
    means = {name: value.tolist() for name, value in recorded(*layers).take().items()}
    assert means == {"z_loss": 1.5, "load": [3.0, 3.0], "next_token_loss": 7.0}

    sums: list[torch.Tensor] = []

    def all_reduce(own: torch.Tensor, group: object) -> None:
        sums.append(own.clone())
        own.copy_(sum(sums))  # of this stage and those before it

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    stages = [recorded(layer) for layer in layers]
    found = [log.take_of_stages(Group((0,), 0, None), torch.device("cpu")) for log in stages]
    assert {name: value.tolist() for name, value in found[-1].items()} == means


def test_a_dense_model_reports_nothing() -> None:
    assert router_metrics(RouterLog({}).take()) == {}


def test_the_mean_so_far_is_over_replicas_and_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recomputation receives the means of its first passes, in their order."""
    others = iter([torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])])
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda value, group: value.add_(next(others))
    )
    replicas = Group((0, 1), 0, None)
    log = RouterLog({})
    values = [torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75])]
    with log.recording(training=True):
        means = [log.mean_so_far("layer", value, replicas).tolist() for value in values]
    assert means == [[0.5, 0.5], [0.4375, 0.5625]]
    assert values[0].tolist() == [1.0, 0.0]
    again = [log.mean_so_far("layer", value, replicas).tolist() for value in values]
    assert again == means
    log.take()
    alone = Group((0,), 0, None)
    with log.recording(training=True):
        assert log.mean_so_far("layer", values[1], alone).tolist() == [0.25, 0.75]
