"""What each counted token of multi-token prediction adds to the gradient of two ranks.

The loss of a rank is made by Megatron Core. What data parallelism makes of the gradients, their sum
divided by the counted tokens of all ranks, is done by hand.
"""

from types import SimpleNamespace

import helpers.megatron  # noqa: F401 (what Megatron Core needs on a CPU)
import torch
from frame import verdict
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss

MASKS = [[1, 1, 1, 1], [1, 1, 0, 0]]
"""Of the next tokens on two ranks. Those one token further are one fewer on each."""
SETTINGS = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0, "mtp_detach_heads": False}


def gradient(mask: list[int]) -> list[float]:
    """Of a rank, before its division by the tokens of all ranks."""
    hidden = torch.ones(2 * len(mask), 1, 1, requires_grad=True)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    result = process_mtp_loss(
        hidden_states=hidden,
        labels=torch.zeros(1, len(mask), dtype=torch.int64),
        loss_mask=torch.tensor([mask], dtype=torch.float32),
        output_layer=lambda values, **_: (values, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda _, logits: logits[..., 0].t(),
        config=SimpleNamespace(calculate_per_token_loss=True, **SETTINGS),
    )
    (0 * result.sum()).backward()
    further = hidden.grad[len(mask) :].flatten()
    return further[further != 0].tolist()


if __name__ == "__main__":
    counted = sum(map(sum, MASKS))
    parts = [[value / counted for value in gradient(mask)] for mask in MASKS]
    right = 1 / sum(map(len, parts))
    texts = [", ".join(f"{value:.3f}" for value in part) for part in parts]
    wrong = any(abs(value - right) > 1e-6 for part in parts for value in part)
    verdict(
        wrong, f"{texts[0]} on one rank and {texts[1]} on the other, right is {right:.3f} for each"
    )
