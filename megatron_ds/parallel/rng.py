"""Random streams of a tensor-parallel run: one replicated, one per rank.

Dropout where every tensor-parallel rank holds the same activations must draw the same mask
everywhere: torch's default generator. Dropout inside a cut layer must differ: the sharded stream,
kept in DeepSpeed's tracker, so that DeepSpeed's activation checkpointing restores it, and ours can.
Both are seeded per micro-batch from the position in the data, so that a resumed run has no random
state to restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on the parts alone, the same in every process and version of
    Python.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RngStreams:
    """The replicated and the sharded stream of this process."""

    def __init__(self, tp_rank: int) -> None:
        self._tp_rank = tp_rank
        self._tracker = get_cuda_rng_tracker()
        self._seed_sharded(stable_seed("sharded", tp_rank))

    def seed_micro_batch(self, seed: int, position: int) -> None:
        """Make the dropout of the next micro-batch a function of these numbers alone.

        seed: the run's. position: global number of the micro-batch's first sample.
        """
        torch.manual_seed(stable_seed("replicated", seed, position))
        self._seed_sharded(stable_seed("sharded", seed, position, self._tp_rank))

    @contextmanager
    def fork_tp_rng(self) -> Iterator[None]:
        """Inside, the default generator draws from the stream of this tensor-parallel rank."""
        with self._tracker.fork():
            yield

    def sharded_state(self) -> Any:
        """The sharded stream's state, for `restored`."""
        return self._tracker.get_states()

    @contextmanager
    def restore_tp_rng(self, state: Any) -> Iterator[None]:
        """Inside, the sharded stream starts from `state`; afterwards it goes on where it was."""
        current = self._tracker.get_states()
        self._tracker.set_states(state)
        try:
            yield
        finally:
            self._tracker.set_states(current)

    def _seed_sharded(self, seed: int) -> None:
        self._tracker.reset()
        self._tracker.add("model-parallel-rng", seed)
