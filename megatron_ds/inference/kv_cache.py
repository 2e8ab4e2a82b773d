"""Key-value cache in memory that is allocated once.

A cache has slots for texts of different lengths. Its views implement `model.attention.
KeyValueCache`: each is what one forward pass sees. Device, data type (fp32 on CPUs) and this rank's
number of heads are taken from the first keys.

Shapes: B texts, k this rank's key-value heads, S new tokens, L tokens of the longest text, D head
size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

FILLED_TOKENS = 64
"""Tokens of every text that are set to 0 at a time, before they are used."""


class PreallocatedCache:
    """The cache of all layers of a model. The texts in use have the first slots."""

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        """
        Args:
            layers: Number of layers.
            slots: Number of texts.
            capacity: Number of tokens of a text.
        """
        self.slots = slots
        self.lengths = [0] * slots
        """Stored tokens of each text."""
        self._layers = layers
        self._capacity = capacity
        self._finite = 0
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def view(
        self, first: int, count: int, tokens: Sequence[int], device: torch.device | None = None
    ) -> CacheView:
        """A pass of new tokens of some texts.

        Args:
            first: Slot of the first text.
            count: Number of texts.
            tokens: New tokens of each text. A pass may have more, which are not stored. Where the
                texts have different lengths, each has one.
            device: Device of the model.
        """
        view = CacheView(self, first, self.lengths[first : first + count], device)
        for slot, new in enumerate(tokens, start=first):
            self.lengths[slot] += new
        return view

    def buffers(self, layer: int, like: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [slots, k, capacity, D], finite up to a length."""
        if not self._buffers:
            shape = (self.slots, like.shape[1], self._capacity, like.shape[3])
            # torch's attention of one query takes two to five times as long in bf16 on a CPU.
            dtype = torch.float32 if like.device.type == "cpu" else like.dtype
            self._buffers = [
                (like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=dtype))
                for _ in range(self._layers)
            ]
        if self._finite < end:
            # A text does not see what longer texts have beyond its end, but 0 x NaN is NaN. All of
            # the memory is not filled at once, because a CPU provides what is used.
            start, self._finite = self._finite, min(self._capacity, end + FILLED_TOKENS)
            for part in itertools.chain.from_iterable(self._buffers):
                part[:, :, start : self._finite] = 0
        return self._buffers[layer]

    def clear(self, slot: int) -> None:
        """Removes a text whose keys or values may not be finite."""
        self.lengths[slot] = 0
        for part in itertools.chain.from_iterable(self._buffers):
            part[slot, :, : self._finite] = 0

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Copies the first tokens of a text, or all, to another slot."""
        length = self.lengths[source] if length is None else length
        self.lengths[target] = length
        if source != target:
            for part in itertools.chain.from_iterable(self._buffers):
                part[target, :, :length] = part[source, :, :length]

    def reorder(self, slots: Sequence[int]) -> None:
        """The texts of these slots, some of them several times, take the first slots."""
        end = max(self.lengths[slot] for slot in slots)
        for part in itertools.chain.from_iterable(self._buffers):
            part[: len(slots), :, :end] = part[list(slots), :, :end]
        self.lengths[: len(slots)] = [self.lengths[slot] for slot in slots]


class CacheView:
    """What one forward pass sees of a cache."""

    def __init__(
        self,
        cache: PreallocatedCache,
        first: int,
        lengths: Sequence[int],
        device: torch.device | None,
    ) -> None:
        self._cache = cache
        self._slots = slice(first, first + len(lengths))
        self.length = max(lengths)
        self.positions_BS: Tensor | None = None
        if min(lengths) < self.length:
            self.positions_BS = torch.tensor(lengths, device=device).unsqueeze(1)
            self._slots_B = torch.arange(first, self._slots.stop, device=device)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's keys and values.

        Args:
            layer: Number of the layer, from 0.
            k: [B, k, S, D].
            v: [B, k, S, D].

        Returns:
            Views of the keys and values of the texts, each [B, k, L, D]. What a shorter text does
            not have is arbitrary but finite.
        """
        end = self.length + k.shape[2]
        keys, values = self._cache.buffers(layer, k, end)
        if self.positions_BS is None:
            keys[self._slots, :, self.length : end] = k
            values[self._slots, :, self.length : end] = v
        else:
            positions_B = self.positions_BS[:, 0]
            keys[self._slots_B, :, positions_B] = k[:, :, 0].to(keys.dtype)
            values[self._slots_B, :, positions_B] = v[:, :, 0].to(values.dtype)
        return keys[self._slots, :, :end], values[self._slots, :, :end]
