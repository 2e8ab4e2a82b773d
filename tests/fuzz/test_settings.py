"""Odd blend lists, --split strings and numbers of samples: right shares, or an error in words."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.config import DataConfig
from megatron_ds.data.blend_spec import parse_blend
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.indexed_writer import IndexedWriter
from megatron_ds.data.sample_index import parse_split, split_bounds
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, REJECTED, read_or_error

NUMBERS = st.floats().map(str) | st.sampled_from(
    ["0", "1", "-0", "1e308", "1e-320", "1_0", "0x1", "", " ", "１", "1e999", "nan", "a.bin"]
)
BLENDS = {
    "prefix first": ["a", "1"],
    "three": ["1", "a", "2"],
    "negative": ["-1", "a", "2", "b"],
    "infinite": ["inf", "a", "1", "b"],
    "no number": ["nan", "a"],
    "all zero": ["0", "a", "-0", "b"],
    "an infinite sum": ["1e308", "a", "1e308", "b"],
}
SPLITS = {
    "empty": "",
    "a word": "train",
    "four": "1,1,1,1",
    "negative": "2,-1,0",
    "all zero": "0,0,0",
    "infinite": "inf,1,1",
    "no number": "nan,1,1",
    "an infinite sum": "1e308,1e308,1e308",
    "an empty part": "9,,1",
    "semicolons": "8;1;1",
    "both separators": "8/1,1",
    "percent": "80%,10%,10%",
}


@pytest.mark.parametrize("name", BLENDS)
def test_blends_by_hand(name: str) -> None:
    with pytest.raises(ValueError, match="--data-path "):
        parse_blend(BLENDS[name], "--data-path")


@pytest.mark.parametrize("name", SPLITS)
def test_splits_by_hand(name: str) -> None:
    with pytest.raises(ValueError, match=r"--split .*: must be up to three"):
        parse_split(SPLITS[name])


@given(paths=st.lists(NUMBERS | st.text(max_size=5), min_size=2, max_size=8))
@FUZZ_SETTINGS
def test_any_blend(paths: list[str]) -> None:
    result = read_or_error(lambda: parse_blend(paths, "--data-path"), "--data-path")
    if result is not REJECTED:
        weights, prefixes = result  # type: ignore[misc]
        if weights is None:
            assert prefixes == paths
            return
        assert len(weights) == len(prefixes) > 0
        assert all(0 <= weight <= 1 for weight in weights)
        assert math.isclose(sum(weights), 1.0)


@given(
    text=st.lists(NUMBERS, max_size=4).map(",".join) | st.text(max_size=8), size=st.integers(0, 50)
)
@FUZZ_SETTINGS
def test_any_split(text: str, size: int) -> None:
    result = read_or_error(lambda: parse_split(text), "--split")
    if result is not REJECTED:
        shares = list(result)  # type: ignore[call-overload]
        assert math.isclose(sum(shares), 1.0)
        bounds = split_bounds(shares, size)
        assert (bounds[0][0], bounds[-1][1]) == (0, size)
        assert all(first <= end for first, end in bounds)
        assert all(before[1] == after[0] for before, after in pairwise(bounds))


@pytest.mark.parametrize("samples", [1 << 50, 1 << 61, 1 << 70])
def test_more_samples_than_memory_holds(tmp_path: Path, samples: int) -> None:
    with IndexedWriter(tmp_path / "p", "uint16") as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(ValueError, match=f"{tmp_path}/p: {samples} train samples") as raised:
        build_datasets(
            DataConfig(data_path=(str(tmp_path / "p"),), split="1"),
            seq_length=8,
            seed=1,
            num_samples=(samples, 0, 0),
            tokenizer_fingerprint="t",
            vocab_size=100,
        )
    assert "fewer samples" in str(raised.value)
    assert not list(tmp_path.glob("index-cache/*.npy"))
