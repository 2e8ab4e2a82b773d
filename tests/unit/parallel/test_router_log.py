"""The names and units of what routers report."""

from __future__ import annotations

import torch

from megatron_ds.parallel.router_log import RouterLog, router_metrics


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
    assert {name: float(value) for name, value in router_metrics(log.take()).items()} == {
        "load_balancing_loss": 1.5,
        "router_z_loss": 2.0,
        "token_drop_rate": 0.25,
        "max_expert_load": 2.5,
        "expert_load/0": 1.0,
        "expert_load/1": 1.0,
        "expert_load/2": 0.5,
        "expert_load/3": 1.5,
    }


def test_a_dense_model_reports_nothing() -> None:
    assert router_metrics(RouterLog({}).take()) == {}
