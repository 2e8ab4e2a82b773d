"""Activation checkpointing: inner activations are recomputed in the backward pass, not stored.

Owns the random states of a recomputation, which must draw the dropout masks of the first pass
again, from both random streams. Knows no layers and no DeepSpeed: another implementation of
checkpointing comes in as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ds.config import RecomputeConfig
from megatron_ds.parallel.rng import RngStreams

Function = Callable[..., Tensor]


class ActivationCheckpointing:
    """Runs functions so that their inner activations are recomputed instead of stored.

    Args:
        config: Options of recomputation.
        rng: Random streams that a recomputation restores.
        checkpoint: Called with a function and its inputs; computes the function, and again in the
            backward pass, for which it restores both random streams. None: torch's.
    """

    def __init__(
        self, config: RecomputeConfig, rng: RngStreams, checkpoint: Function | None = None
    ) -> None:
        self.config = config
        self._rng = rng
        self._checkpoint = self._checkpoint_by_torch if checkpoint is None else checkpoint

    def run(self, function: Function, *inputs: Tensor) -> Tensor:
        """Compute function(*inputs), keeping only the inputs for the backward pass."""
        # Without a backward pass nothing is kept anyway, and DeepSpeed's contiguous buffers, which
        # the backward pass empties, would overflow.
        if not torch.is_grad_enabled():
            return function(*inputs)
        return self._checkpoint(function, *inputs)

    def _checkpoint_by_torch(self, function: Function, *inputs: Tensor) -> Tensor:
        output: Tensor = checkpoint(
            function, *inputs, use_reentrant=False, context_fn=self._contexts
        )
        return output

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of the first pass and of the recomputation.

        torch restores the default generator by itself, but not the sharded stream.
        """
        return nullcontext(), self._rng.restore_tp_rng(self._rng.sharded_state)
