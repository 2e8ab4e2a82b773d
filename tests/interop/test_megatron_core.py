"""Token files and samples against Megatron-LM's own package, megatron-core: `make test-interop`.

It is not among what the other tests need, so these are left out unless that target runs them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import DataConfig, TokenizerConfig
from megatron_ds.data.blend.blend_schedule import blend_order
from megatron_ds.data.blend.megatron_blend import normalized
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.sample_index import build_indexes
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset, token_dtype
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.data.token_files.merge import merge
from megatron_ds.data.validation import DataFiles
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.sentence_splitter import Splitter, choose_splitter
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import preprocess
from megatron_ds.tokenizer import Tokenizer, build_tokenizer

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:::megatron")]

CORPUS = Path(__file__).resolve().parents[1] / "golden" / "tokenizers"
SIZES = {"uint16": 65_499, "int32": 65_500}
"""Vocabularies by the type that they are stored in."""
DOCUMENTS = [[[5, 6, 7]], [[1], [2, 3]], [[9] * 300, [8], [65_498]], [[4]]]


@pytest.fixture(scope="session")
def megatron() -> SimpleNamespace:
    """Their modules. An error, and no skip, if they are not there: who runs this wants them."""
    from megatron.core.datasets import (
        blended_megatron_dataset_builder,
        gpt_dataset,
        helpers,
        indexed_dataset,
        utils,
    )

    return SimpleNamespace(
        build=blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder,
        gpt=gpt_dataset,
        helpers=helpers,
        indexed=indexed_dataset,
        split=utils.Split,
    )


def written_by_megatron(
    megatron: SimpleNamespace, prefix: Path, documents: Sequence[Any], size: int
) -> str:
    dtype = megatron.indexed.DType.optimal_dtype(size)
    builder = megatron.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = [token for sequence in document for token in sequence]
        builder.add_document(torch.tensor(tokens), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def written_by_us(prefix: Path, documents: Sequence[Any], size: int) -> str:
    with pair_writer(prefix, token_dtype(size)) as writer:
        for document in documents:
            lengths = [len(sequence) for sequence in document]
            tokens = [token for sequence in document for token in sequence]
            writer.add_documents(tokens, lengths, [len(lengths)])
    return str(prefix)


def content(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def check_same(theirs: Any, ours: IndexedDataset, count: int) -> None:
    """Every array of a pair, as both read it, and every sequence."""
    assert len(theirs) == len(ours) == count
    assert theirs.sequence_lengths.tolist() == ours.lengths.tolist()
    assert theirs.index.sequence_pointers.tolist() == ours.pointers.tolist()
    assert theirs.document_indices.tolist() == ours.document_index.tolist()
    for at in range(count):
        assert theirs[at].dtype == ours.get(at).dtype
        assert theirs[at].tolist() == ours.get(at).tolist()


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_each_reads_what_the_other_writes_and_the_bytes_are_the_same(
    megatron: SimpleNamespace, tmp_path: Path, size: int
) -> None:
    """Documents of one and of several sequences.

    Claim (data): `megatron-core` and this package read each other's token files, which are
    identical (`make test-interop`)
    """
    theirs = written_by_megatron(megatron, tmp_path / "theirs", DOCUMENTS, size)
    ours = written_by_us(tmp_path / "ours", DOCUMENTS, size)
    assert content(theirs) == content(ours)
    check_same(megatron.indexed.IndexedDataset(ours), IndexedDataset(theirs), 7)
    dtype = next(name for name, limit in SIZES.items() if limit == size)
    assert IndexedDataset(theirs).dtype == dtype


def test_merging_gives_their_merged_bytes(megatron: SimpleNamespace, tmp_path: Path) -> None:
    parts = [
        written_by_us(tmp_path / name, documents, 100)
        for name, documents in (("a", [[[1], [2, 3]]]), ("b", [[[4]], [[5], [6]]]))
    ]
    merge(parts, str(tmp_path / "ours"))
    builder = megatron.indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part in parts:
        builder.add_index(part)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert content(tmp_path / "ours") == content(tmp_path / "theirs")


KINDS = {
    "BertWordPieceLowerCase": {"vocab_file": str(CORPUS / "vocab.txt")},
    "GPT2BPETokenizer": {
        "vocab_file": f"{CORPUS}/vocab.json",
        "merge_file": f"{CORPUS}/merges.txt",
    },
}


def texts() -> list[str]:
    with open(CORPUS / "corpus.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def as_megatron(
    texts: list[str], splitter: Splitter | None, tokenizer: Tokenizer, append_eod: bool
) -> list[list[list[int]]]:
    """What goes to their builder, document by document."""
    documents = []
    for text in texts:
        sentences = splitter(text) if splitter else [text]
        encoded = [ids for sentence in sentences if (ids := tokenizer.encode(sentence))]
        if encoded:
            encoded[-1] = encoded[-1] + [tokenizer.eod] * append_eod
            documents.append(encoded)
    return documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("sentences", [False, True])
def test_preprocessed_files_are_theirs(
    megatron: SimpleNamespace, tmp_path: Path, kind: str, append_eod: bool, sentences: bool
) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, **KINDS[kind]))
    splitter = choose_splitter("english", False, "rules") if sentences else None
    options = PreprocessOptions(
        InputSpec((str(CORPUS / "corpus.jsonl"),)), str(tmp_path / "my"), append_eod=append_eod,
        workers=2, chunk_size=3, splitter=splitter,
    )  # fmt: skip
    preprocess(options, tokenizer)
    documents = as_megatron(texts(), splitter, tokenizer, append_eod)
    theirs = written_by_megatron(megatron, tmp_path / "theirs", documents, tokenizer.vocab_size)
    assert content(options.prefix("text")) == content(theirs)
    read = megatron.indexed.IndexedDataset(options.prefix("text"))
    check_same(read, IndexedDataset(theirs), sum(map(len, documents)))


def test_their_t5_samples_are_neighbouring_sentences_of_one_document(
    megatron: SimpleNamespace, tmp_path: Path
) -> None:
    """Their sampler of BERT and T5 data, on the sentences that a preprocessing made."""
    path = tmp_path / "in.jsonl"
    rows = [{"text": "Here it is. " * (3 + n % 5) + f"Number {n}? Yes."} for n in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = "BertWordPieceLowerCase"
    options = PreprocessOptions(
        InputSpec((str(path),)), str(tmp_path / "my-t5"),
        splitter=choose_splitter("english", False, "rules"),
    )  # fmt: skip
    preprocess(options, build_tokenizer(TokenizerConfig(tokenizer_type=kind, **KINDS[kind])))
    data = megatron.indexed.IndexedDataset(str(tmp_path / "my-t5_text_sentence"))
    starts = data.document_indices
    longest = int(data.sequence_lengths.max()) * 4
    seed = 7
    mapping = megatron.helpers.build_mapping(
        starts, data.sequence_lengths, 10, 200, longest, 0.1, seed, False, 2
    )
    assert len(mapping) >= 100
    for begin, end, _ in mapping.tolist():
        document = int(np.searchsorted(starts, begin, side="right")) - 1
        assert starts[document] <= begin < end <= starts[document + 1]
    found = {int(np.searchsorted(starts, row[0], side="right")) for row in mapping}
    assert found == set(range(1, 51))


class Named(SimpleNamespace):
    """As much of a tokenizer as their datasets ask for."""

    eod = 99
    pad = -1
    vocab_size = 100
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


def gpt_config(megatron: SimpleNamespace, **values: Any) -> Any:
    flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    return megatron.gpt.GPTDatasetConfig(tokenizer=Named(), **dict.fromkeys(flags, False), **values)


OPTIONS = {"seq_length": 16, "seed": 5, "tokenizer_fingerprint": "", "vocab_size": 100}
"""Of `build_datasets`, to which those of `build_theirs` are equal."""


def build_theirs(megatron: SimpleNamespace, samples: Sequence[int], **values: Any) -> Any:
    config = gpt_config(megatron, random_seed=5, sequence_length=16, **values)
    builder = megatron.build(megatron.gpt.GPTDataset, [*samples], lambda: True, config)
    return builder.build()


def sample_of(each: Any) -> list[int]:
    return [*each["tokens"].tolist(), int(each["labels"][-1])]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=25),
    wanted=st.integers(1, 200),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_document_sample_and_shuffle_index_are_theirs(
    megatron: SimpleNamespace,
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    wanted: int,
    seq_length: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """On any part of a file, over as many epochs as it takes."""
    if sum(lengths) < 2:
        lengths = [*lengths, 2]
    first = data.draw(st.integers(0, len(lengths) - 1))
    documents = np.arange(first, len(lengths), dtype=np.int32)
    if sum(lengths[first:]) < 2:
        documents = np.arange(len(lengths), dtype=np.int32)
    folder = tmp_path_factory.mktemp("pair")
    prefix = written_by_us(folder / "p", [[[1] * length] for length in lengths], 100)
    theirs = megatron.gpt.GPTDataset(
        megatron.indexed.IndexedDataset(prefix),
        prefix,
        documents,
        wanted,
        megatron.split.train,
        gpt_config(
            megatron, random_seed=seed, sequence_length=seq_length, blend=([prefix], None),
            split="1", path_to_cache=str(folder / "cache"),
        ),
    )  # fmt: skip
    ours = build_indexes(IndexedDataset(prefix).lengths, documents, wanted, seq_length, seed)
    for their, our in (
        (theirs.document_index, ours.documents),
        (theirs.sample_index, ours.samples),
        (theirs.shuffle_index, ours.shuffle),
    ):
        assert (their.dtype, their.tolist()) == (our.dtype, our.tolist())


SPLITS = {
    (300, "8,1,1"): [(0, 240), (240, 270), (270, 300)],
    (300, "90,6,4"): [(0, 270), (270, 288), (288, 300)],
    (300, "1,0,0"): [(0, 300), (300, 300), (300, 300)],
    (300, "50/50"): [(0, 150), (150, 300), (300, 300)],
    (310, "90,5,5"): [(0, 278), (278, 294), (294, 310)],
    (1083, "969,30,1"): [(0, 1050), (1050, 1082), (1082, 1083)],
}
"""Sequences of each part, by number of sequences and --split, as the Megatron-DeepSpeed forks and
older Megatron-LM round them: each share by itself, less the surplus of their sum."""
OF_MEGATRON_CORE = {
    (310, "90,5,5"): [(0, 279), (279, 294), (294, 310)],
    (1083, "969,30,1"): [(0, 1049), (1049, 1082), (1082, 1083)],
}
"""Those of megatron-core, which rounds sums of shares, where they differ."""


@pytest.mark.parametrize(("size", "split"), SPLITS)
@pytest.mark.parametrize("sentences", [False, True])
@pytest.mark.parametrize("rounding", ["megatron-deepspeed", "megatron-core"])
def test_a_run_reads_the_samples_that_theirs_would_of_the_same_documents(
    megatron: SimpleNamespace, tmp_path: Path, size: int, split: str, rounding: str, sentences: bool
) -> None:
    """Training, validation and test of one file, over several epochs.

    Claim (samples): a run reads the samples that `megatron-core` reads of the same documents, over
    several epochs; `--split` selects documents as the Megatron-DeepSpeed forks do (`make
    test-interop`)
    """
    rng = np.random.RandomState(3)
    sequences = [rng.randint(0, 99, rng.randint(1, 20)).tolist() for _ in range(size)]
    length = 4 if sentences else 1
    documents = [sequences[at : at + length] for at in range(0, size, length)]
    prefix = written_by_us(tmp_path / "p", documents, 100)
    wanted = (7 * size // 3, 40, 10)
    cache = str(tmp_path / "theirs")
    their_split = split.replace("/", ",")
    theirs = build_theirs(
        megatron, wanted, blend=([prefix], None), split=their_split, path_to_cache=cache
    )
    config = DataConfig(
        data_path=(prefix,), split=split, split_rounding=rounding, data_cache_path=str(tmp_path)
    )
    ours = build_datasets(DataFiles(config), num_samples=wanted, **OPTIONS)
    file = IndexedDataset(prefix)
    bounds = SPLITS[size, split]
    their_bounds = OF_MEGATRON_CORE.get((size, split), bounds)
    if rounding == "megatron-core":
        bounds = their_bounds
    parts = (ours.train, ours.valid.get(""), ours.test.get(""))
    for (first, end), other, their, our, count in zip(
        bounds, their_bounds, theirs, parts, wanted, strict=True
    ):
        assert (our is None) == (first == end)
        if our is None:
            continue
        expected = GPTDataset(
            file, build_indexes(file.lengths, np.arange(first, end), count, 16, 5), 16
        )
        samples = [our[at].tolist() for at in range(len(our))]
        assert samples == [expected[at].tolist() for at in range(len(expected))]
        assert their.indices.tolist() == list(range(*other))
        assert ([*map(sample_of, their)] == samples) == (other == (first, end))


@pytest.mark.parametrize("weights", [(5.0, 3.0, 2.0), (0.7, 0.29, 0.01), (1.0, 1.0, 1.0), None])
def test_a_blend_gives_the_samples_that_theirs_would(
    megatron: SimpleNamespace,
    tmp_path: Path,
    weights: tuple[float, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training, validation and test, over several epochs of rare files, and from the middle on.

    Claim (samples): a blend, weighted or not, then gives the samples of `megatron-core`, from the
    start and from the middle of a run, with the splits of `--split-rounding megatron-core` (`make
    test-interop`)
    """
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)  # asked for without a group
    rng = np.random.RandomState(3)
    prefixes = [
        written_by_us(
            tmp_path / name,
            [[rng.randint(0, 99, rng.randint(1, 20)).tolist()] for _ in range(size)],
            100,
        )
        for name, size in (("a", 200), ("b", 310), ("c", 1083))
    ]
    wanted = (600, 40, 20) if weights else (500, 40, 20)
    cache = {"path_to_cache": str(tmp_path / "theirs"), "mid_level_dataset_surplus": 0.005}
    blend = (prefixes, weights and list(weights))
    theirs = build_theirs(megatron, wanted, blend=blend, split="90,5,5", **cache)
    words = [str(word) for pair in zip(weights or (), prefixes, strict=False) for word in pair]
    config = DataConfig(
        data_path=tuple(words or prefixes),
        split="90,5,5",
        split_rounding="megatron-core",
        blend_order="megatron",
        data_cache_path=str(tmp_path / "ours"),
    )
    ours = build_datasets(DataFiles(config), num_samples=wanted, **OPTIONS)
    assert ours.progress is not None
    done = {"history": ours.progress.history_after(250), "consumed": 250}
    resumed = build_datasets(DataFiles(config), num_samples=wanted, **done, **OPTIONS).train
    parts = (ours.train, ours.valid[""], ours.test[""])
    for their, our, count in zip(theirs, parts, wanted, strict=True):
        assert our is not None
        for at in range(min(count, len(their))):
            expected = sample_of(their[at])
            assert our[at].tolist() == expected, at
            if our is ours.train and at >= 250:
                assert resumed is not None
                assert resumed[at].tolist() == expected, at


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30), size=st.integers(1, 5000))
def test_the_order_of_a_blend_is_theirs(
    megatron: SimpleNamespace, parts: list[float], size: int
) -> None:
    weights = normalized(parts)
    theirs = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron.helpers.build_blending_indices(*theirs, np.array(weights), len(parts), size, False)
    order = blend_order(weights, size, rule="megatron")
    ours = [order.locate(at) for at in range(0, size, 7)]
    assert ours == list(zip(*(each[::7].tolist() for each in theirs), strict=True))
