"""Samples of another trainer's steps, which a run reads at their place."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest

from megatron_ds.data.own.dataset_request import DatasetRequest
from megatron_ds.data.own.map_dataset import MapDataset
from megatron_ds.training.replay.given_samples import dataset, samples_problems
from tests.problems import codes, raises_problem

LENGTH = 4


def test_given_samples_are_read_after_those_before_them(tmp_path: Path) -> None:
    file = tmp_path / "samples.npy"
    ids = numpy.arange(6 * (LENGTH + 1)).reshape(6, LENGTH + 1)
    numpy.save(file, ids)
    for total in (40, 18):  # the run may be as long as the steps
        request = DatasetRequest("train", total, LENGTH, 7, Mock(vocab_size=100))
        items = dataset(file, 12, request)
        assert items is not None
        data = MapDataset(items, request)
        assert [data[12 + row].tolist() for row in range(6)] == ids.tolist()
    assert dataset(file, 12, DatasetRequest("test", 3, LENGTH, 7, Mock())) is None


def test_a_file_of_other_samples_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "samples.npy"
    numpy.save(file, numpy.zeros((6, LENGTH + 1), numpy.int32))
    assert [*samples_problems(file, LENGTH, 6)] == []
    for length, count in ((LENGTH, 5), (LENGTH + 1, 6)):
        assert codes(samples_problems(file, length, count)) == ["samples-of-other-steps"]


@pytest.mark.parametrize("content", ["text", "floats", "vector", "objects"])
def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.npy"
    if content == "text":
        file.write_text("1 2 3")
    else:
        floats = numpy.zeros((2, 5))
        arrays = {"floats": floats, "vector": numpy.zeros(5, int), "objects": floats.astype(object)}
        numpy.save(file, arrays[content], allow_pickle=True)
    with raises_problem("samples-unreadable"):
        [*samples_problems(file, LENGTH, 2)]
