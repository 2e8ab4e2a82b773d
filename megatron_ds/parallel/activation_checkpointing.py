"""Activation checkpointing: what is recomputed in the backward pass, and by whom.

Recomputation must draw the dropout masks of the first pass again, from both random streams. torch
restores the default generator alone, so its checkpoint gets a context that restores the sharded
stream; DeepSpeed's restores both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint

from megatron_ds.config import RecomputeConfig
from megatron_ds.parallel.mesh import Mpu
from megatron_ds.parallel.rng import RngStreams


class ActivationCheckpointing:
    """Runs functions so that their inner activations are recomputed instead of stored."""

    def __init__(self, config: RecomputeConfig, rng: RngStreams, mpu: Mpu) -> None:
        self._config = config
        self._rng = rng
        self._mpu = mpu

    @property
    def granularity(self) -> str | None:
        """None, "full" (units of layers) or "selective" (the attention core)."""
        return self._config.granularity

    @property
    def layers_per_unit(self) -> int:
        return self._config.checkpoint_num_layers

    @property
    def by_deepspeed(self) -> bool:
        return self._config.by_deepspeed

    def prepare(self, layers: int) -> None:
        """Tell DeepSpeed how, if it is DeepSpeed that recomputes. layers: of the whole model."""
        if not self._config.by_deepspeed:
            return
        deepspeed.checkpointing.configure(
            self._mpu,
            partition_activations=self._config.partition_activations,
            contiguous_checkpointing=self._config.contigious_checkpointing,
            num_checkpoints=-(-layers // self.layers_per_unit),
            checkpoint_in_cpu=self._config.checkpoint_in_cpu,
            synchronize=self._config.synchronize_each_layer,
            profile=self._config.profile_backward,
        )

    def run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """function(*inputs); in training, only the inputs are kept for the backward pass."""
        # Without a backward pass nothing is kept anyway, and DeepSpeed's buffers would never be
        # emptied.
        if not torch.is_grad_enabled():
            return function(*inputs)
        if self._config.by_deepspeed:
            output: torch.Tensor = deepspeed.checkpointing.checkpoint(function, *inputs)
        else:
            output = checkpoint(function, *inputs, use_reentrant=False, context_fn=self._contexts)
        return output

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the first pass, and for the recomputation: the sharded stream as it was before the
        first.
        """
        return nullcontext(), self._rng.restore_tp_rng(self._rng.sharded_state())
