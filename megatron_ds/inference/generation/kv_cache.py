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
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.inference.generation.device_inputs import to_device
from megatron_ds.model.attention.cores import KEY_BLOCK, round_up

FILLED_TOKENS = 64
"""Tokens of every text that are set to 0 at a time, before they are used."""


class PreallocatedCache:
    """The cache of all layers of a model. The texts in use have the first slots."""

    def __init__(
        self,
        slots: int,
        capacity: int,
        like: Tensor,
        windows: Sequence[int | None] = (),
        *,
        has_spare: bool = False,
    ) -> None:
        """
        Args:
            slots: Number of texts.
            capacity: Number of tokens of a text.
            like: A tensor on the model's device and of the type of its activations.
            windows: Keys that a query of each layer attends to; None, or beyond the last: all.
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
        self.windows = dict(enumerate(windows))
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
        lengths = self.lengths[texts]
        queries = queries or max(tokens)
        self.lengths[texts] = [old + new for old, new in zip(lengths, tokens, strict=True)]
        length = max(lengths)
        has_equal_lengths = min(lengths) == length
        end = length + queries
        if has_equal_lengths and not self.is_wider:
            return CacheView(self, texts, length, end, tokens=tokens, queries=queries)
        if self.is_wider:
            end = round_up(end, KEY_BLOCK)
        elif not is_host(self.device.type):
            end = self.rounded(end)
        starts_B = to_device(lengths, self.device)
        positions_BS = starts_B.unsqueeze(1) + torch.arange(queries, device=self.device)
        slots_B = torch.arange(first, texts.stop, device=self.device)
        slots = None if has_equal_lengths else slots_B
        return CacheView(self, texts, length, end, positions_BS, slots, tokens, queries)

    def ring(self, window: int | None) -> int:
        """Keys of a text that layers with a window keep: the one at position p in place p modulo
        this number."""
        ring = self._capacity if window is None else round_up(window, KEY_BLOCK)
        return min(ring, self._capacity)

    def rounded(self, keys: int) -> int:
        """A number of keys, rounded up so that there are few different ones.

        The multiples grow from `KEY_BLOCK` to an eighth of the next power of two.
        """
        multiple = max(KEY_BLOCK, 1 << (keys - 1).bit_length() >> 3)
        return min(round_up(keys, multiple), self._capacity)

    def buffers(self, layer: int, k: Tensor, v: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [slots, k, `ring`, D], finite up to a length.

        Args:
            layer: Number of the layer.
            k: New keys of the layer, [B, k, S, D].
            v: New values.
            end: The length.
        """
        if self._finite < end:
            # A text does not see what longer texts have beyond its end, but 0 x NaN is NaN. All of
            # the memory is not filled at once, because a CPU provides what is used.
            start = self._finite
            self._finite = min(self._capacity, end + FILLED_TOKENS)
            for part in self._parts():
                part[:, :, start : self._finite] = 0
        if layer not in self._buffers:
            ring = self.ring(self.windows.get(layer))
            keys, values = (
                new.new_empty((self._places, new.shape[1], ring, new.shape[3]), dtype=self._dtype)
                for new in (k, v)
            )
            keys[:, :, : self._finite] = 0
            values[:, :, : self._finite] = 0
            self._buffers[layer] = keys, values
        return self._buffers[layer]

    def _parts(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(self._buffers.values())

    def clear(self, slot: int) -> None:
        """Removes a text whose keys or values may not be finite."""
        self.lengths[slot] = 0
        for part in self._parts():
            part[slot, :, : self._finite] = 0

    def can_copy(self, source: int, length: int) -> bool:
        """Whether a text has all keys that tokens after its first ones attend to."""
        windows = filter(None, self.windows.values())
        return all(
            self.lengths[source] <= max(ring, length + ring - window + 1)
            for window in windows
            for ring in [self.ring(window)]
        )

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Copies the first tokens of a text, or all, to another slot, if `can_copy`."""
        length = self.lengths[source] if length is None else length
        self.lengths[target] = length
        if source != target:
            for part in self._parts():
                end = length if part.shape[2] == self._capacity else self._finite
                part[target, :, :end] = part[source, :, :end]

    def reorder(self, slots: Sequence[int]) -> None:
        """The texts of these slots, some of them several times, take the first slots."""
        end = max(self.lengths[slot] for slot in slots)
        order = to_device(slots, self.device)
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
    tokens: Sequence[int] = ()
    """New tokens of each text that are kept."""
    queries: int = 1

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
        ring = keys.shape[2]
        window = self.cache.windows.get(layer)
        if window is not None and self._is_ring(window) and k.shape[2] > 1:
            return self._add(keys, k, window), self._add(values, v, window)
        if self.slots_B is None or self.positions_BS is None:
            new = slice(self.length % ring, self.length % ring + k.shape[2])
            keys[self.texts, :, new] = k
            values[self.texts, :, new] = v
        else:
            positions_B = self.positions_BS[:, 0]
            if window is not None and self._is_ring(window):
                positions_B = positions_B % ring
            keys[self.slots_B, :, positions_B] = k[:, :, 0].to(keys.dtype)
            values[self.slots_B, :, positions_B] = v[:, :, 0].to(values.dtype)
        return keys[self.texts, :, : self.num_keys], values[self.texts, :, : self.num_keys]

    def positions_of(self, window: int | None) -> Tensor | None:
        if window is None or not self._is_ring(window):
            return None
        device = self.cache.device
        if self.queries > 1:
            return torch.arange(self._first(window), self.num_keys, device=device)[None]
        ring = self.cache.ring(window)
        places_L = torch.arange(min(self.num_keys, ring), device=device)
        last = self.length if self.positions_BS is None else self.positions_BS
        positions_BL = (last - (last - places_L) % ring).view(-1, len(places_L))
        return positions_BL.where(positions_BL >= 0, places_L)  # an empty place: not yet visible

    def _is_ring(self, window: int) -> bool:
        return self.cache.ring(window) < self.cache.ring(None)

    def _first(self, window: int) -> int:
        """Position of the first key that several queries see, a multiple of `KEY_BLOCK`."""
        return max(0, self.length - window + 1) // KEY_BLOCK * KEY_BLOCK

    def _add(self, kept: Tensor, new: Tensor, window: int) -> Tensor:
        """Appends several tokens in a ring; returns keys or values in the order of positions."""
        first = self._first(window)
        ring = kept.shape[2]
        new = new.to(kept.dtype)
        places = torch.arange(first, self.length, device=kept.device) % ring
        seen = torch.cat([kept[self.texts][:, :, places], new], dim=2)
        for text, tokens, count in zip(kept[self.texts], new, self.tokens, strict=True):
            start = max(0, count - ring)
            places = torch.arange(self.length + start, self.length + count, device=kept.device)
            text[:, places % ring] = tokens[:, start:count]
        return F.pad(seen, (0, 0, 0, self.num_keys - first - seen.shape[2]))
