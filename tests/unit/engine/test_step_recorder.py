"""Hashes of samples in step records, by which runs of earlier releases are verified."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.recording.step_recorder import StepRecorder, digest
from megatron_ds.model.attention.packed import PackingOptions
from megatron_ds.parallel.mesh import Mesh

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
LABELS = torch.tensor([[2, 3, 4], [5, 6, 7]])
WEIGHTS = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
LAST = torch.tensor([[False, True, False], [False, False, True]])


@pytest.mark.parametrize("ends_by_file", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_hash_covers_tokens_labels_weights_and_ends_of_files(
    ends_by_file: bool, has_documents: bool, weights: torch.Tensor | None
) -> None:
    """An end that the .idx file knows adds 2^30 to its token."""
    documents = PackingOptions(True, True).documents(LAST) if has_documents else None
    batch = DeviceBatch(TOKENS, LABELS, weights, 7, documents)
    recorder = StepRecorder(Mesh.single(), MagicMock(), ends_by_file=ends_by_file)

    assert recorder.reading(lambda _: batch)(MagicMock()) is batch

    tokens = TOKENS + LAST * 2**30 if ends_by_file and has_documents else TOKENS
    arrays = [array for array in (tokens, LABELS, weights) if array is not None]
    expected = {
        7 + row: digest([array[row].numpy().astype(np.int32).tobytes() for array in arrays])
        for row in range(2)
    }
    assert recorder._samples == expected
