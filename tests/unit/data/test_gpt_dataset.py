"""Samples of a token file, and of a blend."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data import validation
from megatron_ds.data.blend.blend_schedule import blend_order
from megatron_ds.data.blend.blended_dataset import BlendedDataset, SingleSourceOrder
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.sample_index import SampleIndexes, build_indexes, build_sample_index
from megatron_ds.data.token_dataset import SampleReading
from megatron_ds.data.token_files import token_file
from megatron_ds.data.token_files.file_formats import MAGIC
from megatron_ds.data.token_files.indexed_dataset import HEADER, IndexedDataset
from tests.problems import raises_problem
from tests.token_files import write_pair

LENGTHS = [4, 1, 9, 0, 3, 6]


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    """At least 30 samples of 4 + 1 tokens; document d consists of 100 d, 100 d + 1, ..."""
    documents = (100 * number + np.arange(length) for number, length in enumerate(LENGTHS))
    file = IndexedDataset(write_pair(tmp_path / "p", documents))
    return GPTDataset(file, build_indexes(file.lengths, np.arange(6), 30, 4, seed=5), 4)


def test_samples_are_slices_of_the_shuffled_documents(dataset: GPTDataset) -> None:
    indexes = dataset._indexes
    stream = [100 * d + t for d in indexes.documents.tolist() for t in range(LENGTHS[d])]
    assert len(dataset) >= 30
    for position in range(len(dataset)):
        sample = int(indexes.shuffle[position])
        tokens = dataset[position]
        assert (tokens.dtype, tokens.tolist()) == (np.int32, stream[4 * sample : 4 * sample + 5])
        assert dataset.sample_id(position) == f"p:{sample}"


def test_invalid_positions_are_rejected_and_pickling_works(dataset: GPTDataset) -> None:
    for position in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[position]
        with pytest.raises(IndexError):
            SampleReading(dataset, [position]).finish()
    assert pickle.loads(pickle.dumps(dataset))[3].tolist() == dataset[3].tolist()


@pytest.mark.parametrize(
    ("dtype", "bad", "limit"),
    [
        ("uint16", 505, 505),
        ("int32", 2147483647, 600),
        ("int32", -1, 600),
        ("int64", 4294967297, 600),
        ("int64", -1099511627776, 600),
    ],
)
def test_token_outside_the_vocabulary_is_rejected(
    tmp_path: Path, dtype: str, bad: int, limit: int
) -> None:
    documents = [*(100 * n + np.arange(9) for n in range(4)), [1, 2, bad, 3, 4, 5, 6, 7, 8]]
    file = IndexedDataset(write_pair(tmp_path / "p", documents, dtype))
    indexes = build_indexes(file.lengths, np.arange(5), 10, 4, seed=5)
    every = range(len(indexes))
    kept = min(max(bad, -1), 2**31 - 1)
    unchecked = SampleReading(GPTDataset(file, indexes, 4), every).finish().ids
    wrong = [position for position in every if kept in unchecked[position].tolist()]
    assert wrong
    dataset = GPTDataset(file, indexes, 4, limit)
    for position in wrong:
        with raises_problem("sample-token-outside-vocabulary", contains=str(kept)):
            dataset[position]
    with raises_problem("sample-token-outside-vocabulary"):
        SampleReading(BlendedDataset([dataset], SingleSourceOrder(len(dataset))), every).finish()
    SampleReading(dataset, [position for position in every if position not in wrong]).finish()


def test_token_positions_beyond_32_bits(tmp_path: Path) -> None:
    """With a sparse file."""
    lengths = [2**31 - 1, 2**31 - 1, 2**31 - 1, 8]
    pointers = [2 * sum(lengths[:number]) for number in range(4)]
    with open(tmp_path / "p.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, 4, 5))
        for numbers, dtype in ((lengths, "<i4"), (pointers, "<i8"), (range(5), "<i8")):
            file.write(np.array(numbers, dtype=dtype).tobytes())
    with open(tmp_path / "p.bin", "wb") as file:
        file.seek(pointers[-1] - 4)
        file.write(np.arange(1, 11, dtype="<u2").tobytes())
    data = IndexedDataset(tmp_path / "p")
    assert len(data.tokens) > 2**32
    documents = np.arange(4)
    # 100 samples; the second to last ends with the first token of the last document.
    seq_length = (sum(lengths) - 8) // 100
    starts = build_sample_index(data.lengths, documents, seq_length, 100)
    at, offset = starts[99].tolist()
    skipped = seq_length - 10
    starts[99, 1] += skipped
    dataset = GPTDataset(data, SampleIndexes(documents, starts, np.array([99, 0])), 17)
    assert (at, offset > 2**30) == (2, True)
    left = sum(lengths[:3]) - 99 * seq_length - skipped
    assert dataset[0].tolist() == ([0] * (left - 2) + list(range(1, 11)) + [0] * 18)[:18]
    assert dataset[1].tolist() == [0] * 18


def test_blend_reads_its_sources_in_order(dataset: GPTDataset) -> None:
    order = blend_order([0.5, 0.5], 3)
    mixed = BlendedDataset([dataset, dataset], order)
    assert (len(mixed), mixed.seq_length, mixed.vocab_size) == (3, 4, None)
    found = [order.locate(position) for position in range(3)]
    assert found == [(0, 0), (1, 0), (0, 1)]
    for position, (source, sample) in enumerate(found):
        assert mixed[position].tolist() == dataset[sample].tolist()
        assert mixed.sample_id(position) == f"{source}/{dataset.sample_id(sample)}"
    assert SampleReading(mixed, range(3)).finish().ids.tolist() == [
        mixed[position].tolist() for position in range(3)
    ]
    for position in (-1, 3):
        with pytest.raises(IndexError):
            mixed[position]


def test_blend_with_too_few_samples_is_rejected(dataset: GPTDataset) -> None:
    many = len(dataset) + 1
    with pytest.raises(
        ValueError, match=f"source 1 has {many - 1} samples, but the blend needs {many}"
    ):
        BlendedDataset([dataset, dataset], blend_order([0.0, 1.0], many))


def test_vocabulary_check_reads_blocks_spread_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "BLOCK_TOKENS", 10)
    file = IndexedDataset(write_pair(tmp_path / "p", [np.arange(105)]))
    probed = file.probe(3)
    assert probed.tolist() == [*range(10), *range(47, 57), *range(95, 105)]
    assert file.probe(11).tolist() == list(range(105))
    codes = {
        limit: [problem.code for problem in validation.out_of_vocabulary(file, limit, 3)]
        for limit in (104, 105)
    }
    assert codes == {104: ["data-token-outside-vocabulary"], 105: []}
