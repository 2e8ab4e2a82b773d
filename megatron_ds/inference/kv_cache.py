"""Keys and values of the tokens that were already fed, in memory that is allocated once.

Honours `model.attention.KeyValueCache`. Type, device and this rank's number of heads are those of
the first keys that come.

Shapes: B prompts, k this rank's key-value heads, S new tokens, L all tokens so far, D head size.
"""

from __future__ import annotations

import torch


class PreallocatedCache:
    """The cache of one batch, which all layers of one model share."""

    def __init__(self, layers: int, capacity: int) -> None:
        """capacity: tokens, those of the prompts included."""
        self._layers = layers
        self._capacity = capacity
        self._length = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def length(self) -> int:
        return self._length

    def update(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, k, S, D] of a layer; return views of all, [B, k, L, D]. Layers come in order.

        Raises ValueError if the capacity is exceeded.
        """
        end = self._length + k.shape[2]
        if end > self._capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {self._capacity}")
        if layer == len(self._buffers):
            shape = (k.shape[0], k.shape[1], self._capacity, k.shape[3])
            self._buffers.append((k.new_empty(shape), v.new_empty(shape)))
        keys, values = self._buffers[layer]
        keys[:, :, self._length : end] = k
        values[:, :, self._length : end] = v
        if layer == self._layers - 1:
            self._length = end
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, rows: list[int]) -> None:
        """Forget all prompts of the batch but these, which stay in this order."""
        self._buffers = [(keys[rows], values[rows]) for keys, values in self._buffers]
