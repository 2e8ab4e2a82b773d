"""The order of a blend, made at once and read from the cache."""

from __future__ import annotations

from pathlib import Path

from megatron_ds.data.blend_order import blend_order
from megatron_ds.data.cache import ArrayCache


def test_the_order_is_kept_in_the_cache(tmp_path: Path) -> None:
    cache = ArrayCache([tmp_path])
    weights = [0.25, 0.75]
    orders = [blend_order(weights, 100, given) for given in (None, cache, cache)]
    assert [len(order) for order in orders] == [100] * 3
    assert [order.taken(100).tolist() for order in orders] == [[25, 75]] * 3
    found = [[order.find(position) for position in range(100)] for order in orders]
    assert found[0] == found[1] == found[2]
    assert len(list(tmp_path.glob("*.json"))) == 1
