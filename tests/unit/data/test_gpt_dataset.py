"""Samples cut from a token file, and samples mixed from several."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.blend import BlendedDataset, StoredOrder
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.indexed import IndexedDataset, IndexedWriter
from megatron_ds.data.sample_index import build_indexes

LENGTHS = [4, 1, 9, 0, 3, 6]


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    """Documents of consecutive numbers from 100 x document on, 30 samples of 4 + 1 tokens."""
    with IndexedWriter(tmp_path / "p", "uint16") as writer:
        for number, length in enumerate(LENGTHS):
            writer.add_document(np.arange(100 * number, 100 * number + length))
    file = IndexedDataset(tmp_path / "p")
    return GPTDataset(file, build_indexes(file.lengths, np.arange(6), 30, 4, seed=5), 4)


def test_samples_are_slices_of_the_shuffled_documents(dataset: GPTDataset) -> None:
    indexes = dataset._indexes
    stream = [100 * d + t for d in indexes.documents.tolist() for t in range(LENGTHS[d])]
    assert len(dataset) >= 30
    for position in range(len(dataset)):
        sample = int(indexes.shuffle[position])
        tokens = dataset[position]
        assert tokens.dtype == np.int64
        assert tokens.tolist() == stream[4 * sample : 4 * sample + 5]
        assert dataset.sample_id(position) == f"p:{sample}"


def test_positions_outside_are_refused_and_pickling_reopens(dataset: GPTDataset) -> None:
    for position in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[position]
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3].tolist() == dataset[3].tolist()


def test_blend_reads_its_sources(dataset: GPTDataset) -> None:
    mixed = BlendedDataset(
        [dataset, dataset], StoredOrder(np.array([1, 0, 1]), np.array([0, 0, 1]), 2)
    )
    assert len(mixed) == 3
    assert mixed[2].tolist() == dataset[1].tolist()
    assert mixed.sample_id(2) == f"1/{dataset.sample_id(1)}"
    for position in (-1, 3):
        with pytest.raises(IndexError):
            mixed[position]


def test_blend_needs_enough_samples(dataset: GPTDataset) -> None:
    many = len(dataset) + 1
    order = StoredOrder(np.ones(many, dtype=np.int16), np.arange(many), 2)
    with pytest.raises(
        ValueError, match=f"source 1 has {many - 1} samples, the blend takes {many}"
    ):
        BlendedDataset([dataset, dataset], order)
