"""Two ranks of DistributedDataParallel with different numbers of counted tokens."""

import torch
import torch.distributed as dist
from frame import run_ranks, verdict
from torch.nn.parallel import DistributedDataParallel

IGNORED = -100
COUNTED = (1, 7)
"""Counted tokens of each rank, of eight."""


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    features = torch.randn(8, 4)
    targets = torch.randint(3, (8,))
    targets[COUNTED[rank] :] = IGNORED
    return features, targets


def new_model() -> torch.nn.Linear:
    torch.manual_seed(9)
    return torch.nn.Linear(4, 3, bias=False)


def gradient(rank: int) -> list[float]:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(new_model())
    features, targets = batch(rank)
    torch.nn.functional.cross_entropy(model(features), targets, ignore_index=IGNORED).backward()
    return model.module.weight.grad.flatten().tolist()


if __name__ == "__main__":
    theirs, _ = map(torch.tensor, run_ranks(gradient, size=2))
    model = new_model()
    features, targets = map(torch.cat, zip(batch(0), batch(1), strict=True))
    torch.nn.functional.cross_entropy(model(features), targets, ignore_index=IGNORED).backward()
    right = model.weight.grad.flatten()
    error = ((theirs - right).norm() / right.norm()).item()
    figures = f"gradient of two ranks with {COUNTED} counted tokens is off by {error:.0%}"
    verdict(error > 1e-4, figures)
