"""clip_grad_norm_ on two ranks, each of which has the half of a matrix."""

import torch
import torch.distributed as dist
from frame import run_ranks, verdict

GRADIENT = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
"""Of norm 5. Rank 0 has the first row, and rank 1 the second one."""


def clip(rank: int) -> tuple[float, list[float]]:
    """The norm that the rank sees, and its clipped row."""
    dist.init_process_group("gloo")
    row = torch.nn.Parameter(torch.zeros(2))
    row.grad = GRADIENT[rank].clone()
    norm = torch.nn.utils.clip_grad_norm_([row], max_norm=1.0)
    return norm.item(), row.grad.tolist()


if __name__ == "__main__":
    results = run_ranks(clip, size=2)
    clipped = torch.tensor([row for _, row in results])
    angle = torch.nn.functional.cosine_similarity(clipped.flatten(), GRADIENT.flatten(), dim=0)
    norms = " and ".join(f"{norm:.0f}" for norm, _ in results)
    figures = f"norms {norms} instead of 5; clipped to {clipped.norm():.3f} instead of 1, "
    verdict(clipped.norm() > 1.01, figures + f"in another direction (cosine {angle:.3f})")
