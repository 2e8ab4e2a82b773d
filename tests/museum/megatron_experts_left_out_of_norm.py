"""Which gradients are in the norm, of four tensor-parallel ranks with an expert each.

Megatron Core is asked for the gradients that a rank counts; squares are added by hand.
"""

from types import SimpleNamespace

import helpers.megatron  # noqa: F401 (what Megatron Core needs on a CPU)
import torch
from frame import verdict
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer

RANKS = 4


class Optimizer(MegatronOptimizer):
    """Of a dense weight that all ranks have, and of an expert that one rank has."""

    def __init__(self, rank: int) -> None:
        self.dense, self.expert = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.dense.grad = torch.ones(1)
        self.expert.grad = torch.full((1,), 2.0)
        self.expert.allreduce = False
        precise = (
            "use_precision_aware_optimizer",
            "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        )
        self.config = SimpleNamespace(**dict.fromkeys(precise, False))
        self.tp_group = SimpleNamespace(rank=lambda: rank, size=lambda: RANKS)
        self.expert_tp_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return [self.dense, self.expert]


Optimizer.__abstractmethods__ = frozenset()


def square(rank: int) -> float:
    """Of what a rank adds to the norm."""
    parallel_state.set_tensor_model_parallel_rank(rank)
    optimizer = Optimizer(rank)
    name = "get_grads_for_grad_norm"  # of 0.19 and later
    method = getattr(optimizer, name, None) or optimizer.get_main_grads_for_grad_norm
    return sum(grad.square().item() for grad in method())


if __name__ == "__main__":
    norm = sum(map(square, range(RANKS))) ** 0.5
    right = (1 + RANKS * 4) ** 0.5
    verdict(abs(norm - right) > 1e-6, f"norm {norm:.3f}, that of all gradients is {right:.3f}")
