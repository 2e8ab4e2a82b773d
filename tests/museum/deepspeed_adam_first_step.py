"""The first step of torch's Adam inside an engine in bf16, against Adam's rule."""

import torch
from frame import deepspeed_engine, run_ranks, verdict

STAGES = (0, 1)


def step(rank: int) -> list[tuple[float, float]]:
    """Of each stage: steps that Adam has counted, and how far the weight goes at a rate of 1."""
    results = []
    for stage in STAGES:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        engine = deepspeed_engine(model, optimizer, **settings)
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step()
        (state,) = optimizer.state.values()
        results.append((float(state["step"]), abs(engine.module.weight.item())))
    return results


if __name__ == "__main__":
    (results,) = run_ranks(step)
    figures = "; ".join(
        f"stage {stage}: step {count:.0f}, the weight goes by {distance:.3f}"
        for stage, (count, distance) in zip(STAGES, results, strict=True)
    )
    verdict(any(abs(distance - 1) > 0.05 for _, distance in results), f"{figures} instead of 1")
