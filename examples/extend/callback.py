"""Trains with a callback that keeps the lowest validation loss and its iteration in a file.

torchrun --nproc_per_node 8 examples/extend/callback.py FLAGS OF pretrain_gpt.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megatron_ds.extend import Callback, Config, Extensions, TrainState, pretrain


class BestLoss(Callback):
    """Writes best.txt in --save: the iteration with the lowest validation loss, and the loss."""

    def on_start(self, config: Config, state: TrainState, model: object) -> None:
        assert config.checkpoint.save is not None, "--save has the file"
        self.file = Path(config.checkpoint.save) / "best.txt"
        self.best = float(self.file.read_text().split()[1]) if self.file.exists() else math.inf

    def after_evaluation(self, state: TrainState, split: str, losses: Mapping[str, float]) -> None:
        loss = math.fsum(losses.values()) / max(1, len(losses))
        if split == "validation" and losses and loss < self.best:
            self.best = loss
            if dist.get_rank() == 0:  # callbacks are called on every rank
                self.file.write_text(f"{state.iteration} {loss}\n")


if __name__ == "__main__":
    pretrain(Extensions(callbacks=[BestLoss()]))
