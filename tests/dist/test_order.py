"""Sample order from token files to micro-batches: the same for any number of ranks, loader
processes and resumes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.token_dataset import TokenDataset
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.data.validation import DataFiles
from tests.proofs.cases import with_proofs

SAMPLES = 24
RESUMES = (8, 16)
"""Consumed samples at which a run stops and the next one resumes."""
Sample = tuple[str, list[int]]


ALL = list(itertools.product(("one file", "blend"), (1, 2, 4), (1, 2), (0, 2)))
"""Files, data-parallel size, micro-batch size and workers."""
IN_MAKE_TEST = [
    ("one file", 1, 1, 0),
    ("one file", 2, 1, 2),
    ("one file", 4, 2, 0),
    ("blend", 1, 2, 2),
    ("blend", 2, 2, 0),
    ("blend", 4, 1, 2),
]
"""Every pair of values."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """--data-path of one file and of a blend of two. No token occurs twice."""
    folder = tmp_path_factory.mktemp("tokens")
    for name, first in (("a", 0), ("b", 10_000)):
        with pair_writer(folder / name, "uint16") as writer:
            for size in np.random.default_rng(first).integers(3, 20, 40).tolist():
                writer.add_documents(range(first, first + size), [size])
                first += size
    a = str(folder / "a")
    b = str(folder / "b")
    return {"one file": (a,), "blend": ("2", a, "1", b)}


def dataset(path: tuple[str, ...]) -> TokenDataset:
    built = build_datasets(
        DataFiles(DataConfig(data_path=path, split="1")),
        num_samples=(SAMPLES, 0, 0),
        seq_length=5,
        seed=11,
        tokenizer_fingerprint="t",
        vocab_size=20_000,
    )
    assert built.train is not None
    return built.train


def in_order(path: tuple[str, ...]) -> list[Sample]:
    """Ids and tokens of the samples in the order of the dataset."""
    data = dataset(path)
    return [(data.sample_id(i), data[i].tolist()) for i in range(SAMPLES)]


def read(path: tuple[str, ...], dp_size: int, micro: int, workers: int) -> list[Sample]:
    """Ids and tokens in the order in which all ranks together use them, over several runs.

    Each rank of each run opens the files separately, as its process would.
    """
    samples: list[Sample] = []
    for end in (*RESUMES, SAMPLES):
        data = dataset(path)
        ranks = [
            MicroBatchIterator(
                dataset(path),
                consumed=len(samples),
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=dp_size,
                num_workers=workers,
            )
            for rank in range(dp_size)
        ]
        while len(samples) < end:
            for rank in ranks:
                batch = next(rank)
                for row in range(micro):
                    assert batch.samples is not None
                    samples.append(
                        (data.sample_id(batch.position + row), batch.samples.ids[row].tolist())
                    )
        for rank in ranks:
            rank.close()
    return samples


@pytest.mark.parametrize(
    ("kind", "dp_size", "micro", "workers"), with_proofs(ALL, set(ALL) - set(IN_MAKE_TEST))
)
def test_order_is_the_same_for_any_layout_workers_and_resumes(
    files: dict[str, tuple[str, ...]], kind: str, dp_size: int, micro: int, workers: int
) -> None:
    """Claim (samples): nor does the order of real token files and blends, for any number of loader
    processes"""
    assert read(files[kind], dp_size, micro, workers) == in_order(files[kind])


@pytest.mark.parametrize("kind", ["one file", "blend"])
def test_samples_are_distinct_and_shuffled(files: dict[str, tuple[str, ...]], kind: str) -> None:
    """Otherwise the comparison above would not detect a different order."""
    samples = in_order(files[kind])
    ids = [name for name, _ in samples]
    tokens = [first for _, (first, *_) in samples]
    assert len(set(ids)) == len(set(tokens)) == SAMPLES
    assert tokens != sorted(tokens)
    assert {token < 10_000 for token in tokens} == ({True} if kind == "one file" else {True, False})
