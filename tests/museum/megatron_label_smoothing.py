"""Label smoothing over a vocabulary that two ranks hold, against one rank."""

import torch
import torch.distributed as dist
from frame import run_ranks, verdict
from helpers import megatron

SMOOTHINGS = (0.0, 0.2)


def losses_and_gradients(rank: int) -> list[tuple[float, list[list[float]]]]:
    """Of each smoothing: the loss, and the gradient of this rank's part of the logits."""
    megatron.load()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 1, 8, generator=generator)
    labels = torch.randint(8, (5, 1), generator=generator)
    results = []
    for smoothing in SMOOTHINGS:
        part = logits.chunk(size, dim=-1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(part.clone(), labels, smoothing).mean()
        loss.backward()
        results.append((loss.item(), part.grad.flatten(end_dim=1).tolist()))
    return results


if __name__ == "__main__":
    split = run_ranks(losses_and_gradients, 2)
    (alone,) = run_ranks(losses_and_gradients, 1)
    differences = []
    for (_, gradient), *parts in zip(alone, *split, strict=True):
        joined = torch.cat([torch.tensor(part) for _, part in parts], dim=-1)
        differences.append((joined - torch.tensor(gradient)).abs().max().item())
    losses = " and ".join(f"{results[-1][0]:.4f}" for results in split)
    figures = f"losses {losses} on two ranks, {alone[-1][0]:.4f} on one"
    plain, smoothed = differences
    verdict(smoothed > 1e-6, f"{figures}; gradients differ by {smoothed:.4f} ({plain:.0e} without)")
