"""Cautious weight decay (Chen et al. 2025) of elementwise optimizers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from megatron_ds.engine.optimizers.adamw import CHUNK
from megatron_ds.engine.optimizers.matrix_optimizer import MATRICES, MatrixOptimizer


def decay_cautiously(optimizer: Optimizer) -> None:
    """Make AdamW or Lion decay only the elements of weights that its update moves towards zero.

    The update has the sign of the momentum with the current gradient, so the decay is applied
    before the step, which then has none. Optimizers of full matrices decay these themselves.
    """
    decays: list[tuple[dict[str, Any], float]] = []
    """Groups without their decay during a step."""

    def decay(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            amount = group["lr"] * group["weight_decay"]
            beta = group["betas"][0]
            if not amount or group.get(MATRICES):
                continue
            decays.append((group, group["weight_decay"]))
            group["weight_decay"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = optimizer.state.get(parameter, {}).get("exp_avg")
                if average is None:  # the first step
                    average = parameter.grad
                tensors = (parameter.data, parameter.grad, average)
                flat = (tensor.view(-1).split(CHUNK) for tensor in tensors)
                for weights, gradient, momentum in zip(*flat, strict=True):
                    update = momentum.to(gradient.dtype).lerp(gradient, 1 - beta)
                    is_shrunk = (update * weights >= 0).to(weights)
                    weights.addcmul_(weights, is_shrunk, value=-amount)

    def restore(*_: Any) -> None:
        for group, value in decays:
            group["weight_decay"] = value
        decays.clear()

    if isinstance(optimizer, MatrixOptimizer):
        optimizer.is_cautious = True
    optimizer.register_step_pre_hook(decay)
    optimizer.register_step_post_hook(restore)
