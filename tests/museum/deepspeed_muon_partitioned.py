"""The parameters that Muon updates in a model that is built as it is, and inside zero.Init."""

import torch
from frame import deepspeed_engine, load_deepspeed, run_ranks, verdict

WIDTH = 64
ZERO = {"stage": 3, "reduce_scatter": False, "stage3_param_persistence_threshold": 0}


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))


def count(rank: int) -> list[int]:
    """The parameters that are marked for Muon, in both ways."""
    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO}
    models = [new_model()]
    with deepspeed.zero.Init(config_dict_or_path=config):
        models.append(new_model())
    for model in models:
        optimizer = {"type": "Muon", "params": {"lr": 0.02}}
        deepspeed_engine(model, optimizer, zero_optimization=ZERO)
    return [sum(getattr(p, "use_muon", False) for p in model.parameters()) for model in models]


if __name__ == "__main__":
    ((plain, partitioned),) = run_ranks(count)
    figures = f"{partitioned} parameters with zero.Init, {plain} without it, are marked for Muon"
    verdict(partitioned != plain, figures)
