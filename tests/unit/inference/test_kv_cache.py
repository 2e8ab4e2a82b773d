"""The key-value cache, and the model that reads it."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.inference.kv_cache import PreallocatedCache
from tests.unit.inference.models import KINDS, VOCAB, model_of


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


def test_exceeding_the_capacity_is_an_error() -> None:
    cache = PreallocatedCache(layers=1, capacity=4)
    cache.update(0, values(3, 0), values(3, 0))
    with pytest.raises(ValueError, match=r"5 .* 4"):
        cache.update(0, values(2, 3), values(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_the_cache_equal_those_without(kind: str) -> None:
    model = model_of(kind, init_method_std=0.1).eval()
    tokens = torch.randint(0, VOCAB, (3, 21), generator=torch.Generator().manual_seed(2))
    cache = PreallocatedCache(layers=2, capacity=21)

    with torch.no_grad():
        expected = model(tokens)
        # Also several tokens in one pass after the first.
        parts = [model(part, cache=cache) for part in tokens.split([5, 1, 1, 7, 1, 6], dim=1)]

    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["learned", "none"])
def test_last_only_gives_the_logits_of_the_last_position(kind: str) -> None:
    model = model_of(kind).eval()
    tokens = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(2))

    with torch.no_grad():
        last, every = model(tokens, last_only=True), model(tokens)

    assert last.shape == (3, 1, every.shape[-1])
    torch.testing.assert_close(last, every[:, -1:], rtol=1e-6, atol=1e-6)
