"""The rates that the first steps of a linear warm-up use, read from how far SGD goes."""

import itertools

import torch
from frame import deepspeed_engine, run_ranks, verdict

STEPS = 4
RATE = 1.0


def train(rank: int) -> list[float]:
    """How far each step goes. The gradient is 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    limits = {"warmup_min_lr": 0.0, "warmup_max_lr": RATE, "warmup_num_steps": STEPS}
    scheduler = {"type": "WarmupLR", "params": {**limits, "warmup_type": "linear"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = deepspeed_engine(model, optimizer, scheduler=scheduler)
    weights = [0.0]
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        weights.append(model.weight.item())
    return [before - after for before, after in itertools.pairwise(weights)]


if __name__ == "__main__":
    (rates,) = run_ranks(train)
    figures = ", ".join(f"{rate:.2f}" for rate in rates)
    is_wrong = rates[0] >= RATE or abs(rates[0] - rates[1]) < 1e-6
    verdict(is_wrong, f"the first steps use the rates {figures} of a warm-up to {RATE} in {STEPS}")
