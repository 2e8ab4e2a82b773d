"""Parts in which layers compute, which determine their memory. Imports no torch."""

from __future__ import annotations

CHUNK_BYTES = 2**28
"""Bytes of the logits of a chunk on a CPU, in the model's type."""
DEVICE_CHUNK_BYTES = 2**29
"""Bytes of the logits of a chunk on other devices, whose matmuls need more rows to be fast."""


def chunk_bytes(*, on_host: bool) -> int:
    """Most bytes of the logits of a chunk."""
    return CHUNK_BYTES if on_host else DEVICE_CHUNK_BYTES


def num_tiles(tokens: int, hidden: int) -> int:
    """Tiles of the MLP of a micro-batch of this many tokens."""
    return max(2, -(-tokens // hidden))
