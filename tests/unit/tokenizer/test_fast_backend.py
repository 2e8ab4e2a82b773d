"""The fast library gives the ids of the reference, or is not used."""

from __future__ import annotations

import functools
import importlib.util
import json
import pickle
import sys
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fastokens
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from megatron_ds.tokenizer import Tokenizer
from megatron_ds.tokenizer.fast_backend import (
    BACKENDS,
    EDGES,
    FAST,
    FastTokenizer,
    first_difference,
    select_backend,
)
from megatron_ds.tokenizer.gpt2 import GPT2BPETokenizer
from tests.problems import codes, raises_problem
from tests.unit.tokenizer.test_golden import FOLDER, build, texts, tokenizer_of

CORPUS = texts()
END = "<|endoftext|>"


def variant(folder: Path, change: Callable[[tokenizers.Tokenizer], None]) -> Tokenizer:
    """The golden tokenizer.json with a change."""
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return build("HFTokenizer", tokenizer_model=str(folder / "tokenizer.json"))


REFERENCE = {kind: tokenizer_of(kind) for kind in ("GPT2BPETokenizer", "HFTokenizer")}
LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}"),
    )
    for name in FAST
]
by_library = pytest.mark.parametrize("library", LIBRARIES)
GPT2 = REFERENCE["GPT2BPETokenizer"]
PIECES = st.one_of(
    st.text(max_size=8),
    st.sampled_from([*EDGES, END, "'s", "'LL", " ", "  ", "\n", "\r\n", "a", "1", "\u0301", "\0"]),
)


@functools.cache
def fast_tokenizers(library: str) -> dict[str, FastTokenizer]:
    """One for each reference."""
    return {kind: FastTokenizer(tokenizer, library) for kind, tokenizer in REFERENCE.items()}


@by_library
@given(pieces=st.lists(st.lists(PIECES, max_size=8).map("".join), max_size=4))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_any_texts_have_the_reference_ids(library: str, pieces: list[str]) -> None:
    for kind, fast in fast_tokenizers(library).items():
        expected = [REFERENCE[kind].encode(text) for text in pieces]
        assert fast.encode_batch(pieces) == expected
        assert [fast.encode(text) for text in pieces] == expected
        ids, lengths = fast.encode_flat(pieces)
        assert ids.tolist() == [number for each in expected for number in each]
        assert lengths.tolist() == [len(each) for each in expected]


