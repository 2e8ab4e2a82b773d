"""The order of a blend: from weights and a number of samples to a `BlendOrder`.

Knows weights and the index cache; no files of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.data.blend import BlendOrder, StoredOrder
from megatron_ds.data.cache import ArrayCache, Arrays
from megatron_ds.data.sample_index import blend

BLEND_FORMAT = 2
"""Raised when the same weights begin to give another order."""


def blend_order(
    weights: Sequence[float], num_samples: int, cache: ArrayCache | None = None
) -> BlendOrder:
    """The order of `num_samples` samples of sources of these weights.

    weights: normalised. cache: keeps what took long to make. Raises ValueError for an impossible
    number of sources, and if the cache cannot be written.
    """
    weights = list(weights)

    def make() -> Arrays:
        source, sample = blend(weights, num_samples)
        return {"source": source, "sample": sample}

    decides = {"format": BLEND_FORMAT, "weights": weights, "samples": num_samples}
    made = make() if cache is None else cache.get("blend", decides, make)
    return StoredOrder(made["source"], made["sample"], len(weights))
