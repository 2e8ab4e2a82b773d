"""What each counted token adds to the gradient, for a sequence whose halves two ranks have.

The loss of a rank is made by Megatron Core, from a sum and the number of counted tokens. The mean
of the ranks' gradients is what its data parallelism makes of them.
"""

from types import SimpleNamespace

import helpers.megatron  # noqa: F401 (what Megatron Core needs on a CPU)
import torch
from frame import verdict
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

MASKS = {
    "one half has all": [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]],
    "3 and 1": [[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]],
}


def gradient(masks: list[list[float]]) -> list[float]:
    """Of the tokens that count, where each has its own weight in the loss."""
    weights = torch.ones(len(masks), len(masks[0]), requires_grad=True)
    settings = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    for losses, values in zip(weights, masks, strict=True):
        mask = torch.tensor(values)

        def loss_function(output, losses=losses, mask=mask):
            return (losses * mask).sum(), mask.sum().int(), {}

        options = {"cp_group_size": len(masks), "is_last_stage": True}
        loss, _ = forward_step_calc_loss(
            None, losses, loss_function, settings, None, False, 1, [], **options
        )
        (loss / len(masks)).backward()
    return weights.grad[torch.tensor(masks) > 0].tolist()


if __name__ == "__main__":
    texts = []
    wrong = False
    for name, masks in MASKS.items():
        found = gradient(masks)
        right = 1 / len(found)
        wrong |= any(abs(value - right) > 1e-6 for value in found)
        texts.append(f"{name}: {', '.join(f'{value:.3f}' for value in found)}, right {right:.3f}")
    verdict(wrong, "; ".join(texts))
