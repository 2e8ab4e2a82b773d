"""A step of SGD with a gradient of 100, and a configuration that does not name clipping."""

import torch
from frame import load_deepspeed, run_ranks, verdict

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def step(rank: int) -> float:
    """The distance that the weight goes."""
    model = torch.nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = load_deepspeed().initialize(model=model, optimizer=optimizer, config=CONFIG)
    engine.backward(engine(torch.tensor([[100.0]])).sum())
    engine.step()
    return abs(model.weight.item() - before)


if __name__ == "__main__":
    (distance,) = run_ranks(step)
    verdict(distance < 50, f"the weight goes by {distance:.2f}, its gradient is 100")
