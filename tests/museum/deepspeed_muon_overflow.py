"""Steps of Muon in fp16 at ZeRO stage 1 after a loss scale that overflows."""

import torch
from frame import allow_fp16, deepspeed_engine, run_ranks, verdict

WIDTH = 16
STEPS = 8


def train(rank: int) -> tuple[float, int]:
    """How far the weights go, and how many steps were skipped."""
    allow_fp16()
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    engine = deepspeed_engine(
        model,
        {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}},
        zero_optimization={"stage": 1},
        fp16={"enabled": True, "initial_scale_power": 18, "hysteresis": 1},
    )
    before = engine.module.weight.detach().float().clone()
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.half)).sum())
        engine.step()
    return (engine.module.weight.float() - before).norm().item(), engine.skipped_steps


if __name__ == "__main__":
    ((distance, skipped),) = run_ranks(train)
    figures = f"{skipped} of {STEPS} steps are skipped, the weights go by {distance:.3f}"
    verdict(skipped == STEPS, figures)
