"""SentencePiece models, trained by the test, in Megatron's three kinds."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import TokenizerConfig
from megatron_ds.tokenizer import Tokenizer, base, build_tokenizer
from megatron_ds.tokenizer.sentencepiece import (
    SentencePieceTokenizer,
    SentencePieceWithSpecialTokens,
)
from tests.unit.tokenizer.references import marked_sentencepiece
from tests.unit.tokenizer.test_golden import FOLDER, texts

GOLDEN = str(FOLDER / "tokenizer.model")
PLAIN = SentencePieceTokenizer(GOLDEN, kind="GPTSentencePieceTokenizer")
MARKED = SentencePieceWithSpecialTokens(GOLDEN, extra_ids=12)
MODEL = sentencepiece.SentencePieceProcessor(model_file=GOLDEN)
MARKS = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<s>", "</s>", "<extra_id_1>"]
MARKS += ["<extra_id_10>", "<unk>", "<EO", "D>", " ", "\n"]


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
    """A BPE model with its own padding and marks, and the usual normalisation."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    return trained(
        folder / "bpe.model",
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        pad_id=3,
        control_symbols=["<EOD>"],
        user_defined_symbols=["<CLS>"],
    )


def build(kind: str, path: str | Path, **more: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path), **more))


@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_any_text_comes_back(text: str) -> None:
    ids = PLAIN.encode(text)
    assert PLAIN.decode(ids) == text
    assert ids == MODEL.encode_as_ids(text)


@given(parts=st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=8))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_marks_are_cut_out_as_megatron_does(parts: list[str]) -> None:
    text = "".join(parts)
    ids = MARKED.encode(text)
    assert ids == marked_sentencepiece(MODEL, text, 12)
    assert MARKED.encode_batch(["a", text, "b"]) == [MARKED.encode("a"), ids, MARKED.encode("b")]


def test_marks_of_the_model_keep_their_ids(bpe: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=bpe)
    tokenizer = SentencePieceWithSpecialTokens(bpe, extra_ids=3)
    size = model.get_piece_size()
    assert (tokenizer.cls, tokenizer.eod) == (
        model.piece_to_id("<CLS>"),
        model.piece_to_id("<EOD>"),
    )
    assert (tokenizer.sep, tokenizer.mask, tokenizer.vocab_size) == (size, size + 1, size + 5)
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (3, 1, 2)
    for text in [*texts(), "a<EOD>b<CLS><pad> <extra_id_2>"]:
        assert tokenizer.encode(text) == marked_sentencepiece(model, text, 3)


def test_of_two_marks_at_one_place_the_first_is_taken(tmp_path: Path) -> None:
    """As in Megatron, where <PAD>, the beginning and the end are tried in this order."""
    pieces = {"bos_piece": "<x", "eos_piece": "<xy"}
    path = trained(tmp_path / "m", model_type="bpe", vocab_size=150, **pieces)
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    for text in ("<xy", "the <xy<x dog<xyz"):
        ids = SentencePieceWithSpecialTokens(path).encode(text)
        assert ids == marked_sentencepiece(model, text, 0)
        assert 1 in ids
        assert 2 not in ids


def test_absent_marks_come_after_the_model() -> None:
    size = MODEL.get_piece_size()
    tokenizer = SentencePieceWithSpecialTokens(GOLDEN)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == tuple(
        range(size, size + 4)
    )
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (size + 4, 1, 2)
    assert tokenizer.vocab_size == size + 5
    ids = tokenizer.encode("the dog<EOD>the fox")
    assert ids.count(tokenizer.eod) == 1
    assert tokenizer.decode(ids) == "the dog <EOD> the fox"


def test_llama_begins_with_bos_and_gpt_does_not(bpe: str) -> None:
    llama, gpt = build("Llama2Tokenizer", bpe), build("GPTSentencePieceTokenizer", bpe)
    model = sentencepiece.SentencePieceProcessor(model_file=bpe)
    for text in ("", "the dog", "<s></s><EOD>"):
        assert gpt.encode(text) == model.encode(text)
        assert llama.encode(text) == [1, *model.encode(text)]
    assert llama.encode_batch(["the", "dog"]) == [llama.encode("the"), llama.encode("dog")]
    assert (llama.eod, gpt.eod, llama.vocab_size) == (2, 2, model.get_piece_size())
    assert llama.decode([*llama.encode("the dog"), 2]) == "the dog"
    assert llama.fingerprint != gpt.fingerprint
    assert not llama.identity.same_as(gpt.identity)


def test_tokenizers_can_be_sent_to_workers() -> None:
    for tokenizer in (PLAIN, MARKED):
        again = pickle.loads(pickle.dumps(tokenizer))
        for text in texts():
            assert again.encode(text) == tokenizer.encode(text)


def test_bad_models(tmp_path: Path) -> None:
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        with pytest.raises(ValueError, match="needs --tokenizer-model"):
            build_tokenizer(TokenizerConfig(tokenizer_type=kind))
        with pytest.raises(ValueError, match="nope: there is no such file"):
            build(kind, "nope")
        for number, content in enumerate(
            (b"", b"{}", Path(GOLDEN).read_bytes()[:100], b"\xff" * 99)
        ):
            path = tmp_path / f"{number}.model"
            path.write_bytes(content)
            with pytest.raises(ValueError, match="not a SentencePiece model"):
                build(kind, path)


def test_a_model_without_end_or_beginning(tmp_path: Path) -> None:
    usual = {"model_type": "bpe", "vocab_size": 150}
    endless = trained(tmp_path / "1.model", eos_id=-1, **usual)
    for kind in ("GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        with pytest.raises(ValueError, match="has no </s>"):
            build(kind, endless)
    assert "<EOS>" not in [MODEL.id_to_piece(n) for n in range(MODEL.get_piece_size())]
    assert build("SentencePieceTokenizer", endless).vocab_size == 150 + 4 + 2
    without_bos = trained(tmp_path / "2.model", bos_id=-1, **usual)
    with pytest.raises(ValueError, match="has no <s>"):
        build("Llama2Tokenizer", without_bos)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(base.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"needs the library sentencepiece.*pip install"):
        build("Llama2Tokenizer", GOLDEN)
