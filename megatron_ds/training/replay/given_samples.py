"""Trains on given samples, as a run read them: FILE FIRST FLAGS

The samples of FILE are those of the steps after FIRST samples. Owns where they have to be among the
items of a dataset, so that the run reads them there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.data.own.dataset_request import DatasetRequest
from megatron_ds.data.own.map_dataset import epoch_order
from megatron_ds.training.extensions import Extensions
from megatron_ds.training.run import pretrain


def read_samples(path: Path) -> np.ndarray[Any, Any]:
    """The ids of samples, [samples, sequence length + 1], mapped into memory.

    Raises:
        UserError: If the file is not such an array of numpy.
    """
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise user_error("samples-unreadable", path=path, error=error) from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 2 or ids.dtype.kind not in "iu":
        reason = "it is not an array of numpy with two dimensions, of integers"
        raise user_error("samples-unreadable", path=path, error=reason)
    return ids


def samples_problems(path: Path, length: int, count: int) -> Iterator[Problem]:
    """Compares the samples with the steps that they are of.

    Args:
        path: Their file.
        length: Tokens of a sequence.
        count: Samples of the steps.
    """
    shape = list(read_samples(path).shape)
    if shape != [count, length + 1]:
        yield Problem(
            "samples-of-other-steps", path=path, shape=shape, expected=[count, length + 1]
        )


class GivenSamples:
    """Items, of which those that are read after `first` samples are the given ones.

    Args:
        ids: The samples.
        first: Samples that the run has read before.
        request: The run's request.
    """

    def __init__(self, ids: np.ndarray[Any, Any], first: int, request: DatasetRequest) -> None:
        self._ids = ids
        self._size = max(request.samples, first + len(ids))
        order = epoch_order(request.seed, 0, self._size)
        self._rows = {int(order[first + row]): row for row in range(len(ids))}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._ids[self._rows.get(index, 0)]  # the others are not read


def dataset(path: Path, first: int, request: DatasetRequest) -> GivenSamples | None:
    """The samples for training; no validation and no test."""
    if request.split != "train":
        return None
    return GivenSamples(read_samples(path), first, request)


if __name__ == "__main__":
    file, position, *flags = sys.argv[1:]
    pretrain(Extensions(dataset=partial(dataset, Path(file), int(position))), flags)
