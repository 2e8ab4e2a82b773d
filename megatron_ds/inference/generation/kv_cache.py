"""Key-value cache in memory that is allocated once.

A cache has slots for texts of different lengths. Its views implement `model.attention.
KeyValueCache`: each is one forward pass's part of the cache. On CPUs it is in fp32, and attention
to it is batch-invariant where the activations are narrower. The first keys and values of a layer
determine the number and sizes of this rank's heads.

Shapes: B texts, k this rank's key-value heads, S new tokens, L keys, D head size, which may differ
between keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.inference.generation.device_inputs import to_device
from megatron_ds.model.attention.cores import KEY_BLOCK, round_up

FILLED_TOKENS = 64
"""Tokens of every text that are set to 0 at a time, before they are used."""


class PreallocatedCache:
    """The cache of all layers of a model. The texts in use have the first slots."""

    def __init__(self, slots: int, capacity: int, like: Tensor, *, has_spare: bool = False) -> None:
        """
        Args:
            slots: Number of texts.
            capacity: Number of tokens of a text.
            like: A tensor on the model's device and of the type of its activations.
            has_spare: Add a last slot, which no text has.
        """
        self.slots = slots
        self.lengths = [0] * slots
        """Stored tokens of each text."""
        self.device = like.device
        # torch's attention of one query takes two to five times as long in bf16 on a CPU.
        self._dtype = torch.float32 if is_host(like.device.type) else like.dtype
        self.is_wider = self._dtype != like.dtype
        """Than the activations."""
        self.capacity = capacity
        self._places = slots + has_spare
        self._capacity = round_up(capacity, KEY_BLOCK)
        self._finite = 0
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def view(self, first: int, tokens: Sequence[int], queries: int | None = None) -> CacheView:
        """A pass of new tokens of some texts.

        Args:
            first: Slot of the first text.
            tokens: New tokens of each text. Where the texts have different lengths, each has one.
            queries: Tokens of the pass for each text; tokens beyond the new ones are not kept.
                None: as many as the most new tokens.
        """
        texts = slice(first, first + len(tokens))
        lengths, queries = self.lengths[texts], queries or max(tokens)
        self.lengths[texts] = [old + new for old, new in zip(lengths, tokens, strict=True)]
        length = max(lengths)
        has_equal_lengths, end = min(lengths) == length, length + queries
        if has_equal_lengths and not self.is_wider:
            return CacheView(self, texts, length, end)
        if self.is_wider:
            end = round_up(end, KEY_BLOCK)
        elif not is_host(self.device.type):
            end = self.rounded(end)
        starts_B = to_device(lengths, self.device)
        positions_BS = starts_B.unsqueeze(1) + torch.arange(queries, device=self.device)
        slots_B = torch.arange(first, texts.stop, device=self.device)
        return CacheView(
            self, texts, length, end, positions_BS, None if has_equal_lengths else slots_B
        )

    def rounded(self, keys: int) -> int:
        """A number of keys, rounded up so that there are few different ones.

        The multiples grow from `KEY_BLOCK` to an eighth of the next power of two.
        """
        multiple = max(KEY_BLOCK, 1 << (keys - 1).bit_length() >> 3)
        return min(round_up(keys, multiple), self._capacity)

    def buffers(self, layer: int, k: Tensor, v: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [slots, k, capacity, D], finite up to a length.

        Args:
            layer: Number of the layer.
            k: New keys of the layer, [B, k, S, D].
            v: New values.
            end: The length.
        """
        if self._finite < end:
            # A text does not see what longer texts have beyond its end, but 0 x NaN is NaN. All of
            # the memory is not filled at once, because a CPU provides what is used.
            start, self._finite = self._finite, min(self._capacity, end + FILLED_TOKENS)
            for part in self._parts():
                part[:, :, start : self._finite] = 0
        if layer not in self._buffers:
            keys, values = (
                new.new_empty(
                    (self._places, new.shape[1], self._capacity, new.shape[3]), dtype=self._dtype
                )
                for new in (k, v)
            )
            keys[:, :, : self._finite] = values[:, :, : self._finite] = 0
            self._buffers[layer] = keys, values
        return self._buffers[layer]

    def _parts(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(self._buffers.values())

    def clear(self, slot: int) -> None:
        """Removes a text whose keys or values may not be finite."""
        self.lengths[slot] = 0
        for part in self._parts():
            part[slot, :, : self._finite] = 0

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Copies the first tokens of a text, or all, to another slot."""
        length = self.lengths[source] if length is None else length
        self.lengths[target] = length
        if source != target:
            for part in self._parts():
                part[target, :, :length] = part[source, :, :length]

    def reorder(self, slots: Sequence[int]) -> None:
        """The texts of these slots, some of them several times, take the first slots."""
        end, order = max(self.lengths[slot] for slot in slots), to_device(slots, self.device)
        for part in self._parts():
            part[: len(slots), :, :end] = part[order, :, :end]
        self.lengths[: len(slots)] = [self.lengths[slot] for slot in slots]


@dataclass(frozen=True)
class CacheView:
    """The part of a cache that one forward pass sees."""

    cache: PreallocatedCache
    texts: slice
    """Their slots."""
    length: int
    num_keys: int
    positions_BS: Tensor | None = None
    slots_B: Tensor | None = None
    """Positions of the new keys and values of each text, if the texts have different lengths."""

    @property
    def is_wider(self) -> bool:
        return self.cache.is_wider

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's keys and values.

        Args:
            layer: Number of the layer, from 0.
            k: [B, k, S, D].
            v: [B, k, S, D].

        Returns:
            Views of the keys and values of the texts, each [B, k, L, D]. What a text does not have
            is arbitrary but finite.
        """
        keys, values = self.cache.buffers(layer, k, v, self.num_keys)
        if self.slots_B is None or self.positions_BS is None:
            new = slice(self.length, self.length + k.shape[2])
            keys[self.texts, :, new], values[self.texts, :, new] = k, v
        else:
            positions_B = self.positions_BS[:, 0]
            keys[self.slots_B, :, positions_B] = k[:, :, 0].to(keys.dtype)
            values[self.slots_B, :, positions_B] = v[:, :, 0].to(values.dtype)
        return keys[self.texts, :, : self.num_keys], values[self.texts, :, : self.num_keys]
