"""Recomputation of dropout whose mask comes from a generator of its own."""

import torch
from frame import verdict
from torch.utils.checkpoint import checkpoint

DRAWS = torch.Generator().manual_seed(1)


def dropped(values: torch.Tensor) -> torch.Tensor:
    mask = torch.rand(values.shape, generator=DRAWS) < 0.5
    return values * mask * 2


if __name__ == "__main__":
    wrong = {}
    for reentrant in (True, False):
        values = torch.ones(1000, requires_grad=True)
        result = checkpoint(dropped, values * 1, use_reentrant=reentrant)
        result.sum().backward()
        # Where the forward pass dropped a value, its gradient is 0; elsewhere it is 2.
        wrong[reentrant] = (values.grad != result.detach()).float().mean().item()
    figures = ", ".join(f"{share:.0%} (reentrant: {name})" for name, share in wrong.items())
    verdict(max(wrong.values()) > 0, f"gradients that belong to another mask: {figures}")
