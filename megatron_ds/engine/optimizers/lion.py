"""The Lion optimizer (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_ds.engine.optimizers.adamw import CHUNK, keep_state_types, state_types


class Lion(Optimizer):
    """Steps by the sign of an interpolation between momentum and gradient.

        c = sign(beta1 m + (1 - beta1) g);  p = (1 - lr weight_decay) p - lr c
        m = beta2 m + (1 - beta2) g

    Elementwise, so that a flat ZeRO partition gives what full parameters give. It has one state
    for each parameter; Adam has two.

    Args:
        params: Parameter groups.
        lr: Learning rate.
        betas: Weight of the momentum in the step, and its decay rate.
        weight_decay: Decoupled weight decay.
        exp_avg_dtype: Type of the state, "fp32" or "bf16".
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        exp_avg_dtype: str = "fp32",
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.state_types = state_types(exp_avg=exp_avg_dtype)
        keep_state_types(self, self.state_types)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            lr = group["lr"]
            betas = group["betas"]
            weight_decay = group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    dtype = self.state_types.get("exp_avg")
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
                tensors = parameter, parameter.grad, state["exp_avg"]
                flat = (tensor.view(-1).split(CHUNK) for tensor in tensors)
                for weights, slope, momentum in zip(*flat, strict=True):
                    average = momentum.to(slope.dtype)
                    direction = average.lerp(slope, 1 - betas[0]).sign_()
                    weights.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
                    momentum.copy_(average.lerp_(slope, 1 - betas[1]))
