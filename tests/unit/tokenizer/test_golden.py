"""Golden token files: the bytes that each kind of tokenizer makes of a small corpus.

The corpus has many scripts, unusual spaces, control characters, emoji, and texts that resemble
special tokens. `python tests/unit/tokenizer/test_golden.py` rewrites the token files.
"""

from __future__ import annotations

import codecs
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config.options.tokenizer import TOKENIZERS, TokenizerConfig
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.sentence_splitter import RuleSplitter
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import preprocess
from megatron_ds.tokenizer import Tokenizer, build_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "tokenizers"
FILES: dict[str, dict[str, Any]] = {
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "BertWordPieceLowerCase": {"vocab_file": "vocab.txt", "vocab_extra_ids": 2},
    "BertWordPieceCase": {"vocab_file": "vocab.txt"},
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model", "vocab_extra_ids": 2},
    "GPTSentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "Llama2Tokenizer": {"tokenizer_model": "tokenizer.model"},
    "HFTokenizer": {"tokenizer_model": "tokenizer.json"},
    "TikTokenizer": {
        "tokenizer_model": "tiktoken.json",
        "tiktoken_pattern": "v2",
        "tiktoken_num_special_tokens": 10,
    },
    "NullTokenizer": {},
}
WITH_TEXT_FILES = (
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "HFTokenizer",
    "TikTokenizer",
)
SENTENCES = {"BertWordPieceLowerCase": False, "SentencePieceTokenizer": True}
"""Kinds that have sentence files too, and whether sentences keep the whitespace after them."""
SUFFIXES = (".bin", ".idx", ".tokenizer.json")


def build(kind: str, vocab_size: int | None = None, **fields: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **fields), vocab_size)


def tokenizer_of(kind: str, folder: Path = FOLDER) -> Tokenizer:
    fields = {
        name: str(folder / value) if name.endswith(("_file", "_model")) else value
        for name, value in FILES[kind].items()
    }
    return build(kind, 65535 if kind == "NullTokenizer" else None, **fields)


def texts() -> list[str]:
    with open(FOLDER / "corpus.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def make(kind: str, prefix: Path, splitter: RuleSplitter | None = None) -> Path:
    """Writes the token files of the corpus, for NullTokenizer those of its code points."""
    path = FOLDER / "corpus.jsonl"
    if kind == "NullTokenizer":
        path = prefix.with_name("numbers.jsonl")
        lines = [json.dumps({"text": " ".join(str(ord(c) % 65535) for c in t)}) for t in texts()]
        path.write_text("\n".join(lines))
    inputs = InputSpec(paths=(str(path),))
    options = PreprocessOptions(inputs, str(prefix), append_eod=True, splitter=splitter)
    preprocess(options, tokenizer_of(kind))
    return Path(options.prefix("text"))


def make_all(folder: Path) -> dict[str, Path]:
    """Writes all token files; returns their prefixes by golden name."""
    made = {kind: make(kind, folder / kind) for kind in FILES}
    for kind, keep_newlines in SENTENCES.items():
        splitter = RuleSplitter("english", keep_newlines)
        made[f"{kind}_sentence"] = make(kind, folder / kind, splitter)
    return made


def test_every_kind_has_golden_files() -> None:
    assert FILES.keys() == TOKENIZERS.keys()


def test_token_files_equal_the_golden_files(tmp_path: Path) -> None:
    """Claim (tokenizers): the token files of every kind of tokenizer are frozen as golden files"""
    for name, prefix in make_all(tmp_path).items():
        for suffix in SUFFIXES:
            made = Path(f"{prefix}{suffix}").read_bytes()
            assert made == (FOLDER / f"{name}{suffix}").read_bytes(), name + suffix


@pytest.mark.parametrize("kind", FILES)
def test_golden_files_have_the_ids_of_the_corpus(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    data = IndexedDataset(FOLDER / kind)
    assert len(data) == len(texts())
    assert all(data.get(number)[-1] == tokenizer.eod for number in range(len(data)))
    if kind != "NullTokenizer":
        ids = [data.get(number)[:-1].tolist() for number in range(len(data))]
        assert [tokenizer.encode(text) for text in texts()] == ids
        assert pickle.loads(pickle.dumps(tokenizer)).encode_batch(texts()) == ids


@pytest.mark.parametrize("kind", FILES)
def test_the_bytes_of_tokens_are_those_of_their_text(kind: str) -> None:
    """Claim (tokenizers): the bytes of a text's tokens, by which bits per byte are computed, are
    those of the text in UTF-8"""
    tokenizer = tokenizer_of(kind)
    sizes = tokenizer.token_bytes()
    if kind in ("BertWordPieceLowerCase", "BertWordPieceCase", "NullTokenizer"):
        assert sizes is None
        return
    assert sizes is not None
    assert (len(sizes), sizes[tokenizer.eod]) == (tokenizer.vocab_size, 0)
    is_piece = kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
    for text in texts():
        if "</s>" in text or (is_piece and "\u2581" in text):
            continue  # special tokens for some; SentencePiece decodes the sign as a space
        expected = len(text.encode()) + is_piece  # of the space before a text
        assert sum(sizes[token] for token in tokenizer.encode(text)) == expected


@pytest.mark.parametrize("kind", WITH_TEXT_FILES)
def test_byte_order_marks_are_no_part_of_a_file(kind: str, tmp_path: Path) -> None:
    names = {*FILES[kind].values()} & {*os.listdir(FOLDER)}
    for name in names:
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (FOLDER / name).read_bytes())
    marked = tokenizer_of(kind, tmp_path)
    plain = tokenizer_of(kind)
    assert marked.vocab_size == plain.vocab_size
    assert [marked.encode(text) for text in texts()] == [plain.encode(text) for text in texts()]


GPT2 = tokenizer_of("GPT2BPETokenizer")
NULL = tokenizer_of("NullTokenizer")


@given(text=st.text(max_size=60), ids=st.lists(st.integers(0, 65534), max_size=20))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_texts_and_ids_are_recovered(text: str, ids: list[int]) -> None:
    """SentencePiece and tiktoken have tests of their own; BERT's kinds lose spaces."""
    assert GPT2.decode(GPT2.encode(text)) == text
    assert GPT2.eod not in GPT2.encode(text)
    assert NULL.encode(NULL.decode(ids)) == ids


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for each, made in make_all(Path(folder)).items():
            for end in SUFFIXES:
                (FOLDER / f"{each}{end}").write_bytes(Path(f"{made}{end}").read_bytes())
    print(os.listdir(FOLDER))
