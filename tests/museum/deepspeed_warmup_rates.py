"""The rates of an optimizer whose scheduler, WarmupLR, is not told any."""

import torch
from frame import deepspeed_engine, run_ranks, verdict

RATES = (1e-5, 1e-6)


def train(rank: int) -> list[float]:
    """The rates of two groups of parameters after the warm-up."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    groups = [{"params": model[i].parameters(), "lr": rate} for i, rate in enumerate(RATES)]
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    engine = deepspeed_engine(model, torch.optim.SGD(groups, lr=1.0), scheduler=scheduler)
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
    return list(engine.get_lr())


if __name__ == "__main__":
    (rates,) = run_ranks(train)
    is_wrong = any(abs(rate - want) > 1e-9 for rate, want in zip(rates, RATES, strict=True))
    verdict(is_wrong, f"rates {rates} instead of {list(RATES)}")
