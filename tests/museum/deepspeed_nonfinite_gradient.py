"""A step with a gradient that is not a number, in bf16 and in fp32, at ZeRO stage 1."""

import torch
from frame import deepspeed_engine, run_ranks, verdict


def step(rank: int) -> list[bool]:
    """Whether the weight is a number after it, in bf16 and in fp32."""
    results = []
    for is_bf16 in (True, False):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": is_bf16}}
        engine = deepspeed_engine(model, optimizer, gradient_clipping=1.0, **settings)
        data = torch.full((1, 1), float("nan"), dtype=next(engine.module.parameters()).dtype)
        engine.backward(engine(data).sum())
        engine.step()
        results.append(bool(engine.module.weight.isfinite().all()))
    return results


if __name__ == "__main__":
    (results,) = run_ranks(step)
    names = [name for name, is_finite in zip(("bf16", "fp32"), results, strict=True) if is_finite]
    verdict(
        len(names) < 2, f"the weight is a number after it in {' and '.join(names) or 'neither'}"
    )
