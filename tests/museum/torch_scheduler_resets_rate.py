"""A schedule that is continued after a resume, against one that was never stopped."""

import torch
from frame import verdict
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

STEPS = 10
STOP = 6


def new() -> tuple[torch.optim.Optimizer, SequentialLR]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    return optimizer, schedule(optimizer)


def schedule(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, STEPS - 3)]
    return SequentialLR(optimizer, parts, milestones=[3])


def run(optimizer: torch.optim.Optimizer, scheduler: SequentialLR, steps: int) -> list[float]:
    """The rates of the steps."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


if __name__ == "__main__":
    complete = run(*new(), STEPS)
    optimizer, scheduler = new()
    run(optimizer, scheduler, STOP)
    states = optimizer.state_dict(), scheduler.state_dict()
    resumed = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    resumed.load_state_dict(states[0])
    continued = schedule(resumed)
    continued.load_state_dict(states[1])
    rates = run(resumed, continued, STEPS - STOP)
    pairs = list(zip(rates, complete[STOP:], strict=True))
    figures = ", ".join(f"{rate:.3f} ({want:.3f})" for rate, want in pairs)
    is_wrong = any(abs(rate - want) > 1e-6 for rate, want in pairs)
    verdict(is_wrong, f"rates after the resume, and without one: {figures}")
