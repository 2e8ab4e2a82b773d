"""The key-value cache alone; test_generate.py compares a model with and without it."""

from __future__ import annotations

import torch

from megatron_ds.inference.kv_cache import PreallocatedCache


def values(tokens: int, start: int) -> torch.Tensor:
    """[2, 3, tokens, 4], all different."""
    return torch.arange(2 * 3 * 100 * 4).view(2, 3, 100, 4).float()[:, :, start : start + tokens]


def test_keys_and_values_are_appended_per_layer() -> None:
    cache = PreallocatedCache(layers=2, capacity=10)
    for start, tokens in ((0, 4), (4, 1), (5, 3)):
        assert cache.length == start
        for layer in range(2):
            k, v = cache.update(layer, values(tokens, start) + layer, -values(tokens, start))
            assert torch.equal(k, values(start + tokens, 0) + layer)
            assert torch.equal(v, -values(start + tokens, 0))
    assert cache.length == 8


def test_memory_is_allocated_once() -> None:
    cache = PreallocatedCache(layers=1, capacity=10)
    addresses = {
        part.untyped_storage().data_ptr()
        for start in range(10)
        for part in cache.update(0, values(1, start), values(1, start))
    }
    assert len(addresses) == 2


def test_keep_drops_the_other_prompts() -> None:
    cache = PreallocatedCache(layers=2, capacity=10)
    for layer in range(2):
        cache.update(layer, values(4, 0), -values(4, 0))

    cache.keep([1])

    assert cache.length == 4
    for layer in range(2):
        k, v = cache.update(layer, values(1, 4)[1:], -values(1, 4)[1:])
        assert torch.equal(k, values(5, 0)[1:])
        assert torch.equal(v, -values(5, 0)[1:])
