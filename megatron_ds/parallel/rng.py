"""Random streams of a tensor-parallel run: one replicated, one per tensor-parallel rank.

Owns when and from what the streams are seeded. Dropout on activations that every tensor-parallel
rank holds must draw the same mask everywhere: the replicated stream, torch's default generator.
Dropout on sharded activations must differ per rank: the sharded stream, which takes the default
generator's place inside `fork_tp_rng`. Both are seeded for each layer of each micro-batch from the
position in the data and the layer's number: a resumed run has no random state to restore, and a
pipeline stage draws the masks of the complete model. Sequence-parallel ranks hold different tokens
and draw different masks, from both streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ds.config.devices import HOST, is_host

CPU = torch.device(HOST)


class MicroBatchSeed(NamedTuple):
    """Inputs of the random seeds of one micro-batch's layers."""

    seed: int
    """Seed of the run."""
    position: int
    """Position of its first sample in the data order."""


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on `parts` alone, not on the process or the Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def default_state(device: torch.device) -> Tensor:
    """State of torch's default generator for a device."""
    if is_host(device.type):
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_default_state(device: torch.device, state: Tensor) -> None:
    """Continue torch's default generator for a device from a state."""
    if is_host(device.type):
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class RngStreams:
    """The replicated and the sharded stream of this process.

    Args:
        tp_rank: Tensor-parallel rank.
        device: Device on which dropout masks are drawn.
        sp_rank: Sequence-parallel rank; the first one draws what a run without others draws.
    """

    def __init__(self, tp_rank: int, device: torch.device = CPU, sp_rank: int = 0) -> None:
        self._tp_rank = tp_rank
        self._slice = ("slice", sp_rank) if sp_rank else ()
        self._device = device
        self._generator = torch.Generator(device)
        """Makes states of seeds. A new generator for each layer takes longer than a launch."""
        self.sharded_state = self._seeded_state(stable_seed("sharded", tp_rank, *self._slice))
        """State of the sharded stream, for `restore_tp_rng`."""
        self._seed: int | None = None
        self._position = 0
        self._stride = 0

    def begin_step(self, seed: int, position: int, stride: int) -> None:
        """Set from what the micro-batches of the next step are seeded.

        Args:
            seed: Seed of the run.
            position: Position of the first micro-batch: the samples consumed before its first one.
            stride: Samples from one micro-batch of this rank to its next.
        """
        self._seed = seed
        self._position = position
        self._stride = stride

    def next_micro_batch(self) -> MicroBatchSeed | None:
        """The seed of the step's next micro-batch, for `begin_layer`; None without `begin_step`.

        The model calls this once in each training forward pass, and not in evaluation.
        """
        if self._seed is None:
            return None
        current = MicroBatchSeed(self._seed, self._position)
        self._position += self._stride
        return current

    def begin_layer(self, micro_batch: MicroBatchSeed | None, layer: int) -> None:
        """Seed both streams for a layer, also when its activations are recomputed.

        Args:
            micro_batch: Seed that `next_micro_batch` returned. None leaves the streams unchanged.
            layer: Number of the layer.
        """
        if micro_batch is None:
            return
        position = *micro_batch, layer
        self._seed_default(stable_seed("replicated", *position, *self._slice))
        self.sharded_state = self._seeded_state(
            stable_seed("sharded", *position, self._tp_rank, *self._slice)
        )

    def states(self) -> list[bytes]:
        """The states of both streams."""
        return [x.cpu().numpy().tobytes() for x in (self._default_state(), self.sharded_state)]

    @contextmanager
    def fork_tp_rng(self) -> Iterator[None]:
        """Let torch's default generator draw from the sharded stream inside the context."""
        replicated = self._default_state()
        self._set_default_state(self.sharded_state)
        try:
            yield
        finally:
            self.sharded_state = self._default_state()
            self._set_default_state(replicated)

    @contextmanager
    def restore_tp_rng(self, state: Tensor) -> Iterator[None]:
        """Start the sharded stream from `state` inside the context; then continue where it was."""
        current = self.sharded_state
        self.sharded_state = state
        try:
            yield
        finally:
            self.sharded_state = current

    def _seeded_state(self, seed: int) -> Tensor:
        return self._generator.manual_seed(seed).get_state()

    def _seed_default(self, seed: int) -> None:
        """Like torch.manual_seed, which formats stack traces for the devices that are not there."""
        torch.default_generator.manual_seed(seed)
        if not is_host(self._device.type):
            self._set_default_state(self._seeded_state(seed))

    def _default_state(self) -> Tensor:
        return default_state(self._device)

    def _set_default_state(self, state: Tensor) -> None:
        set_default_state(self._device, state)
