"""Token files of a kind that the package does not have, in all that reads token files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets, build_datasets, exact_train_samples
from megatron_ds.data.token_files import kinds, token_file, token_file_stats
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset, sequence_offsets
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.data.validation import DataFiles, data_problems, data_warnings
from megatron_ds.evaluation.texts import read_texts
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import codes, raises_problem
from tests.token_files import write_pair

LENGTH = 7
SAMPLES = (90, 11, 6)
BOTH = (Path("pair"), Path("lists"))
"""Folders of the same documents as pairs and as lists."""


class Chunks:
    """The tokens of consecutive arrays, such as the record batches of an Arrow table."""

    def __init__(self, chunks: list[np.ndarray]) -> None:
        self._chunks = chunks
        self.size = sum(map(len, chunks))

    def __getitem__(self, key: Any) -> Any:
        return np.concatenate(self._chunks)[key]


class Lists:
    """A file with a JSON list of documents, one sequence each. Implements `TokenFile`."""

    file_names = "JSON"
    cache = None
    version = ""
    loss_spans = None

    def __init__(self, prefix: str, cache: object = None) -> None:
        documents = [np.array(ids, np.uint16) for ids in json.loads(Path(prefix).read_text())]
        self.prefix = prefix
        self.tokens_path = prefix
        self.tokenizer_path = f"{prefix}.tokenizer.json"
        self.sizes = (Path(prefix).stat().st_size,)
        self.dtype = np.dtype("uint16")
        self.lengths = np.array([len(ids) for ids in documents], np.int32)
        self.pointers = sequence_offsets(self.lengths, 2)
        self.document_index = np.arange(len(documents) + 1)
        self.tokens = Chunks(documents)
        self.warm = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> Any:
        return Lists, (self.prefix,)

    def get(self, index: int) -> token_file.Tokens:
        start = int(self.pointers[index]) // 2
        return self.tokens[start : start + int(self.lengths[index])]

    def probe(self, blocks: int) -> token_file.Tokens:
        return token_file.probe(self.tokens, blocks)

    def warm_up(self) -> None:
        self.warm += 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same two files as pairs and as lists; every token occurs once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, kinds.Kind(is_list, Lists)))
    draw = np.random.default_rng(0)
    first = 0
    for name, count in (("a", 25), ("b", 30)):
        ends = first + draw.integers(1, 12, count).cumsum()
        documents = [[*range(*pair)] for pair in itertools.pairwise([first, *ends.tolist()])]
        first = int(ends[-1])
        for path in BOTH:
            path.mkdir(exist_ok=True)
        write_pair(f"pair/{name}", documents)
        Path("lists", name).write_text(json.dumps(documents))
    Path("out.txt").write_text("a:3\na:5-8\nb:7\n")
    return tmp_path


def is_list(path: str) -> bool:
    return Path(path).is_file()


def config_of(folder: Path, words: str, **values: Any) -> DataConfig:
    paths = tuple(word if word[0].isdigit() else f"{folder}/{word}" for word in words.split())
    return DataConfig(data_path=paths, **values)


def built(
    config: DataConfig,
    samples: tuple[int, int, int],
    before: Any,
    consumed: int,
    vocab_size: int = 1000,
) -> Datasets:
    files = DataFiles(config)
    files.checked_vocab_size = vocab_size  # as after `data_problems`
    return build_datasets(
        files,
        seq_length=LENGTH,
        seed=3,
        num_samples=samples,
        tokenizer_fingerprint="t",
        vocab_size=vocab_size,
        history=before,
        consumed=consumed,
    )


def described(data: Datasets, consumed: int, folder: Path) -> Iterator[Any]:
    """All that a run reads, without the folder of its files."""
    assert data.train is not None
    for dataset in (data.train, *data.valid.values(), *data.test.values()):
        again = pickle.loads(pickle.dumps(dataset))  # as for a loader process
        for position in range(consumed if dataset is data.train else 0, len(dataset)):
            ids = dataset[position].tolist()
            assert again[position].tolist() == ids
            pieces = [piece._replace(prefix="") for piece in dataset.pieces(position)]
            yield ids, dataset.sample_id(position), pieces
        for name in "ab":
            yield dataset.positions_of(f"{folder}/{name}", np.arange(4, 9)).tolist()
    for usage in data.usage:
        yield dataclasses.replace(usage, prefix=usage.prefix.removeprefix(f"{folder}/"))
    assert data.progress is not None
    yield data.progress.history_after(consumed + 9).to_dict(), data.changes
    yield {path.name: path.read_bytes() for path in Path(folder, "index-cache").glob("*.npy")}


BLEND = "2 a 1 b"
STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "weights and splits": [(BLEND, {"split": "8,1,1"})] * 2,
    "sizes": [("a b", {"split": "8,1,1"})],
    "exclusion on a resume": [
        (BLEND, {"split": "1"}),
        (BLEND, {"split": "1", "exclude_documents": "out.txt"}),
    ],
    "another blend on a resume": [("a", {"split": "1"}), ("1 b 1 a", {"split": "1"})],
    "Megatron's order": [(BLEND, {"split": "1", "blend_order": "megatron"})],
    "document ends": [(BLEND, {"document_boundaries": "idx", "reset_attention_mask": True})],
}
"""The blend and flags of each start of a run."""


@pytest.mark.parametrize("name", STEPS)
def test_another_kind_of_file_gives_the_samples_of_a_pair(folder: Path, name: str) -> None:
    """Claim (samples): blends, splits, usage, exclusion and resumes read token files of any kind
    alike"""
    runs = []
    for path in BOTH:
        history: BlendHistory | None = None
        consumed = 0
        for words, values in STEPS[name]:
            values = {"mmap_warmup": True, **values}
            data = built(config_of(path, words, **values), SAMPLES, history, consumed)
            runs.append([*described(data, consumed, path)])
            assert data.progress is not None
            consumed += 30
            history = data.progress.history_after(consumed)
    half = len(runs) // 2
    assert runs[:half] == runs[half:]


def test_one_blend_has_files_of_several_kinds(folder: Path) -> None:
    words = "2 {}/a 1 {}/b"
    mixed = config_of(folder, words.format("pair", "lists"), split="1")
    pairs = config_of(folder, words.format("pair", "pair"), split="1")
    samples = [
        [data.train[position].tolist() for position in range(len(data.train))]
        for data in (built(config, SAMPLES, None, 0) for config in (mixed, pairs))
        if data.train is not None
    ]
    assert samples[0] == samples[1]
    assert exact_train_samples(DataFiles(mixed), LENGTH, 2) == exact_train_samples(
        DataFiles(pairs), LENGTH, 2
    )


def test_files_of_another_kind_are_checked(folder: Path) -> None:
    config = config_of(Path("lists"), "a b", eod_mask_loss=True)
    files = DataFiles(config)
    assert not [*data_problems(files, SAMPLES, 1000)]
    assert codes(data_warnings(files, (90, 0, 0), 999, 998)) == [
        "data-without-bos",
        "data-without-eod",
    ]
    assert dict(files.identities())["a (JSON, file 1)"].endswith(" bytes")
    problems = [*data_problems(DataFiles(config), SAMPLES, 20)]
    assert {*codes(problems)} == {"data-token-outside-vocabulary"}
    assert [str(problem).split()[1] for problem in problems] == ["lists/a", "lists/b", "lists/b"]
    (missing, _) = data_problems(DataFiles(config_of(Path("lists"), "c")), SAMPLES, 1000)
    assert missing.code == "data-file-missing"


def test_a_sample_with_an_invalid_token_names_the_file(folder: Path) -> None:
    for path, name in zip(BOTH, ("pair/b.bin", "lists/b"), strict=True):
        data = built(config_of(path, "b"), (9, 0, 0), None, 0, vocab_size=300)
        assert data.train is not None
        with raises_problem("sample-token-outside-vocabulary", contains=f"{name}: "):
            [data.train[position] for position in range(len(data.train))]


def test_files_of_another_kind_are_evaluated_copied_and_compared(folder: Path) -> None:
    tokenizer = NullTokenizer(1000)
    texts = [[*read_texts([f"{path}/a"], ["text"], tokenizer)] for path in BOTH]
    assert texts[0] == texts[1]
    file = kinds.open_token_file("lists/a")
    with pair_writer("copy", "uint16") as writer:
        writer.add_dataset(file)
    for suffix in (".bin", ".idx"):
        assert Path(f"copy{suffix}").read_bytes() == Path(f"pair/a{suffix}").read_bytes()
    assert not token_file_stats.compare(file, IndexedDataset("copy")).description
