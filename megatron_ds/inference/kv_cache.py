"""Key-value cache in memory that is allocated once.

Implements `model.attention.KeyValueCache`. Data type, device and this rank's number of heads are
taken from the first keys.

Shapes: B prompts, k this rank's key-value heads, S new tokens, L all tokens so far, D head size.
"""

from __future__ import annotations

import torch


class PreallocatedCache:
    """The cache of one batch, shared by all layers of a model."""

    def __init__(self, layers: int, capacity: int) -> None:
        """
        Args:
            layers: Number of layers.
            capacity: Number of tokens, prompts included.
        """
        self._layers = layers
        self._capacity = capacity
        self.length = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends a layer's keys and values. Layers must be updated in order.

        Args:
            layer: Number of the layer, from 0.
            k: [B, k, S, D].
            v: [B, k, S, D].

        Returns:
            Views of all keys and values of the layer, each [B, k, L, D].
        """
        end = self.length + k.shape[2]
        if layer == len(self._buffers):
            shape = (k.shape[0], k.shape[1], self._capacity, k.shape[3])
            self._buffers.append((k.new_empty(shape), v.new_empty(shape)))
        keys, values = self._buffers[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        if layer == self._layers - 1:
            self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, rows: list[int]) -> None:
        """Keeps these rows of the batch, in this order, and drops the others."""
        self._buffers = [(keys[rows], values[rows]) for keys, values in self._buffers]
