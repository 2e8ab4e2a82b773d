"""Token files in which only some tokens have a loss: files, merged files, samples and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data import validation
from megatron_ds.data.blend.blend_schedule import blend_order
from megatron_ds.data.blend.blended_dataset import BlendedDataset, ConcatDataset
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.foreign_tokens import export_program
from megatron_ds.data.gpt_dataset import GPTDataset, RemainingDataset
from megatron_ds.data.sample import Mark
from megatron_ds.data.sample_index import RemainingIndexes, build_indexes
from megatron_ds.data.token_dataset import SampleReading, TokenDataset
from megatron_ds.data.token_files.indexed_dataset import HEADER, IndexedDataset
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.data.token_files.merge import merge
from megatron_ds.data.validation import DataFiles
from tests.problems import codes, raises_problem
from tests.token_files import write_pair

LENGTHS = (7, 1, 9, 4, 12, 3)
SPANS = (((2, 4), (4, 7)), (), ((0, 9),), ((3, 4),), ((1, 2), (5, 11)), ((0, 1), (2, 3)))
"""Of each document; adjacent ones, none, and all of it."""
HAS_LOSS = 1000
"""Added to the tokens with loss, so that ids show what marks must be."""


def write_spans(prefix: Path, repeats: int = 1) -> str:
    """A pair of the documents, each of whose tokens with loss is at least HAS_LOSS."""
    with pair_writer(prefix, "uint16", has_loss_spans=True) as writer:
        for _ in range(repeats):
            for length, spans in zip(LENGTHS, SPANS, strict=True):
                ids = np.arange(length)
                for first, end in spans:
                    ids[first:end] += HAS_LOSS
                writer.add_documents(ids, [length], loss_spans=np.array(spans).reshape(-1, 2))
    return str(prefix)


def check(dataset: TokenDataset) -> None:
    assert dataset.marks == Mark.NO_LOSS
    seen = set()
    for position in range(len(dataset)):
        ids, marks = SampleReading(dataset, [position]).finish()
        assert marks is not None
        has_loss = marks & Mark.NO_LOSS.value == 0
        assert (has_loss == (ids >= HAS_LOSS)).all()
        seen |= {*has_loss.reshape(-1).tolist()}
    assert seen == {True, False}


@pytest.mark.parametrize("seq_length", [1, 3, 5, 16, 40])
def test_samples_mark_the_tokens_without_loss(seq_length: int, tmp_path: Path) -> None:
    file = IndexedDataset(write_spans(tmp_path / "p"))
    indexes = build_indexes(file.lengths, np.arange(len(file)), 60, seq_length, seed=3)
    check(GPTDataset(file, indexes, seq_length))


def test_the_index_without_spans_is_that_of_megatron(tmp_path: Path) -> None:
    """What follows it is not read by Megatron, which reads arrays by their sizes."""
    spans = write_spans(tmp_path / "p")
    documents = [IndexedDataset(spans).get(at) for at in range(len(LENGTHS))]
    plain = write_pair(tmp_path / "q", documents)
    index = Path(f"{plain}.idx").read_bytes()
    assert Path(f"{spans}.bin").read_bytes() == Path(f"{plain}.bin").read_bytes()
    assert Path(f"{spans}.idx").read_bytes().startswith(index)
    assert IndexedDataset(plain).loss_spans is None
    count = sum(map(len, SPANS))
    assert len(Path(f"{spans}.idx").read_bytes()) == len(index) + 16 + 16 * count
    assert len(index) == HEADER.size + 12 * len(LENGTHS) + 8 * (len(LENGTHS) + 1)


@pytest.mark.parametrize("lost", [1, 8, 16, 17, 16 * sum(map(len, SPANS)), -16])
def test_damaged_spans_are_refused(lost: int, tmp_path: Path) -> None:
    path = Path(f"{write_spans(tmp_path / 'p')}.idx")
    content = path.read_bytes()
    path.write_bytes(content[:-lost] if lost > 0 else content + bytes(-lost))
    with raises_problem("damaged-loss-spans", contains=str(path)):
        IndexedDataset(tmp_path / "p")


@pytest.mark.parametrize("edges", [(0, 37), (-1, 2), (9, 8)])
def test_spans_outside_of_the_tokens_are_refused(edges: tuple[int, int], tmp_path: Path) -> None:
    path = Path(f"{write_spans(tmp_path / 'p')}.idx")
    content = path.read_bytes()
    path.write_bytes(content[:-16] + np.array(edges, "<i8").tobytes())
    with raises_problem("damaged-loss-spans"):
        IndexedDataset(tmp_path / "p")


def test_merged_files_keep_the_spans(tmp_path: Path) -> None:
    """A text has a loss on all of its tokens."""
    spans = write_spans(tmp_path / "p")
    text = write_pair(tmp_path / "q", [np.arange(5) + HAS_LOSS, np.arange(2) + HAS_LOSS])
    merge([text, spans, text, spans], str(tmp_path / "m"))
    file = IndexedDataset(tmp_path / "m")
    indexes = build_indexes(file.lengths, np.arange(len(file)), 40, 6, seed=3)
    check(GPTDataset(file, indexes, 6))
    merge([text, text], str(tmp_path / "n"))
    assert IndexedDataset(tmp_path / "n").loss_spans is None


def datasets(prefixes: list[str], **more: Any) -> TokenDataset:
    built = build_datasets(
        DataFiles(DataConfig(data_path=tuple(prefixes), split="1,0,0")),
        seq_length=4,
        seed=1,
        num_samples=(60, 0, 0),
        tokenizer_fingerprint="",
        vocab_size=2000,
        **more,
    )
    assert built.train is not None
    return built.train


def test_blends_mark_the_tokens_of_each_file(tmp_path: Path) -> None:
    spans = write_spans(tmp_path / "p", 4)
    text = write_pair(tmp_path / "q", [np.arange(90) + HAS_LOSS])
    check(datasets([text, spans]))
    parts = [datasets([spans]), datasets([text])]
    check(ConcatDataset(parts))
    check(BlendedDataset(parts, blend_order([0.5, 0.5], 40)))
    assert datasets([text]).marks == 0


class Unread(RemainingIndexes):
    """Indexes that are loaded."""

    def __len__(self) -> int:
        return len(self.shuffle)

    def load(self) -> Unread:
        return self


def test_unread_samples_of_another_length_keep_their_marks(tmp_path: Path) -> None:
    file = IndexedDataset(write_spans(tmp_path / "p"))
    indexes = build_indexes(file.lengths, np.arange(len(file)), 60, 5, seed=3)
    before = GPTDataset(file, indexes, 5)
    unread = np.sort(indexes.shuffle[7:])
    check(RemainingDataset(before, Unread(unread, np.arange(len(unread) * 5 // 3)), 3))


def test_flags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    spans = write_spans(tmp_path / "p")
    text = write_pair(tmp_path / "q", [np.arange(90)])

    def problems(prefix: str, **options: Any) -> tuple[list[str], list[str]]:
        files = DataFiles(DataConfig(data_path=(text, prefix), **options))
        warnings = validation.loss_span_warnings(files, is_per_token=False)
        return codes(validation.loss_span_problems(files)), codes(warnings)

    unequal = "answers-count-unequally"
    masked: dict[str, Any] = {"reset_attention_mask": True}
    assert problems(text, **masked, fim_data=True) == ([], [])
    assert problems(spans) == ([], ["conversations-not-separated", unequal])
    assert problems(spans, fim_data=True)[0] == ["loss-spans-with-fim"]
    assert problems(spans, **masked) == (["conversations-by-eod"], [unequal])
    assert problems(spans, **masked, document_boundaries="idx") == ([], [unequal])
    files = DataFiles(DataConfig(data_path=(spans,), **masked, document_boundaries="idx"))
    assert codes(validation.loss_span_warnings(files, is_per_token=True)) == []


def test_other_formats_have_no_place_for_spans(tmp_path: Path) -> None:
    options = export_program.Options(
        input=write_spans(tmp_path / "p"), output=str(tmp_path / "out.parquet")
    )
    with raises_problem("export-of-loss-spans", "input"):
        export_program.work(options)
    assert not (tmp_path / "out.parquet").exists()
