"""Datasets of the data flags: splits, blends, caches and resumed runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ds.config import DataConfig
from megatron_ds.data import build_datasets as module
from megatron_ds.data import lazy_indexes
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets, FileUsage, build_datasets, exact_train_samples
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.index_cache import ArrayCache
from megatron_ds.data.sample import NO_MARKS, DocumentEnds, Mark, Samples
from megatron_ds.data.token_dataset import SampleReading, TokenDataset, TransformedDataset
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.validation import DataFiles, data_problems, data_warnings
from megatron_ds.model.attention.packed import PackingOptions
from tests.problems import codes, raises_problem
from tests.token_files import write_pair


def write(prefix: Path, documents: int = 40, first: int = 0, size: int = 7) -> str:
    """Writes documents; document d has `size` tokens of the value first + d."""
    return write_pair(prefix, ([first + number] * size for number in range(documents)))


def datasets(config: DataConfig, samples: tuple[int, int, int], **changes: Any) -> Datasets:
    values = {"seq_length": 5, "seed": 11, "tokenizer_fingerprint": "t", "vocab_size": 1000}
    return build_datasets(DataFiles(config), num_samples=samples, **{**values, **changes})


def tokens_of(dataset: TokenDataset | None) -> set[int]:
    return {int(t) for i in range(len(dataset)) for t in dataset[i]}


def cached(folder: Path) -> int:
    return len(list(folder.glob("*.json")))


def test_splits_are_disjoint_and_long_enough(tmp_path: Path) -> None:
    config = DataConfig(data_path=(write(tmp_path / "p"),), split="80,10,10")
    built = datasets(config, (200, 9, 7))
    assert len(built.train) >= 200
    assert (built.train[0].dtype, built.train[0].shape) == (np.int32, (6,))
    assert tokens_of(built.train) == set(range(32))
    assert tokens_of(built.valid[""]) == set(range(32, 36))
    assert tokens_of(built.test[""]) == set(range(36, 40))


def test_one_short_document_is_enough_for_the_evaluation_of_all_ranks(tmp_path: Path) -> None:
    """A rank without a batch would let the others wait: the document is read again."""
    config = DataConfig(data_path=(write(tmp_path / "p", size=3),), split="38,1,1")
    built = datasets(config, (9, 64, 0))  # two ranks, 8 batches of 4 samples
    valid = built.valid[""]
    assert len(valid) >= 64
    assert tokens_of(valid) == {38}


def test_data_of_single_splits(tmp_path: Path) -> None:
    config = DataConfig(
        train_data_path=(write(tmp_path / "a"),),
        test_data_path=("1", write(tmp_path / "b", first=100), "0", str(tmp_path / "none")),
    )
    built = datasets(config, (30, 5, 5))
    assert tokens_of(built.train) <= set(range(40))
    assert not built.valid
    assert tokens_of(built.test[""]) <= set(range(100, 140))


def test_splits_without_samples_or_data_are_empty(tmp_path: Path) -> None:
    path = (write(tmp_path / "p"),)
    built = datasets(DataConfig(data_path=path), (10, 0, 0))
    assert (built.valid, built.test) == ({}, {})
    built = datasets(DataConfig(data_path=path, split="90,10,0"), (10, 3, 3))
    assert list(built.valid) == [""]
    assert not built.test


@pytest.mark.parametrize(
    ("split", "samples", "code"),
    [("0,1,1", (1, 0, 0), "split-without-train"), ("1,999,0", (1, 3, 0), "split-without-tokens")],
)
def test_split_without_documents_is_rejected(
    tmp_path: Path, split: str | None, samples: tuple[int, int, int], code: str
) -> None:
    config = DataConfig(data_path=(write(tmp_path / "p"),), split=split)
    with raises_problem(code):
        datasets(config, samples)


def test_files_whose_documents_do_not_begin_with_the_begin_token_are_named(tmp_path: Path) -> None:
    for name, documents in {"with": [[7, 1, 2], [7, 3]], "without": [[1, 2], [3]]}.items():
        write_pair(tmp_path / name, documents)
    files = DataFiles(DataConfig(data_path=(f"{tmp_path}/with", f"{tmp_path}/without")))
    assert list(data_problems(files, (9, 0, 0), None)) == []
    (warning,) = data_warnings(files, (9, 0, 0), None, 7)
    assert (warning.code, "without" in str(warning)) == ("data-without-bos", True)
    assert f"{tmp_path}/with " not in str(warning)
    assert list(data_warnings(files, (9, 0, 0), None, None)) == []


@pytest.mark.parametrize(
    ("lengths", "seq_length", "is_short"),
    [([1], 256, True), ([0, 0, 3], 4, True), ([2, 0, 2], 4, False), ([1] * 9, 4, False)],
)
def test_training_data_of_less_than_a_sample_is_named(
    lengths: list[int], seq_length: int, is_short: bool, tmp_path: Path
) -> None:
    path = write_pair(tmp_path / "p", [[1] * length for length in lengths])
    long = write_pair(tmp_path / "q", [[1] * seq_length])
    files = DataFiles(DataConfig(train_data_path=(path, long), valid_data_path=(path,)))
    warnings = list(data_warnings(files, (256, 9, 0), None, None, seq_length))
    assert codes(warnings) == ["data-shorter-than-sample"] * is_short
    assert all(f"{path} " in str(warning) for warning in warnings)


@pytest.mark.parametrize("rounding", ["megatron-deepspeed", "megatron-core"])
@pytest.mark.parametrize(
    ("split", "evaluated"), [(None, "valid"), ("949,1,50", "test"), ("999,0,1", "")]
)
def test_splits_that_get_no_documents_by_rounding_are_not_evaluated(
    tmp_path: Path, split: str | None, rounding: str, evaluated: str
) -> None:
    path = write(tmp_path / "p")
    config = DataConfig(data_path=(path,), split=split, split_rounding=rounding)
    files = DataFiles(config)
    assert list(data_problems(files, (9, 3, 3), None)) == []
    warnings = list(data_warnings(files, (9, 3, 3), None))
    assert codes(warnings) == ["split-not-evaluated"]
    assert list(data_warnings(files, (9, 0, 0), None)) == []
    built = datasets(config, (9, 3, 3))
    assert [name for name in ("valid", "test") if getattr(built, name)] == evaluated.split()


@pytest.mark.parametrize("blend_order", ["fair", "megatron"])
@pytest.mark.parametrize("weights", [("2", "3", "1"), ()])
def test_files_without_documents_are_left_out_of_the_evaluation(
    tmp_path: Path, weights: tuple[str, ...], blend_order: str
) -> None:
    a, b, c = (write(tmp_path / name, size) for name, size in (("a", 40), ("b", 3), ("c", 40)))
    paths = (a, b, c) if not weights else ("2", a, "3", b, "1", c)
    built = datasets(DataConfig(paths, split="9,1,0", blend_order=blend_order), (12, 12, 3))
    valid = {each.prefix: each for each in built.usage if each.split == "valid"}
    assert valid.keys() == {a, c}
    expected = 8 if weights else 6
    assert (valid[a].samples, valid[c].samples) == (expected, 12 - expected)
    assert {each.prefix for each in built.usage if each.split == "train"} == {a, b, c}


def test_blend_follows_the_weights(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", first=100)
    built = datasets(DataConfig(data_path=("3", a, "1", b), split="1"), (400, 0, 0))
    train = built.train
    assert len(train) == 400
    ids = [train.sample_id(i) for i in range(400)]
    assert sum(name.startswith("0/a:") for name in ids) == 300
    assert [name[:2] for name in ids[:8]].count("1/") == 2
    # Each has 40 documents of 7 tokens, and a sample takes 5.
    assert built.usage == (
        FileUsage("train", a, 0.75, 300, 300 * 5 / 280),
        FileUsage("train", b, 0.25, 100, 100 * 5 / 280),
    )
    for position in range(8):
        low, high = (0, 40) if ids[position].startswith("0/") else (100, 140)
        assert all(low <= t < high for t in train[position])


def test_files_without_weights_are_weighted_by_size(tmp_path: Path) -> None:
    paths = tuple(write(tmp_path / name, size) for name, size in (("a", 10), ("b", 30), ("c", 40)))
    built = datasets(DataConfig(data_path=paths, split="1,1"), (400, 80, 0))
    assert [(file.split, file.samples, file.weight) for file in built.usage] == [
        *(("train", samples, samples / 400) for samples in (50, 150, 200)),
        *(("valid", samples, samples / 80) for samples in (10, 30, 40)),
    ]
    assert len({file.epochs for file in built.usage if file.split == "train"}) == 1


def test_indexes_are_cached_by_everything_that_determines_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(data_path=(write(tmp_path / "p"),), split="80,20,0")
    folder = tmp_path / "index-cache"
    first = datasets(config, (20, 0, 0)).train
    assert cached(folder) == 1
    with monkeypatch.context() as patch:
        patch.setattr(lazy_indexes, "build_indexes", None)
        again = datasets(config, (20, 0, 0)).train
    assert [again[i].tolist() for i in range(20)] == [first[i].tolist() for i in range(20)]
    count = 1
    for changes in ({"seed": 12}, {"seq_length": 6}, {"tokenizer_fingerprint": "u"}):
        datasets(config, (20, 0, 0), **changes)
        count += 1
        assert cached(folder) == count
    datasets(config, (21, 0, 0))
    datasets(dataclasses.replace(config, split="70,30,0"), (20, 0, 0))
    write(tmp_path / "p", size=8)
    datasets(config, (20, 0, 0))
    assert cached(folder) == count + 3


def test_indexes_of_large_blends_are_built_on_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index-cache"
    config = DataConfig(
        data_path=("1", write(tmp_path / "a"), "3", write(tmp_path / "b", first=100)), split="1"
    )
    elsewhere = dataclasses.replace(config, data_cache_path=str(tmp_path / "x"))
    at_once = datasets(elsewhere, (400, 0, 0))
    monkeypatch.setattr(module, "OPENED_AT_START", 399)
    later = datasets(config, (400, 0, 0))
    assert (cached(folder), later.usage, len(later.train)) == (0, at_once.usage, 400)
    later.train[0]
    assert cached(folder) == 1
    again = pickle.loads(pickle.dumps(later.train))
    for position in range(400):
        tokens = at_once.train[position].tolist()
        assert (later.train[position].tolist(), again[position].tolist()) == (tokens, tokens)
    assert cached(folder) == 2
    # Existing indexes need no space and no write permission.
    monkeypatch.setattr(ArrayCache, "require_space", None)
    datasets(config, (400, 0, 0))


def test_space_for_indexes_is_checked_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (write(tmp_path / "a"), write(tmp_path / "b"))
    config = DataConfig(data_path=paths, split="1")
    monkeypatch.setattr(module, "OPENED_AT_START", 0)
    folder = tmp_path / "index-cache"
    disk = shutil.disk_usage(tmp_path)
    # 40 documents of 7 tokens give 55 samples: 4 * 40 + 8 * 56 + 4 * 55 bytes per file.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=2 * 828 - 1))
    with raises_problem("index-cache-not-writable", contains="0.0 GB free"):
        datasets(config, (100, 0, 0))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=2 * 828))
    train = datasets(config, (100, 0, 0)).train
    assert train[0].tolist() == train[1].tolist(), "one sample of each file"
    assert sum(np.load(path).nbytes for path in folder.glob("*.npy")) == 2 * 828
    shutil.rmtree(folder)
    folder.write_text("")
    with raises_problem("index-cache-not-writable"):
        datasets(config, (100, 0, 0))


def test_cache_folders(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = DataConfig(data_path=(write(tmp_path / "data" / "p"),))
    given = dataclasses.replace(config, data_cache_path=str(tmp_path / "given"))
    datasets(given, (5, 0, 0))
    assert cached(tmp_path / "given") == 1
    assert not (tmp_path / "data" / "index-cache").exists()
    # A file of this name simulates a data folder that is not writable.
    (tmp_path / "data" / "index-cache").write_text("")
    with raises_problem("index-cache-not-writable"):
        datasets(config, (5, 0, 0))
    datasets(config, (5, 0, 0), fallback_cache=str(tmp_path / "fallback"))
    assert cached(tmp_path / "fallback") == 1


def resumed(
    config: DataConfig, samples: int, consumed: int, record: Any, **changes: Any
) -> Datasets:
    """The datasets of a run of `samples` samples that continues the one of a record, if given."""
    history = None if record is None else BlendHistory.from_dict(json.loads(json.dumps(record)))
    return datasets(config, (samples, 0, 0), history=history, consumed=consumed, **changes)


def run(
    config: DataConfig, end: int, consumed: int = 0, total: int | None = None, record: Any = None
) -> tuple[list[str], dict[str, Any], Datasets]:
    """Sample ids of a run from `consumed` to `end`, and its history for a checkpoint.

    total: samples of the entire run; `end` by default.
    """
    built = resumed(config, total or end, consumed, record)
    ids = [built.train.sample_id(position) for position in range(consumed, end)]
    assert all(len(built.train[position]) == 6 for position in range(consumed, end))
    return ids, built.progress.history_after(end).to_dict(), built


def of(name: str, ids: list[str]) -> list[str]:
    return [one.rpartition("/")[2] for one in ids if f"{name}:" in one]


def test_resume_with_the_same_blend_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    for paths in (("a",), ("1", "a"), ("2", "a", "1", "b"), ("a", "b", "c")):
        for name, first in (("a", 0), ("b", 100), ("c", 200)):
            write(tmp_path / name, first=first)
        given = tuple(str(tmp_path / path) if path.isalpha() else path for path in paths)
        config = DataConfig(data_path=given, split="1")
        uninterrupted, final_record, _ = run(config, 150)
        before, record, _ = run(config, 60, total=150)
        after, again, built = run(config, 150, 60, record=record)
        assert (before + after, again, built.changes) == (uninterrupted, final_record, ())


def test_changed_blend_continues_each_source(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, first=100 * n) for n, name in enumerate("abc"))
    blend = DataConfig(data_path=("3", a, "1", b), split="1")
    uninterrupted, _, _ = run(blend, 400)
    before, record, _ = run(blend, 160, total=400)
    other = DataConfig(data_path=("1", c, "1", a), split="1")
    after, record, built = run(other, 240, 160, total=400, record=record)
    assert len(of("a", after)) == len(of("c", after)) == 40
    both = before + after
    assert of("a", both) == of("a", uninterrupted)[: 120 + 40]
    assert of("b", both) == of("b", uninterrupted)[:40]
    assert [source["consumed"] for source in record["sources"]] == [160, 40, 40]
    assert [phase["first_sample"] for phase in record["phases"]] == [0, 160]
    text = "\n".join(built.changes)
    weights = ("a 0.75, b 0.25", "c 0.5, a 0.5")
    for part in ("160 samples", *weights, "a at its sample 120", "b, after 40"):
        assert part in text

    # Back to the first blend: b continues after its 40 samples, and the change is reported once.
    last, record, built = run(blend, 400, 240, record=record)
    assert (of("b", both + last), len(of("a", last))) == (of("b", uninterrupted)[:80], 120)
    repeated, _, built = run(blend, 400, 240, record=record)
    assert (built.changes, repeated) == ((), last)


def test_single_file_becomes_a_blend_and_single_again(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", first=100)
    single = DataConfig(data_path=(a,), split="1")
    uninterrupted, _, _ = run(single, 300)
    first, record, _ = run(single, 100, total=300)
    blend = DataConfig(data_path=("1", a, "1", b), split="1")
    second, record, _ = run(blend, 200, 100, 300, record)
    third, record, _ = run(single, 300, 200, record=record)
    ids = of("a", first + second + third)
    assert (ids, record["sources"][0]["consumed"]) == (of("a", uninterrupted)[:250], 250)


def test_longer_run_finishes_its_index_first(tmp_path: Path) -> None:
    """The order of an index depends on its number of epochs, as in Megatron."""
    config = DataConfig(data_path=(write(tmp_path / "a"),), split="1")  # 280 tokens, 55 samples
    before, record, built = run(config, 40)
    index = [built.train.sample_id(position) for position in range(len(built.train))]
    assert len(index) == 55
    assert run(config, 100)[0][:40] != before
    after, record, built = run(config, 140, 40, record=record)
    ids = before + after
    assert ids[:55] == index
    assert all("+1" in one for one in ids[55:])
    assert len(set(ids)) == 140
    assert " a continues" in built.changes[0]
    longer, record, _ = run(config, 300, 140, record=record)
    assert len(set(ids + longer)) == 300
    assert record["sources"][0]["requests"] == (40, 85, 300 - 55 - 111)
    # All documents were read equally often, up to one epoch.
    shares = [file.epochs for file in built.usage]
    assert shares == [140 * 5 / 280]


def test_further_index_has_another_order(tmp_path: Path) -> None:
    config = DataConfig(data_path=(write(tmp_path / "a"),), split="1")
    before, record, _ = run(config, 40)
    after, record, _ = run(config, 110, 40, record=record)
    assert record["sources"][0]["requests"] == (40, 55)  # both of one epoch
    first = (before + after)[:55]
    second = [one.removesuffix("+1") for one in after[15:]]
    assert sorted(first) == sorted(second)
    assert first != second


def test_shorter_run_keeps_its_order(tmp_path: Path) -> None:
    config = DataConfig(data_path=(write(tmp_path / "a"),), split="1")
    longer, _, _ = run(config, 200)
    _, record, _ = run(config, 60, total=200)
    after, _, built = run(config, 90, 60, record=record)
    assert (after, built.changes) == (longer[60:90], ())


def test_file_with_changed_content_is_another_source(tmp_path: Path) -> None:
    config = DataConfig(data_path=(write(tmp_path / "a"),), split="1")
    _, record, _ = run(config, 30, total=60)
    write(tmp_path / "a", documents=41)
    _, record, built = run(config, 60, 30, record=record)
    assert [source["consumed"] for source in record["sources"]] == [30, 30]
    assert "different documents: a" in "\n".join(built.changes)


def test_moved_folder_has_the_same_sources(tmp_path: Path) -> None:
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a")
    before, record, _ = run(DataConfig(data_path=(str(tmp_path / "old" / "a"),)), 20, total=40)
    moved = DataConfig(data_path=(str(tmp_path / "new" / "a"),))
    after, _, built = run(moved, 40, 20, record=record)
    assert (built.changes, before + after) == ((), run(moved, 40)[0])


def test_groups_are_separate_datasets(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", first=100)
    config = DataConfig(
        train_weighted_split_paths=(f"T: 2 0:0.8 {a}, 1 0:0.5 {b}",),
        valid_weighted_split_paths=(f"V1: 1 0.8:0.9 {a}", f"V2: 1 0.5:1 {b}, 1 0.9:1 {a}"),
        test_weighted_split_paths=(f"X: 1 0:1 {b}, 0 0:1 {tmp_path / 'none'}",),
    )
    built = datasets(config, (300, 40, 20))
    assert tokens_of(built.train) == {*range(32), *range(100, 120)}
    assert (list(built.valid), tokens_of(built.valid["V1"])) == (["V1", "V2"], set(range(32, 36)))
    assert tokens_of(built.valid["V2"]) <= {*range(36, 40), *range(120, 140)}
    assert list(built.test) == ["X"]
    lines = [str(file) for file in built.usage]
    assert f"valid V1: {a}, weight 1: 40 samples, 7.14 epochs" in lines
    assert f"valid V2: {b}, weight 0.5: 20 samples, 0.714 epochs" in lines
    assert f"test X: {tmp_path / 'none'}, weight 0: not read" in lines


def write_distinct(prefix: Path, documents: int, first: int = 0) -> str:
    """Documents of 2 to 29 tokens, all of which are different."""
    sizes = [2 + 9 * number % 28 for number in range(documents)]
    starts = first + np.cumsum([0, *sizes])
    return write_pair(prefix, (range(a, b) for a, b in itertools.pairwise(starts.tolist())))


def read(
    config: DataConfig, length: int, first: int, end: int, record: Any = None, total: int = 0
) -> tuple[list[list[int]], Any, Datasets]:
    """Samples of a run, without the last label, its history, and the datasets."""
    shape = {"seq_length": length, "vocab_size": 10_000}
    built = resumed(config, max(end, total), first, record, **shape)
    samples = [built.train[position].tolist() for position in range(first, end)]
    assert all(len(sample) == length + 1 for sample in samples)
    memory = Samples.empty((len(samples), length + 1), NO_MARKS)
    pickled = pickle.loads(pickle.dumps(built.train))  # as for a loader process
    assert SampleReading(pickled, range(first, end), memory).finish().ids.tolist() == samples
    record = built.progress.history_after(end).to_dict()
    return [sample[:-1] for sample in samples], record, built


def flat(samples: list[list[int]]) -> list[int]:
    return [token for sample in samples for token in sample]


@pytest.mark.parametrize(("before", "length"), [(6, 18), (6, 16), (16, 6)])
@pytest.mark.parametrize("consumed", [3, 20, 35])
def test_a_source_continues_with_its_unread_text_at_another_length(
    before: int, length: int, consumed: int, tmp_path: Path
) -> None:
    """No token is read twice before all were read, up to less than a sample of each length.

    Claim (checkpoints): at another sequence length every source continues with its unread text,
    without a token twice, and resumes
    """
    path = write_distinct(tmp_path / "a", 45)  # 712 tokens
    config = DataConfig(data_path=(path,), split="1")
    size = 712
    first, record, _ = read(config, before, 0, consumed, total=30)
    unread = size - consumed * before
    rest = ((size - 1) // before - consumed) * before // length
    assert rest > 0
    end = consumed + rest + (size - 1) // length
    second, last, built = read(config, length, consumed, end, record)
    assert [problem.partition("[")[2] for problem in built.changes[:1]] == [
        "sequence-length-changed]"
    ]

    remaining = flat(second[:rest])
    assert len(set(flat(first) + remaining)) == len(flat(first)) + len(remaining)
    assert unread - len(remaining) < before + length + 1
    # In the order of the text, unread samples are joined and cut again; the samples are shuffled.
    uncut = {token: index for index, token in enumerate(text_of(path, before, record))}
    places = [uncut[token] for token in remaining]
    joined = sorted(places)
    assert sorted(places[n : n + length] for n in range(0, len(places), length)) == [
        joined[n : n + length] for n in range(0, len(joined), length)
    ]
    assert rest < 4 or places != joined
    # Then a complete epoch follows.
    epoch = flat(second[rest:])
    assert len(set(epoch)) == len(epoch)
    progress = {"requests": (max(30, consumed),), "consumed": consumed, "excluded": ()}
    assert last["sources"][0]["earlier"] == ({"seq_length": before, **progress},)

    # Stopped and resumed, also within the unread text, and at a third length.
    for stop in (consumed + 1, consumed + rest + 3):
        parts, record_of_part, _ = read(config, length, consumed, stop, record, total=end)
        again, final, built = read(config, length, stop, end, record_of_part)
        assert (parts + again, final, built.changes) == (second, last, ())
    _, record_of_part, _ = read(config, length, consumed, consumed + 1, record)
    third, _, _ = read(config, 4, consumed + 1, consumed + 3, record_of_part)
    assert not set(flat(third)) & set(flat(first) + second[0])


def text_of(path: str, length: int, record: Any) -> list[int]:
    """All tokens of the index of a run, in the order of its documents."""
    samples = record["sources"][0]["requests"][0]
    shape = {"seq_length": length, "vocab_size": 10_000}
    built = resumed(DataConfig(data_path=(path,), split="1"), samples, 0, None, **shape)
    assert isinstance(built.train, GPTDataset)
    indexes = built.train._indexes.load()
    file = IndexedDataset(path)
    starts = [int(pointer) // file.dtype.itemsize for pointer in file.pointers]
    return [
        int(token)
        for document in indexes.documents.tolist()
        for token in file.tokens[starts[document] : starts[document] + file.lengths[document]]
    ]


def test_every_source_of_a_blend_continues_at_another_length(tmp_path: Path) -> None:
    """Claim (checkpoints): at another sequence length every source continues with its unread text,
    without a token twice, and resumes"""
    a = write_distinct(tmp_path / "a", 45)
    b = write_distinct(tmp_path / "b", 45, first=2000)
    blend = DataConfig(data_path=("2", a, "1", b), split="1")
    first, record, _ = read(blend, 6, 0, 60)
    second, record, built = read(blend, 12, 60, 75, record)
    assert [source["consumed"] for source in record["sources"]] == [10, 5]
    assert len(set(flat(first + second))) == len(flat(first + second))
    assert [(file.samples, file.epochs) for file in built.usage] == [
        (50, (40 * 6 + 10 * 12) / 712),
        (25, (20 * 6 + 5 * 12) / 712),
    ]
    # A source that was left at the first length and returns at the second.
    _, alone, _ = read(DataConfig(data_path=(a,), split="1"), 12, 60, 62, read(blend, 6, 0, 60)[1])
    back, record, built = read(blend, 12, 62, 74, alone)
    assert len(set(flat(first + back))) == len(flat(first + back))
    assert "b at its sample 20" in "\n".join(built.changes)


def unique(prefix: Path, first: int, sizes: list[int]) -> str:
    """Writes documents in which no token occurs twice."""
    ends = np.cumsum([first, *sizes]).tolist()
    return write_pair(prefix, list(map(range, ends, ends[1:])))


def inputs_of(dataset: TokenDataset | None, positions: range) -> list[int]:
    """The inputs of the samples in these positions."""
    assert dataset is not None
    return [int(token) for position in positions for token in dataset[position][:-1]]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("order", ["single", "cyclic"])
@pytest.mark.parametrize("weights", [None, ("1", "1"), ("9", "1")])
def test_exact_epochs_read_no_token_more_often(
    tmp_path: Path, epochs: int, order: str, weights: tuple[str, str] | None
) -> None:
    """Claim (samples): a run of a number of epochs (`--train-data-exact-num-epochs`) reads no
    token more often, and every token of the file that ends first so often"""
    a = unique(tmp_path / "a", 0, [7, 30, 2, 60])
    b = unique(tmp_path / "b", 500, [90, 11, 200])
    path = (a, b) if weights is None else (weights[0], a, weights[1], b)
    options: Any = {"dataloader_type": order, "train_data_exact_num_epochs": epochs}
    for prefixes in ((a,), path):
        config = DataConfig(data_path=prefixes, split="1", **options)
        samples = exact_train_samples(DataFiles(config), 5, epochs)
        counts = Counter(inputs_of(datasets(config, (samples, 0, 0)).train, range(samples)))
        assert set(counts.values()) <= {*range(1, epochs + 1)}
        of_files = [sum(n for t, n in counts.items() if (t >= 500) == is_b) for is_b in (0, 1)]
        rest = 10 * epochs  # less than a sample of an epoch, and one in the blend
        assert epochs * 99 - of_files[0] < rest
        if prefixes == path and weights is None:
            assert epochs * 301 - of_files[1] < rest


def test_cyclic_epochs_have_the_same_samples_in_another_order(tmp_path: Path) -> None:
    """Claim (samples): with `--dataloader-type cyclic` every epoch has the same samples in an order
    of its own, also after a resume, in a longer run and at another sequence length"""
    path = (unique(tmp_path / "a", 0, [7, 30, 2, 60]),)
    config = DataConfig(data_path=path, split="1", dataloader_type="cyclic")
    built = datasets(config, (50, 0, 0))
    assert built.train is not None
    assert built.progress is not None
    order = [tuple(built.train[position].tolist()) for position in range(len(built.train))]
    epochs = [order[start : start + 19] for start in range(0, len(order), 19)]
    assert len(epochs) == 3  # of (99 - 1) // 5 samples
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len(set(map(tuple, epochs))) == 3
    assert len(set(order)) == 19
    single = datasets(DataConfig(data_path=path, split="1"), (50, 0, 0)).train
    assert len(single) == 59  # cached apart
    history = built.progress.history_after(25)
    resumed = datasets(config, (80, 0, 0), history=history, consumed=25).train
    assert resumed is not None
    assert [tuple(resumed[position].tolist()) for position in range(57)] == order
    # The unread samples of both epochs, joined.
    longer = datasets(config, (45, 0, 0), history=history, consumed=25, seq_length=10).train
    rest = Counter(inputs_of(longer, range(25, 41)))
    assert rest == Counter(inputs_of(built.train, range(25, 57)))


def test_documents_that_contain_the_end_of_document_token_stay_whole(tmp_path: Path) -> None:
    """Boundaries that are counted in samples are those of the .idx file, and no token is lost."""
    eod = 999
    texts = [[1, eod, 2, 3, eod], [4, 5], [eod, eod, 6, eod], [7, 8, 9]] * 6 + [[10, 11]]
    total = sum(map(len, texts))
    config = DataConfig(
        data_path=(write_pair(tmp_path / "p", texts),),
        split="1",
    )
    built = datasets(config, ((total - 1) // 5, 0, 0)).train
    assert built is not None
    ids, marks = SampleReading(marked_by_file(built), range(len(built))).finish()
    assert marks is not None
    last = torch.from_numpy(marks == Mark.LAST)
    assert ids[:, :-1].size == total - 1  # one epoch, without its last token
    assert int(last[:, :-1].sum()) == len(texts) - 1
    assert int(last[:, 1:].sum()) == len(texts)
    documents = PackingOptions(False, reset_attention=True).documents(last[:, :-1])
    ends = documents.doc_ids_BS.diff(dim=1).count_nonzero()
    assert int(ends) == len(texts) - 1 - int(last[:, -2].sum())
    read = Counter(ids[:, :-1].flatten().tolist())
    assert (Counter(itertools.chain(*texts)) - read).total() == 1


def marked_by_file(dataset: TokenDataset | None) -> TransformedDataset:
    """The samples with the ends of documents of their file."""
    assert dataset is not None
    return TransformedDataset(dataset, [DocumentEnds(None)])


def test_samples_mark_the_ends_of_documents(tmp_path: Path) -> None:
    """Claim (samples): with `--document-boundaries idx`, documents end where the .idx file ends
    them, without an end-of-document token"""
    config = DataConfig(data_path=(unique(tmp_path / "a", 0, [7, 30, 1, 60]),), split="1")
    built = datasets(config, (15, 0, 0))

    def ends_of(dataset: TokenDataset | None, positions: range) -> set[int]:
        assert dataset is not None
        ids, marks = SampleReading(marked_by_file(dataset), positions).finish()
        assert ids.tolist() == [dataset[position].tolist() for position in positions]
        assert marks is not None
        return {*ids[marks == Mark.LAST].tolist()}

    assert built.train is not None
    ends = ends_of(built.train, range(len(built.train)))
    assert {6, 37, 97} <= ends <= {6, 36, 37, 97}
    assert built.progress is not None
    history = built.progress.history_after(9)
    shorter = datasets(config, (30, 0, 0), history=history, consumed=9, seq_length=3).train
    rest = ends_of(shorter, range(9, 15))
    assert rest
    assert rest <= ends
