"""Sentence splitting: sentence ends, losslessness, choice of the splitter, token files."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import DataConfig, TokenizerConfig
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.merge import merge
from megatron_ds.data.token_files.tokenizer_metadata import read_sentence_splitter, read_tokenizer
from megatron_ds.data.validation import DataFiles
from megatron_ds.fileio import resumable
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.sentence_splitter import (
    RuleSplitter,
    Splitter,
    choose_splitter,
)
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import preprocess
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.null import NullTokenizer
from tests.preprocess_runs import (
    TOKENIZER,
    interrupt,
    output_files,
    pair,
    resume,
    run_uninterrupted,
)
from tests.problems import raises_problem
from tests.proofs.cases import with_proofs
from tests.tables import tables
from tests.token_files import reference_bytes

TABLES = tables(__file__)

MARKED = TABLES["marked"]
"""Texts with | between sentences."""


@pytest.mark.parametrize("marked", MARKED)
def test_sentence_rules(marked: str) -> None:
    parts = marked.split("|")
    text = marked.replace("|", "")
    assert RuleSplitter("english", keep_newlines=False)(text) == [part.strip() for part in parts]
    # Whitespace belongs to the sentence before it; after the last one it is dropped.
    kept = RuleSplitter("english", keep_newlines=True)(text)
    assert "".join(kept) == text.rstrip()
    assert [one.rstrip() for one in kept] == [parts[0].rstrip(), *(s.strip() for s in parts[1:])]


@pytest.mark.parametrize("text", ["", " \n ", "\u2029"])
@pytest.mark.parametrize("keep", [False, True])
def test_blank_text_has_no_sentences(text: str, keep: bool) -> None:
    assert RuleSplitter("english", keep)(text) == []


TEXTS = st.lists(
    st.sampled_from([*".!?…。！\"')]”（A B aI12é", "\n", "\n\n", "\t", "\r\n", "Mr", "e.g", "the"])
    | st.text(max_size=3),
    max_size=30,
).map("".join)


def check_lossless(text: str, plain: list[str], kept: list[str]) -> None:
    """Only whitespace is dropped; with `keep_newlines`, only that at the end."""
    assert all(one and one == one.strip() for one in plain)
    assert "".join(kept) == text.rstrip()
    assert [one.strip() for one in kept] == plain
    assert "".join("".join(plain).split()) == "".join(text.split())


@given(text=TEXTS)
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
def test_rules_lose_no_text(text: str) -> None:
    check_lossless(text, RuleSplitter("english", False)(text), RuleSplitter("english", True)(text))


@pytest.fixture(scope="module")
def nltk_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A punkt model of the language `small` in nltk's data."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    text = " ".join(
        f"The man saw approx. {n} birds. A bird sang to approx. {n} men. Then the birds left."
        for n in range(40)
    )
    folder = tmp_path_factory.mktemp("nltk") / "tokenizers"
    parameters = punkt.PunktTrainer(text).get_params()
    (folder / "punkt_tab" / "small").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nltk.data.path", [str(folder.parent)])  # nltk writes nowhere else
        punkt.save_punkt_params(parameters, dir=str(folder / "punkt_tab" / "small"))
    return folder.parent


@pytest.fixture
def with_models(nltk_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nltk.data.path", [str(nltk_data)])


PUNKT = 'A man saw approx. 5 birds. They sang.\n\nHe "went." He came.  So?  Yes'


@pytest.mark.usefixtures("with_models")
def test_punkt_splits_as_in_megatron() -> None:
    plain, kept = (choose_splitter("small", keep) for keep in (False, True))
    # As in Megatron, whitespace after a closing quote is dropped.
    spaced = ["A man saw approx. 5 birds. ", "They sang.\n\n", 'He "went."', "He came.  "]
    spaced += ["So?  ", "Yes"]
    assert plain(PUNKT) == [sentence.strip() for sentence in spaced]
    assert kept(PUNKT) == pickle.loads(pickle.dumps(kept))(PUNKT) == spaced
    assert plain.description["splitter"] == "punkt"
    assert {**plain.description, "keep_newlines": True} == kept.description
    assert str(plain) == "nltk's punkt (small, punkt_tab)"


load_once = functools.cache(choose_splitter)


@pytest.mark.usefixtures("with_models")
@given(text=TEXTS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_punkt_loses_no_text(text: str) -> None:
    for keep in (False, True):
        found = load_once("small", keep)(text)
        assert "".join("".join(found).split()) == "".join(text.split())


@pytest.mark.usefixtures("with_models")
def test_language_without_a_punkt_model_is_an_error_that_names_both_ways_out() -> None:
    for lang in ("english", "klingon", "../small", "", "small/../small"):
        with raises_problem("punkt-unavailable", "lang", "sentence_splitter") as raised:
            choose_splitter(lang, False)
        for value in ("only small", "nltk.downloader punkt_tab", "--sentence-splitter rules"):
            assert value in str(raised.problem)


def test_rules_are_used_only_on_request() -> None:
    for lang in ("english", "german"):
        assert isinstance(choose_splitter(lang, False, "rules"), RuleSplitter)
    with raises_problem("no-sentence-rules-for-language", "lang", "sentence_splitter"):
        choose_splitter("small", False, "rules")


@pytest.mark.usefixtures("with_models")
def test_damaged_model_is_an_error(nltk_data: Path) -> None:
    folder = nltk_data / "tokenizers" / "punkt_tab" / "broken"
    shutil.copytree(folder.with_name("small"), folder)
    try:
        (folder / "ortho_context.tab").write_bytes(b"\xff\xfe")
        with raises_problem("punkt-model-damaged", contains="broken"):
            choose_splitter("broken", False)
        (folder / "ortho_context.tab").unlink()
        with raises_problem("punkt-model-damaged", contains="ortho_context.tab"):
            choose_splitter("broken", False)
    finally:
        shutil.rmtree(folder)


def test_punkt_without_nltk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    with raises_problem("punkt-unavailable", contains="pip install '.[preprocess]'"):
        choose_splitter("english", False)


class Lines:
    """A splitter whose sentences are lines, including blank ones."""

    description: dict[str, Any] = {"splitter": "lines"}  # noqa: RUF012

    def __call__(self, text: str) -> list[str]:
        return text.split("\n")


def as_megatron(
    texts: list[str], splitter: Splitter, tokenizer: Tokenizer, append_eod: bool
) -> list[list[list[int]]]:
    """Sentences without tokens are left out, and so are documents without sentences (as bigscience
    does; Megatron-LM keeps them, empty); the end of a document belongs to its last sentence."""
    documents = []
    for text in texts:
        sentences = [ids for one in splitter(text) if (ids := tokenizer.encode(one))]
        if sentences:
            sentences[-1] = sentences[-1] + [tokenizer.eod] * append_eod
            documents.append(sentences)
    return documents


def options(folder: Path, rows: list[dict[str, str]], **values: Any) -> PreprocessOptions:
    path = folder / f"{values.pop('name', 'in')}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = {"overwrite": True, **values}
    return PreprocessOptions(InputSpec((str(path),)), str(path.with_suffix("")), **values)


def test_blank_sentences_and_documents_are_dropped(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("1 2\n\n3\n", "\n \n", "4", "", "\n5\n6 7")]
    for append_eod, expected in (
        (True, [[1, 2], [3, 100], [4, 100], [5], [6, 7, 100]]),
        (False, [[1, 2], [3], [4], [5], [6, 7]]),
    ):
        given = options(tmp_path, rows, append_eod=append_eod, splitter=Lines())
        done = preprocess(given, TOKENIZER)
        data = IndexedDataset(tmp_path / "in_text_sentence")
        assert [data.get(at).tolist() for at in range(len(data))] == expected
        assert data.document_index.tolist() == [0, 2, 3, 5]
        assert (done.documents, done.dropped) == (3, {"empty text": 2})
    assert not list(tmp_path.glob("*_document*"))
    assert read_sentence_splitter(str(tmp_path / "in_text_sentence")) == Lines.description


def test_refused_sentence_rejects_its_document(tmp_path: Path) -> None:
    rows = [{"text": "1\n2"}, {"text": "3\nx"}, {"text": "4"}]
    done = preprocess(options(tmp_path, rows, splitter=Lines()), TOKENIZER)
    assert IndexedDataset(tmp_path / "in_text_sentence").tokens.tolist() == [1, 2, 4]
    assert done.dropped == {"refused by the tokenizer": 1}


class WithBegin(NullTokenizer):
    bos = 99


def test_documents_begin_with_the_begin_token_once(tmp_path: Path) -> None:
    """Claim (tokenizers): documents begin with the begin token of `--prepend-bos`, once"""
    rows = [{"text": text} for text in ("1 2\n\n3\n", "99 4", "", "\n5\n6 7", "99")]
    for append_eod, end in ((True, [100]), (False, [])):
        given = options(
            tmp_path, rows, append_eod=append_eod, prepend_bos=True, splitter=Lines(), chunk_size=2
        )
        done = preprocess(given, WithBegin(100))
        data = IndexedDataset(tmp_path / "in_text_sentence")
        documents = [[99, 1, 2], [3, *end], [99, 4, *end], [99, 5], [6, 7, *end], [99, *end]]
        assert [data.get(at).tolist() for at in range(len(data))] == documents
        assert data.document_index.tolist() == [0, 2, 3, 5, 6]
        assert done.tokens == sum(map(len, documents))
    with raises_problem("begin-token-missing", "prepend_bos"):
        preprocess(given, NullTokenizer(100))


@pytest.mark.parametrize(
    ("size", "append_eod"),
    with_proofs(
        [(100, True), (70000, False), (100, False), (70000, True)], [(100, False), (70000, True)]
    ),
)
def test_bytes_equal_megatrons_for_any_keys_workers_and_chunks(
    tmp_path: Path, size: int, append_eod: bool
) -> None:
    """For both token dtypes."""
    texts = ["\n".join(" ".join(["7"] * (n * k % 4)) for k in range(n % 5)) for n in range(60)]
    rows = [{"a": text, "b": f"{n % 100}\n{n % 7}"} for n, text in enumerate(texts)]
    tokenizer = NullTokenizer(size)
    letter, code = ("i", 4) if size > 65499 else ("H", 8)
    for workers, chunk_size in ((1, 64), (2, 7), (3, 1)):
        given = options(
            tmp_path, rows, json_keys=("a", "b"), append_eod=append_eod, splitter=Lines(),
            workers=workers, chunk_size=chunk_size,
        )  # fmt: skip
        preprocess(given, tokenizer)
        for key in "ab":
            documents = as_megatron([row[key] for row in rows], Lines(), tokenizer, append_eod)
            expected = reference_bytes(documents, code, letter)
            assert pair(tmp_path / f"in_{key}_sentence") == expected


@pytest.mark.parametrize("keep", [False, True])
def test_t5_data_of_the_tutorial_equal_megatrons(
    tmp_path: Path, shared_data: Path, keep: bool
) -> None:
    """my-t5_text_sentence, of BERT's published vocabulary and English text.

    Claim (data): sentence data for BERT and T5 equals Megatron's byte for byte, given the same
    sentence boundaries
    """
    vocab = str(shared_data / "bert-base-uncased-vocab.txt")
    known = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_extra_ids": 100}
    tokenizer = build_tokenizer(TokenizerConfig(vocab_file=vocab, **known))
    with open(shared_data / "openwebtext-1000.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(25), strict=False)]
    splitter = choose_splitter("english", keep, "rules")
    rows = [{"text": text} for text in texts]
    given = options(tmp_path, rows, name="my-t5", append_eod=True, workers=2, splitter=splitter)
    preprocess(given, tokenizer)
    documents = as_megatron(texts, splitter, tokenizer, append_eod=True)
    assert pair(tmp_path / "my-t5_text_sentence") == reference_bytes(documents)
    assert sum(map(len, documents)) > 20 * len(documents)


def test_merged_sentences_equal_those_of_one_run(tmp_path: Path) -> None:
    rows = [{"text": f"{n}\n{n} 1\n\n2"} for n in range(30)]
    parts = {"first": rows[:11], "second": rows[11:], "whole": rows}
    for name, part in parts.items():
        preprocess(options(tmp_path, part, name=name, append_eod=True, splitter=Lines()), TOKENIZER)
    first, second, whole = (str(tmp_path / f"{name}_text_sentence") for name in parts)
    done = merge([first, second], str(tmp_path / "merged"))
    assert done.written[1:3] == (90, 30)
    assert pair(tmp_path / "merged") == pair(whole)
    assert read_sentence_splitter(str(tmp_path / "merged")) == Lines.description
    assert read_tokenizer(str(tmp_path / "merged")) == TOKENIZER.fingerprint
    # Pairs of different splitters may be merged; the result then names no splitter.
    preprocess(options(tmp_path, rows[:1], name="other"), TOKENIZER)
    merge([first, str(tmp_path / "other_text_document")], str(tmp_path / "mixed"))
    assert read_sentence_splitter(str(tmp_path / "mixed")) is None
    assert read_tokenizer(str(tmp_path / "mixed")) == TOKENIZER.fingerprint


def test_gpt_shuffles_sentences_as_megatron_does(tmp_path: Path) -> None:
    """Sequences are shuffled, so the sentences of a document are separated."""
    rows = [{"text": f"{n}\n{n}\n{n}"} for n in range(40)]
    preprocess(options(tmp_path, rows, splitter=Lines(), append_eod=True), TOKENIZER)
    prefix = str(tmp_path / "in_text_sentence")
    cache = str(tmp_path / "cache")
    built = build_datasets(
        DataFiles(DataConfig(data_path=(prefix,), split="1", data_cache_path=cache)),
        seq_length=4,
        seed=1,
        num_samples=(39, 0, 0),
        tokenizer_fingerprint=TOKENIZER.fingerprint.digest,
        vocab_size=TOKENIZER.vocab_size,
    )
    tokens = [token for at in range(39) for token in built.train[at][:-1].tolist()]
    apart = sum(a != b for a, b in pairwise(token for token in tokens if token != TOKENIZER.eod))
    assert len(built.train) == 39
    assert apart > 100
    assert sorted(set(tokens)) == [*range(40), 100]


def test_resume_requires_the_same_splitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "COMMIT_SECONDS", 0.0)
    rows = [{"text": f"{n}\n\n{n} 1\n"} for n in range(40)]
    chosen = options(tmp_path, rows, append_eod=True, chunk_size=3, splitter=Lines())
    chosen = dataclasses.replace(chosen, output_prefix=str(tmp_path / "out"))
    _, expected = run_uninterrupted(chosen)
    interrupt(chosen, 4)
    for other in (None, RuleSplitter("english", False)):
        with raises_problem("resumed-run-differs", contains='"splitter": "lines"'):
            resume(chosen, splitter=other)
    resume(chosen, workers=2, chunk_size=5)
    assert output_files(tmp_path) == expected
