"""Megatron's three kinds of SentencePiece tokenizers, with models trained by the test."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.tokenizer.sentencepiece import (
    SentencePieceTokenizer,
    SentencePieceWithSpecialTokens,
)
from tests.problems import raises_problem
from tests.unit.tokenizer.references import sentencepiece_with_special_tokens
from tests.unit.tokenizer.test_golden import FOLDER, build, texts

GOLDEN = str(FOLDER / "tokenizer.model")
PLAIN = SentencePieceTokenizer(GOLDEN, name="GPTSentencePieceTokenizer")
SPECIAL = SentencePieceWithSpecialTokens(GOLDEN, extra_ids=12)
MODEL = sentencepiece.SentencePieceProcessor(model_file=GOLDEN)
FRAGMENTS = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<s>", "</s>", "<extra_id_1>"]
FRAGMENTS += ["<extra_id_10>", "<unk>", "<EO", "D>", " ", "\n"]


def trained(path: Path, **options: Any) -> str:
    written = io.BytesIO()
    lines = [line for text in texts() for line in text.split("\n") if line.isascii()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3), model_writer=written, minloglevel=2, **options
    )
    path.write_bytes(written.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BPE model with its own padding and special tokens, and the default normalization."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    special = {"pad_id": 3, "control_symbols": ["<EOD>"], "user_defined_symbols": ["<CLS>"]}
    shape = {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True}
    return trained(folder / "bpe.model", **shape, **special)


@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_any_text_is_recovered(text: str) -> None:
    ids = PLAIN.encode(text)
    assert (PLAIN.decode(ids), ids) == (text, MODEL.encode_as_ids(text))


@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=8))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_special_tokens_in_texts_are_encoded_as_in_megatron(parts: list[str]) -> None:
    """Claim (tokenizers): SentencePiece models get Megatron's special tokens"""
    text = "".join(parts)
    ids = SPECIAL.encode(text)
    assert ids == sentencepiece_with_special_tokens(MODEL, text, 12)
    assert SPECIAL.encode_batch(["a", text, "b"]) == [SPECIAL.encode("a"), ids, SPECIAL.encode("b")]


def test_special_tokens_of_the_model_keep_their_ids(bpe: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=bpe)
    tokenizer = SentencePieceWithSpecialTokens(bpe, extra_ids=3)
    size = model.get_piece_size()
    own = [model.piece_to_id("<CLS>"), model.piece_to_id("<EOD>"), 3, 1, 2]
    assert tokenizer.encode("<CLS><EOD><pad><s></s>") == own
    assert (tokenizer.encode("<SEP><MASK>"), tokenizer.eod) == ([size, size + 1], own[1])
    assert tokenizer.vocab_size == size + 5
    for text in [*texts(), "a<EOD>b<CLS><pad> <extra_id_2>"]:
        assert tokenizer.encode(text) == sentencepiece_with_special_tokens(model, text, 3)


def test_of_two_special_tokens_at_one_position_the_first_is_taken(tmp_path: Path) -> None:
    """As in Megatron, which tries padding, begin and end in this order."""
    pieces = {"bos_piece": "<x", "eos_piece": "<xy"}
    path = trained(tmp_path / "m", model_type="bpe", vocab_size=150, **pieces)
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    for text in ("<xy", "the <xy<x dog<xyz"):
        ids = SentencePieceWithSpecialTokens(path).encode(text)
        assert ids == sentencepiece_with_special_tokens(model, text, 0)
        assert 1 in ids
        assert 2 not in ids


def test_missing_special_tokens_follow_the_ids_of_the_model() -> None:
    size = MODEL.get_piece_size()
    tokenizer = SentencePieceWithSpecialTokens(GOLDEN)
    assert tokenizer.encode("<CLS><SEP><EOD><MASK><PAD>") == list(range(size, size + 5))
    assert (tokenizer.encode("<s></s>"), tokenizer.vocab_size) == ([1, 2], size + 5)
    ids = tokenizer.encode("the dog<EOD>the fox")
    assert (ids.count(tokenizer.eod), tokenizer.decode(ids)) == (1, "the dog <EOD> the fox")


def test_only_llama_starts_texts_with_bos(bpe: str) -> None:
    kinds = ("Llama2Tokenizer", "GPTSentencePieceTokenizer")
    llama, gpt = (build(kind, tokenizer_model=bpe) for kind in kinds)
    model = sentencepiece.SentencePieceProcessor(model_file=bpe)
    for text in ("", "the dog", "<s></s><EOD>"):
        assert gpt.encode(text) == model.encode(text)
        assert llama.encode(text) == [1, *model.encode(text)]
    assert llama.encode_batch(["the", "dog"]) == [llama.encode("the"), llama.encode("dog")]
    assert (llama.eod, gpt.eod, llama.vocab_size) == (2, 2, model.get_piece_size())
    assert llama.decode([*llama.encode("the dog"), 2]) == "the dog"
    assert not llama.fingerprint.same_as(gpt.fingerprint)


@pytest.mark.parametrize(
    "kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
)
def test_damaged_models_are_rejected(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for content in (b"", b"{}", Path(GOLDEN).read_bytes()[:100], b"\xff" * 99):
        path.write_bytes(content)
        with raises_problem("sentencepiece-model-invalid", contains=str(path)):
            build(kind, tokenizer_model=str(path))


def test_models_need_their_control_tokens(tmp_path: Path) -> None:
    options = {"model_type": "bpe", "vocab_size": 150}
    without_eos = trained(tmp_path / "1.model", eos_id=-1, **options)
    without_bos = trained(tmp_path / "2.model", bos_id=-1, **options)
    for kind, path, name in (
        ("GPTSentencePieceTokenizer", without_eos, "eos_id"),
        ("Llama2Tokenizer", without_eos, "eos_id"),
        ("Llama2Tokenizer", without_bos, "bos_id"),
    ):
        with raises_problem("sentencepiece-control-token-missing", contains=name):
            build(kind, tokenizer_model=str(path))
    assert "<EOS>" not in [MODEL.id_to_piece(n) for n in range(MODEL.get_piece_size())]
    assert build("SentencePieceTokenizer", tokenizer_model=without_eos).vocab_size == 150 + 4 + 2


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with raises_problem("library-missing", contains="pip install sentencepiece"):
        build("Llama2Tokenizer", tokenizer_model=str(GOLDEN))