@by_library
def test_the_shared_texts_have_the_reference_ids(library: str, shared_data: Path) -> None:
    """The first documents, and every text file as one text."""
    files = (str(shared_data / f"gpt2-{name}") for name in ("vocab.json", "merges.txt"))
    reference = GPT2BPETokenizer(*files)
    fast = FastTokenizer(reference, library)
    with open(shared_data / "openwebtext-1000.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in islice(file, 60)]
    paths = [path for path in sorted(shared_data.iterdir()) if path.suffix in (".txt", ".md")]
    texts += [path.read_text(encoding="utf-8") for path in paths]
    expected = reference.encode_flat(texts)
    for _ in range(2):  # the second result may come from the library's cache
        found = fast.encode_flat(texts)
        assert np.array_equal(found.lengths, expected.lengths)
        assert np.array_equal(found.ids, expected.ids)


@by_library
@pytest.mark.parametrize("kind", REFERENCE)
def test_only_encoding_differs_from_the_reference(kind: str, library: str) -> None:
    fast = fast_tokenizers(library)[kind]
    reference = REFERENCE[kind]
    assert (fast.vocab_size, fast.eod) == (reference.vocab_size, reference.eod)
    assert (fast.fingerprint, fast.decode(fast.encode("hello"))) == (reference.fingerprint, "hello")
    assert pickle.loads(pickle.dumps(fast)).encode_batch(CORPUS) == reference.encode_batch(CORPUS)


SPACED = [AddedToken("foo bar"), AddedToken("<x>", lstrip=True, rstrip=True)]
WORD = AddedToken("word", single_word=True)
COMPOSED = AddedToken("\u00e9t\u00e9")


def with_added_tokens(folder: Path, *tokens: AddedToken) -> Tokenizer:
    """With a normalizer that composes characters."""

    def change(tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_tokens(list(tokens))

    return variant(folder, change)


@by_library
def test_added_tokens_and_normalizers_are_supported(library: str, tmp_path: Path) -> None:
    further = [WORD, COMPOSED] if library == "fastokens" else []
    reference = with_added_tokens(tmp_path, *SPACED, *further)
    choice = select_backend(reference, library)
    texts = [" a <x> b", "foo bar foo", "words word", "e\u0301te\u0301 \u00e9te\u0301", *CORPUS]
    assert choice.tokenizer.encode_batch(texts) == reference.encode_batch(texts)


@pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="needs gigatoken")
@pytest.mark.parametrize("token", [WORD, COMPOSED], ids=str)
def test_gigatoken_is_not_used_with_added_tokens_that_it_finds_elsewhere(
    token: AddedToken, tmp_path: Path
) -> None:
    """In words, and not in those that normalization composes of both forms."""
    reference = with_added_tokens(tmp_path, token)
    with raises_problem("fast-backend-ids-differ", "tokenizer_backend"):
        select_backend(reference, "gigatoken")
    assert select_backend(reference, "auto").library == "fastokens"


def test_unsupported_tokenizers_use_the_reference(tmp_path: Path) -> None:
    def change(tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    reference = variant(tmp_path, change)
    choice = select_backend(reference, "auto")
    assert (choice.tokenizer, choice.library) == (reference, "tokenizers")
    assert codes([choice.reason or ""]) == ["fast-backend-rejects-tokenizer"]
    with raises_problem("fast-backend-rejects-tokenizer", "tokenizer_backend"):
        select_backend(reference, "fastokens")
    assert select_backend(reference, "tokenizers").tokenizer is reference


def test_kinds_without_a_tokenizer_json_use_their_own_library() -> None:
    null = build("NullTokenizer", 5)
    for backend in ("auto", "tokenizers"):
        assert select_backend(null, backend) == (null, "NullTokenizer", None)
    with raises_problem("fast-backend-unsupported-tokenizer-type", contains="NullTokenizer"):
        select_backend(null, "fastokens")
    assert BACKENDS == ("auto", "tokenizers", "fastokens", "gigatoken")


class WrongLibrary:
    """The library, with wrong ids for texts that contain a fragment."""

    def __init__(self, fragment: str) -> None:
        self._fragment = fragment
        self._correct = fastokens.Tokenizer.from_json_str(GPT2.tokenizer_json())

    def from_json_str(self, content: str) -> WrongLibrary:
        return self

    def encode_batch_flat(self, texts: Sequence[str]) -> Any:
        wrong = [text.replace(self._fragment, "?") for text in texts]
        return self._correct.encode_batch_flat(wrong)


FRAGMENTS = ["\t", "\x85", "\u0627", "\u2028", "\ufeff", "\U0001f469"]
FRAGMENTS += ["\r\n", "\u00a0", "\0", "\u200d", "\u0301", "'LL", END, "\u05e9", "\u4e2d", "1234"]


@pytest.mark.parametrize("fragment", [*FRAGMENTS, "a" * 65536])
def test_a_library_with_other_ids_is_not_used(
    fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=WrongLibrary(fragment)))
    choice = select_backend(GPT2, "auto")
    assert choice.tokenizer is GPT2
    assert codes([choice.reason or ""]) == ["fast-backend-ids-differ"]
    with raises_problem("fast-backend-ids-differ", "tokenizer_backend") as raised:
        select_backend(GPT2, "fastokens")
    assert len(str(raised.problem)) < 300


def test_the_first_difference_is_shown() -> None:
    texts = ["a", "b" * 100, "c"]
    assert first_difference(lambda text: [0], lambda text: [0], texts) is None
    shown = first_difference(lambda text: [len(text)], lambda text: [1], texts)
    assert shown == repr("b" * 60 + "...")
    results = iter([[1], [2]])  # correct at first, wrong from the cache
    assert first_difference(lambda text: next(results), lambda text: [1], texts) == "'a'"


@by_library
def test_texts_on_which_the_library_fails_are_encoded_by_the_reference(library: str) -> None:
    """A panic of Rust code is not a subclass of Exception."""
    fast = FastTokenizer(GPT2, library)
    fast._encode_flat = Mock(side_effect=BaseException)
    assert fast.encode_batch(CORPUS) == GPT2.encode_batch(CORPUS)


def test_a_library_that_always_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a version without the function that is called."""
    old = SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=lambda content: object()))
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setitem(sys.modules, "fastokens", old)
    choice = select_backend(GPT2, "auto")
    assert choice.tokenizer is GPT2
    assert codes([choice.reason or ""]) == ["fast-backend-fails"]
    assert "encode_batch_flat" in str(choice.reason)


@pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="needs gigatoken")
def test_the_words_that_gigatoken_keeps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts anew after a number of characters."""
    monkeypatch.setattr("megatron_ds.tokenizer.fast_backend.RENEWED_CHARS", 100)
    fast = FastTokenizer(GPT2, "gigatoken")
    models = []
    for _ in range(4):
        assert fast.encode_batch(["hello " * 10]) == GPT2.encode_batch(["hello " * 10])
        models.append(fast._encode_flat.model)
    assert [one is other for one, other in pairwise(models)] == [True, False, True]
