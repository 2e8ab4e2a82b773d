"""Parameter groups and the learning rate and weight decay that each gets."""

from __future__ import annotations

import torch
from torch import nn

from megatron_ds.engine.param_groups import Multipliers, parameter_groups, set_lr_and_weight_decay


def test_default_rule_decays_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups, multipliers = parameter_groups(model, weight_decay=0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert multipliers == (Multipliers(1.0, 1.0), Multipliers(1.0, 0.0))
    assert groups[0]["params"] == [model[0].weight]
    assert len(groups[1]["params"]) == 3


def test_rule_scales_learning_rate_and_weight_decay_of_each_parameter() -> None:
    def rule(name: str, shape: tuple[int, ...]) -> Multipliers:
        return Multipliers(lr=0.1 if name == "1.weight" else 1.0, weight_decay=1 / shape[0])

    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
    groups, multipliers = parameter_groups(model, 0.8, rule)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr_and_weight_decay(optimizer.param_groups, multipliers, lr=0.5, weight_decay=0.4)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0.1),
        (0.05, 0.2),
    ]


def test_parameter_partitioned_by_zero3_is_grouped_by_its_original_shape() -> None:
    model = nn.Linear(3, 4, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.ds_shape = torch.Size((4, 3))  # type: ignore[assignment]
    assert parameter_groups(model, 0.1)[1] == (Multipliers(1.0, 1.0),)
