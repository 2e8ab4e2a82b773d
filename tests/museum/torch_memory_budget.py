"""Dropout in a compiled function whose memory budget makes the backward pass recompute it."""

import torch
import torch._functorch.config as config
from frame import verdict


def dropped(values: torch.Tensor) -> torch.Tensor:
    values = torch.nn.functional.dropout(values.sin(), 0.5, training=True)
    return torch.nn.functional.dropout(values.cos(), 0.5, training=True) * 2


def is_right(budget: float) -> float:
    """The share of the gradients that belong to the mask of the forward pass."""
    config.activation_memory_budget = budget
    torch._dynamo.reset()
    values = torch.linspace(0.1, 1, 1000, requires_grad=True)
    result = torch.compile(dropped, backend="aot_eager_decomp_partition")(values)
    result.sum().backward()
    return ((result == 0) <= (values.grad == 0)).float().mean().item()


if __name__ == "__main__":
    shares = {budget: is_right(budget) for budget in (1.0, 0.0)}
    figures = ", ".join(f"{1 - share:.0%} at {budget}" for budget, share in shares.items())
    verdict(
        min(shares.values()) < 1, f"dropped values with a gradient, by memory budget: {figures}"
    )
