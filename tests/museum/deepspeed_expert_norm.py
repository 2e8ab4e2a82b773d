"""The norm by which two ranks clip the gradients of experts that each has alone."""

import torch
from frame import load_deepspeed, run_ranks, verdict

GRADIENTS = ((2.0, 4.0), (6.0, 8.0))
"""Of the experts of each rank. The sum of all squares is 120."""


def clip(rank: int) -> float:
    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    from deepspeed.runtime.utils import clip_grad_norm_

    experts = [torch.nn.Parameter(torch.zeros(1)) for _ in GRADIENTS[rank]]
    for expert, gradient in zip(experts, GRADIENTS[rank], strict=True):
        expert.grad = torch.full((1,), gradient)
        expert.allreduce = False
        expert.group_name = "ep_size_2"  # as DeepSpeed marks them
    return float(clip_grad_norm_(experts, max_norm=1.0))


if __name__ == "__main__":
    norms = run_ranks(clip, size=2)
    figures = " and ".join(f"{norm:.3f}" for norm in norms)
    right = sum(gradient**2 for row in GRADIENTS for gradient in row) ** 0.5
    verdict(abs(norms[0] - right) > 1e-3, f"the ranks clip by {figures} instead of {right:.3f}")
