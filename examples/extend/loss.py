"""Trains with the z-loss of PaLM, which keeps the logits near zero (Chowdhery et al. 2022).

torchrun --nproc_per_node 8 examples/extend/loss.py FLAGS OF pretrain_gpt.py
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_ds.extend import Extensions, pretrain

Z_LOSS = 1e-4


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy and the square of the softmax's log denominator, [tokens].

    Args:
        logits: [tokens, vocabulary], fp32, with tensor parallelism those of all ranks.
        labels: [tokens].
    """
    log_denominator = logits.logsumexp(dim=-1)
    return F.cross_entropy(logits, labels, reduction="none") + Z_LOSS * log_denominator.square()


if __name__ == "__main__":
    pretrain(Extensions(loss=loss))
