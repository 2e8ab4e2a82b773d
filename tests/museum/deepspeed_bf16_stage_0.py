"""Two steps of SGD in bf16 at ZeRO stage 0, without a loss scale."""

import itertools

import torch
from frame import deepspeed_engine, run_ranks, verdict


def train(rank: int) -> list[float]:
    """How far the weight goes in each step. Its gradient is 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed_engine(
        model, optimizer, zero_optimization={"stage": 0}, bf16={"enabled": True}
    )
    weights = [0.0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step()
        weights.append(engine.module.weight.item())
    return [abs(after - before) for before, after in itertools.pairwise(weights)]


if __name__ == "__main__":
    (distances,) = run_ranks(train)
    figures = " and ".join(f"{distance:.5f}" for distance in distances)
    is_wrong = any(abs(distance - 1) > 0.1 for distance in distances)
    verdict(is_wrong, f"the weight goes by {figures} instead of 1 and 1")
