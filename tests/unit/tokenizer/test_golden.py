"""The bytes of the token files that each kind of tokenizer makes of one small corpus are frozen.

The corpus has many scripts, odd spaces, control characters, emoji, and texts that look like special
tokens. `python tests/unit/tokenizer/test_golden.py` rewrites the token files.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import TOKENIZERS, TokenizerConfig
from megatron_ds.data.indexed import IndexedDataset
from megatron_ds.data.made_by import read_made_by
from megatron_ds.data.preprocess import PreprocessOptions, preprocess
from megatron_ds.data.sources import Inputs
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
SUFFIXES = (".bin", ".idx", ".tokenizer.json")
SIZES = {
    "GPT2BPETokenizer": (360, 359),
    "BertWordPieceLowerCase": (424, 421),
    "BertWordPieceCase": (422, 421),
    "SentencePieceTokenizer": (567, 562),
    "GPTSentencePieceTokenizer": (560, 2),
    "Llama2Tokenizer": (560, 2),
    "HFTokenizer": (360, 359),
    "TikTokenizer": (326, 2),
    "NullTokenizer": (65536, 65535),
}
"""Number of ids and end of document."""


def tokenizer_of(kind: str) -> Tokenizer:
    fields = {
        name: str(FOLDER / value) if name.endswith(("_file", "_model")) else value
        for name, value in FILES[kind].items()
    }
    size = 65535 if kind == "NullTokenizer" else None
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **fields), size)


def texts() -> list[str]:
    with open(FOLDER / "corpus.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def make(kind: str, prefix: Path) -> None:
    """The token files of the corpus; for the kind that reads numbers, of the characters."""
    path = FOLDER / "corpus.jsonl"
    if kind == "NullTokenizer":
        path = prefix.with_name("numbers.jsonl")
        lines = [json.dumps({"text": " ".join(str(ord(c) % 65535) for c in t)}) for t in texts()]
        path.write_text("\n".join(lines))
    options = PreprocessOptions(
        inputs=Inputs(paths=(str(path),)), output_prefix=str(prefix), append_eod=True
    )
    preprocess(options, tokenizer_of(kind))


def test_every_kind_has_its_golden_files() -> None:
    assert FILES.keys() == SIZES.keys() == TOKENIZERS.keys()


@pytest.mark.parametrize("kind", FILES)
def test_token_files_are_the_golden_ones(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / kind)
    for suffix in SUFFIXES:
        made = (tmp_path / f"{kind}_text_document{suffix}").read_bytes()
        assert made == (FOLDER / f"{kind}{suffix}").read_bytes(), suffix


@pytest.mark.parametrize("kind", FILES)
def test_golden_files_hold_what_the_kind_says(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    data = IndexedDataset(FOLDER / kind)
    made_by = read_made_by(str(FOLDER / kind))
    assert (tokenizer.vocab_size, tokenizer.eod) == SIZES[kind]
    assert made_by is not None
    assert made_by.same_as(tokenizer.identity)
    assert (made_by.vocab_size, made_by.eod) == SIZES[kind]
    assert len(data) == len(texts())
    assert all(data.get(number)[-1] == tokenizer.eod for number in range(len(data)))
    if kind != "NullTokenizer":
        for number, text in enumerate(texts()):
            assert data.get(number)[:-1].tolist() == tokenizer.encode(text)


GPT2, NULL = tokenizer_of("GPT2BPETokenizer"), tokenizer_of("NullTokenizer")


@given(text=st.text(max_size=60), ids=st.lists(st.integers(0, 65534), max_size=20))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_texts_and_numbers_come_back(text: str, ids: list[int]) -> None:
    """Of the kinds that lose nothing; those of SentencePiece and tiktoken have tests of their own,
    and BERT's lose spaces."""
    assert GPT2.decode(GPT2.encode(text)) == text
    assert GPT2.eod not in GPT2.encode(text)
    assert NULL.encode(NULL.decode(ids)) == ids


if __name__ == "__main__":
    for each in FILES:
        with tempfile.TemporaryDirectory() as folder:
            make(each, Path(folder) / each)
            for end in SUFFIXES:
                made = Path(folder) / f"{each}_text_document{end}"
                (FOLDER / f"{each}{end}").write_bytes(made.read_bytes())
    print(os.listdir(FOLDER))
