"""The balancing loss of two layers that each send all tokens to two of four experts."""

import torch
from frame import verdict
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

EXPERTS = 4
TOKENS = 8


def logits(*pairs: tuple[int, int]) -> torch.Tensor:
    """Of a layer whose tokens take turns with pairs of experts."""
    rows = torch.full((TOKENS, EXPERTS), -20.0)
    for token in range(TOKENS):
        rows[token, list(pairs[token % len(pairs)])] = 20.0
    return rows


def loss(*layers: torch.Tensor) -> float:
    return float(load_balancing_loss_func(layers, EXPERTS, 2))


if __name__ == "__main__":
    balanced = loss(logits((0, 1), (2, 3)))
    collapsed = loss(logits((0, 1)))
    both = loss(logits((0, 1)), logits((2, 3)))
    figures = (
        f"{both:.3g} for two collapsed layers; {collapsed:.3g} for one, {balanced:.3g} if balanced"
    )
    verdict(both != collapsed, figures)
