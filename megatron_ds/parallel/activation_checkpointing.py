"""Activation checkpointing: inner activations are recomputed in the backward pass, not stored.

Owns the random states of a recomputation, which must draw the dropout masks of the first pass
again, from both random streams. Knows no layers and no DeepSpeed: another implementation of
checkpointing comes in as a `CheckpointFunction`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from megatron_ds.config import RecomputeConfig
from megatron_ds.parallel.rng import RngStreams

Function = Callable[..., torch.Tensor]


class CheckpointFunction(Protocol):
    """Computes function(*inputs) and recomputes it in the backward pass.

    An implementation restores both random streams for the recomputation.
    """

    def __call__(self, function: Function, *inputs: torch.Tensor) -> torch.Tensor: ...


class ActivationCheckpointing:
    """Runs functions so that their inner activations are recomputed instead of stored.

    Args:
        config: What is recomputed.
        rng: Random streams that a recomputation restores.
        checkpoint: Implementation. None: torch's.
    """

    def __init__(
        self,
        config: RecomputeConfig,
        rng: RngStreams,
        checkpoint: CheckpointFunction | None = None,
    ) -> None:
        self._config = config
        self._rng = rng
        self._checkpoint = self._checkpoint_by_torch if checkpoint is None else checkpoint

    @property
    def granularity(self) -> str | None:
        """None, "full" (chunks of layers) or "selective" (the attention core)."""
        return self._config.recompute_granularity

    @property
    def layers_per_chunk(self) -> int:
        return self._config.checkpoint_num_layers

    def run(self, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute function(*inputs), keeping only the inputs for the backward pass."""
        # Without a backward pass nothing is kept anyway, and DeepSpeed's contiguous buffers, which
        # the backward pass empties, would overflow.
        if not torch.is_grad_enabled():
            return function(*inputs)
        return self._checkpoint(function, *inputs)

    def _checkpoint_by_torch(self, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(
            function, *inputs, use_reentrant=False, context_fn=self._contexts
        )
        return output

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of the first pass and of the recomputation.

        torch restores the default generator by itself, but not the sharded stream.
        """
        return nullcontext(), self._rng.restore_tp_rng(self._rng.sharded_state())
