"""pretrain_gpt.py with a gradient that is not finite in one rank's copy of a replicated weight.

The copy is one that the gradient norm does not count: of tensor-parallel rank 1, in iteration 2.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from megatron_ds.config import Config
from megatron_ds.extend import Callback, Extensions, TrainState, pretrain


class BrokenCopy(Callback):
    """Corrupts an element of the first micro-batch's gradient."""

    def on_start(self, config: Config, state: TrainState, model: nn.Module) -> None:
        schedule = config.schedule
        micro_batches = 0
        passes = (schedule.global_batch_size or 0) // schedule.micro_batch_size

        def corrupt(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal micro_batches
            micro_batches += 1
            if micro_batches != passes + 1:
                return gradient
            return gradient.index_fill(0, torch.tensor([0]), math.nan)

        if dist.get_rank() == 1:
            weights = dict(model.named_parameters())
            weights["layers.0.attention_norm.weight"].register_hook(corrupt)


if __name__ == "__main__":
    pretrain(Extensions(callbacks=(BrokenCopy(),)))
