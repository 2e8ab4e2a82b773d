"""What the training loop asks of an engine, whatever runs below it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from megatron_ds.data.micro_batches import Batch
from megatron_ds.train_state import StepPlan, StepResult


class Engine(Protocol):
    """One verb for training, one for evaluation, two for persistence."""

    @property
    def module(self) -> nn.Module:
        """The model, as the engine holds it."""

    @property
    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration in force."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in force, read from the engine itself: words -> plain value."""

    def state_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of this process's lasting tensors: "device" or "host" -> kind -> bytes."""

    def train_step(self, batches: Iterator[Batch], plan: StepPlan) -> StepResult:
        """One optimizer step over plan.num_micro_batches batches.

        The result's loss is this rank's mean, a tensor on the device that nobody has waited for.
        """

    def eval_loss(self, batch: Batch) -> torch.Tensor:
        """This rank's mean loss of one micro-batch, without gradients or dropout."""

    def params_norm(self) -> float:
        """Norm of all parameters, each counted once. Collective."""

    def save(self, folder: Path, tag: str) -> None:
        """Writes this rank's files below folder/tag; collective, and not atomic by itself.

        Raises OSError where this rank's disk does, when the collective part is through.
        """

    def load(self, folder: Path, tag: str) -> None:
        """Restores weights and optimizer states from folder/tag; collective.

        Raises ValueError for a file that holds other than tensors and plain values.
        """
