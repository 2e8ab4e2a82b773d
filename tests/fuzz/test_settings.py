"""Odd blend lists, --split strings and numbers of samples: right shares, or an error in words."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.config import DataConfig
from megatron_ds.data.blend.blend_spec import DatasetGroup, parse_blend
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.sample_index import parse_split, split_bounds
from megatron_ds.data.validation import DataFiles
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, REJECTED, read_or_error
from tests.problems import raises_problem
from tests.token_files import write_pair

NUMBERS = st.floats().map(str) | st.sampled_from(
    ["0", "1", "-0", "1e308", "1e-320", "1_0", "0x1", "", " ", "１", "1e999", "nan", "a.bin"]
)
# A prefix first, an odd number of words, then weights that are no shares.
BLENDS = [
    "a 1",
    "1 a 2",
    "-1 a 2 b",
    "inf a 1 b",
    "nan a",
    "0 a -0 b",
    "1e308 a 1e308 b",  # an infinite sum
]
SPLITS = [
    "",
    "train",
    "1,1,1,1",
    "2,-1,0",
    "0,0,0",
    "inf,1,1",
    "nan,1,1",
    "1e308,1e308,1e308",
    "9,,1",
    "8;1;1",
    "8/1,1",
    "80%,10%,10%",
]


@pytest.mark.parametrize("text", BLENDS)
def test_invalid_blend_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="--data-path "):
        parse_blend(text.split(), "train", "--data-path")


@pytest.mark.parametrize("text", SPLITS)
def test_invalid_split_is_rejected(text: str) -> None:
    with raises_problem("invalid-split", "split"):
        parse_split(text)


@given(paths=st.lists(NUMBERS | st.text(max_size=5), min_size=2, max_size=8))
@FUZZ_SETTINGS
def test_any_blend(paths: list[str]) -> None:
    result = read_or_error(lambda: parse_blend(paths, "train", "--data-path"), "--data-path")
    if result is not REJECTED:
        assert isinstance(result, DatasetGroup)
        weights = [source.weight for source in result.sources if source.weight is not None]
        if not weights:
            assert [source.prefix for source in result.sources] == paths
            return
        assert len(weights) == len(result.sources)
        assert all(0 <= weight <= 1 for weight in weights)
        assert math.isclose(sum(weights), 1.0)


@given(
    text=st.lists(NUMBERS, max_size=4).map(",".join) | st.text(max_size=8), size=st.integers(0, 50)
)
@FUZZ_SETTINGS
def test_any_split(text: str, size: int) -> None:
    result = read_or_error(lambda: parse_split(text), "--split")
    if result is not REJECTED:
        shares = list(result)
        assert math.isclose(sum(shares), 1.0)
        bounds = split_bounds(shares, size)
        assert (bounds[0][0], bounds[-1][1]) == (0, size)
        assert all(first <= end for first, end in bounds)
        assert all(before[1] == after[0] for before, after in pairwise(bounds))


@pytest.mark.parametrize("samples", [1 << 50, 1 << 61, 1 << 70])
def test_more_samples_than_memory_holds(tmp_path: Path, samples: int) -> None:
    write_pair(tmp_path / "p", [[1, 2, 3]])
    config = DataConfig(data_path=(str(tmp_path / "p"),), split="1")
    options = {"seq_length": 8, "seed": 1, "tokenizer_fingerprint": "t", "vocab_size": 100}
    with raises_problem("index-too-large", contains=f" {samples} train ") as raised:
        build_datasets(DataFiles(config), num_samples=(samples, 0, 0), **options)
    assert f"{tmp_path}/p" in str(raised.problem)
    assert not list(tmp_path.glob("index-cache/*.npy"))
