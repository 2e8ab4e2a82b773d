"""A run whose number of accumulated micro-batches grows, against sums of the same gradients."""

import torch
from frame import deepspeed_engine, run_ranks, verdict

STEPS = [1, 2, 2]
"""Micro-batches of each optimizer step."""


def samples() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 8) for _ in range(sum(STEPS))]


def new_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1, bias=False)


def train_with_deepspeed(rank: int) -> list[list[float]]:
    """The weights after each step that the client asked for."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed_engine(model, optimizer, zero_optimization={"stage": 1})
    batches = iter(samples())
    weights = []
    for accumulated in STEPS:
        engine.set_train_batch_size(accumulated)
        for _ in range(accumulated):
            engine.backward(engine(next(batches)).square().mean())
            engine.step()
        weights.append(model.weight.flatten().tolist())
    return weights


def train_by_hand() -> list[list[float]]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(samples())
    weights = []
    for accumulated in STEPS:
        optimizer.zero_grad()
        for _ in range(accumulated):
            (model(next(batches)).square().mean() / accumulated).backward()
        optimizer.step()
        weights.append(model.weight.flatten().tolist())
    return weights


if __name__ == "__main__":
    (theirs,) = run_ranks(train_with_deepspeed)
    differences = [
        max(abs(a - b) for a, b in zip(wrong, right, strict=True))
        for wrong, right in zip(theirs, train_by_hand(), strict=True)
    ]
    figures = ", ".join(f"{difference:.1e}" for difference in differences)
    verdict(max(differences) > 1e-4, f"weights after steps 1, 2, 3 differ by {figures}")
