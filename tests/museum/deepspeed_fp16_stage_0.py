"""A step of SGD in fp16 with a static loss scale of 128, at ZeRO stage 0."""

import torch
from frame import allow_fp16, deepspeed_engine, run_ranks, verdict


def step(rank: int) -> float:
    """The distance that the weight goes. Its gradient is 1."""
    allow_fp16()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fp16 = {"enabled": True, "loss_scale": 128}
    engine = deepspeed_engine(model, optimizer, zero_optimization={"stage": 0}, fp16=fp16)
    engine.backward(engine(torch.ones(1, 1, dtype=torch.half)).sum())
    engine.step()
    return abs(engine.module.weight.item())


if __name__ == "__main__":
    (distance,) = run_ranks(step)
    verdict(abs(distance - 1) > 0.1, f"the weight goes by {distance:.4f} instead of 1")
