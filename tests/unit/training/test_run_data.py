"""Which marks the flags put on the samples of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.config import Config, DataConfig
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.sample import NO_MARKS, DocumentEnds, Mark
from megatron_ds.data.sample_index import build_indexes
from megatron_ds.data.token_dataset import SampleReading
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.training.start import run_data
from tests.token_files import write_pair

TOKENIZER = NullTokenizer(9)
DOCUMENTS = [[1, 2, 9, 3], [4, 5, 6], [7, 8, 9]]
NO_LOSS = Mark.NO_LOSS
LAST = Mark.LAST


@pytest.mark.parametrize(
    ("flags", "marks", "ends"),
    [
        ({}, NO_MARKS, set()),
        ({"document_boundaries": "idx"}, NO_MARKS, set()),
        ({"reset_position_ids": True}, LAST, {9}),
        ({"reset_attention_mask": True}, LAST, {9}),
        ({"eod_mask_loss": True}, LAST | NO_LOSS, {9}),
        ({"reset_attention_mask": True, "document_boundaries": "idx"}, LAST, {3, 6, 9}),
        ({"eod_mask_loss": True, "document_boundaries": "idx"}, LAST | NO_LOSS, {3, 6, 9}),
    ],
)
def test_flags_determine_what_ends_documents(
    flags: dict[str, Any], marks: Mark, ends: set[int], tmp_path: Path
) -> None:
    file = IndexedDataset(write_pair(tmp_path / "p", DOCUMENTS * 5))
    indexes = build_indexes(file.lengths, np.arange(len(file)), 9, 4, seed=1)
    data = Datasets(GPTDataset(file, indexes, 4), valid={"": GPTDataset(file, indexes, 4)})
    config = Config(data=DataConfig(**flags))

    built = run_data._transformed(config, TOKENIZER, data)

    for dataset in (built.train, built.valid[""]):
        assert dataset is not None
        samples = SampleReading(dataset, range(len(dataset))).finish()
        assert dataset.marks == marks
        assert (samples.marks is None) == (marks == NO_MARKS)
        if samples.marks is not None:
            assert {*samples.ids[samples.marks & LAST.value != 0].tolist()} == ends


def test_the_rule_of_boundaries_comes_after_what_moves_tokens() -> None:
    data = DataConfig(fim_data=True, eod_mask_loss=True)
    config = Config(data=data)
    tokenizer: Any = _Text(9)
    moving, ends = run_data._transforms(config, tokenizer, 0)
    assert moving.marks == NO_LOSS
    assert ends == DocumentEnds(9, masks_loss=True)


class _Text(NullTokenizer):
    """Has ids for tokens of any text."""

    def token_id(self, token: str) -> int:
        return len(token)

    def token_bytes(self) -> list[int]:
        return [1] * self.vocab_size
