"""Parameter groups: what is decayed and what is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices are decayed; biases and the weights of norms are not.

    The key "decayed" tells the groups apart when a schedule sets the weight decay of a step.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        # A parameter cut by ZeRO-3 has lost its shape; DeepSpeed keeps it in ds_shape.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (decayed if len(shape) > 1 else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "decayed": True},
        {"params": plain, "weight_decay": 0.0, "decayed": False},
    ]
    return [group for group in groups if group["params"]]


def set_lr_and_weight_decay(groups: list[dict[str, Any]], lr: float, weight_decay: float) -> None:
    """Sets the rates of the next step in the groups of an optimizer."""
    for group in groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decayed"] else 0.0


def reset_cpu_adam_beta_powers(optimizer: object) -> None:
    """Makes DeepSpeedCPUAdam's next step a function of its arguments alone.

    Its C++ side keeps the powers of the betas and multiplies them on when it is called with the
    step after the last one, but takes pow() otherwise. After a resume that gives other last bits
    than an uninterrupted run. A call with step 0 before each step forces pow() everywhere.
    """
    kernel = getattr(optimizer, "ds_opt_adam", None)
    if kernel is None:
        return
    nothing = [torch.zeros(1) for _ in range(4)]
    options = optimizer.defaults  # type: ignore[attr-defined]
    beta1, beta2 = options["betas"]
    number = optimizer.opt_id  # type: ignore[attr-defined]
    kernel.adam_update(number, 0, 0.0, beta1, beta2, options["eps"], 0.0, True, *nothing)
