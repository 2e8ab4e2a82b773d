"""A SentencePiece model in a folder of Hugging Face, read by its type."""

from __future__ import annotations

import base64
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron_ds.tokenizer.fast_backend import EDGES
from megatron_ds.tokenizer.huggingface import build_hf_tokenizer
from tests.problems import codes, raises_problem
from tests.unit.tokenizer.test_sentencepiece import trained

UNIGRAM = {"model_type": "unigram", "vocab_size": 120, "hard_vocab_limit": False}
BPE = {"model_type": "bpe", "vocab_size": 150, "normalization_rule_name": "identity"}


def folder_of(path: Path, training: dict[str, Any], settings: dict[str, Any] | None) -> Path:
    path.mkdir()
    trained(path / "tokenizer.model", **training)
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("training", [UNIGRAM, BPE], ids=["unigram", "bpe"])
@pytest.mark.parametrize("named", ["LlamaTokenizer", "T5Tokenizer", None])
def test_ids_are_those_of_sentencepiece_whatever_class_is_named(
    training: dict[str, Any], named: str | None, tmp_path: Path
) -> None:
    settings = None if named is None else {"tokenizer_class": named, "add_bos_token": True}
    folder = folder_of(tmp_path / "theirs", training, settings)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours = build_hf_tokenizer(str(folder), trust_remote_code=False)
    expected = [] if named is None else ["tokenizer-model-read-by-type"]
    assert codes([one.message.args[0] for one in warned]) == expected
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    names = ("<s>", "</s>", "<unk>")
    for text in (text for text in EDGES if not any(name in text for name in names)):
        assert ours.encode(text) == model.encode(text)
    assert (ours.eod, ours.bos, ours.vocab_size) == (2, 1, model.get_piece_size())
    assert ours.adds_bos == (named is not None)
    assert ours.encode("</s>") == [2]  # as in the other tokenizers of Hugging Face


def test_added_tokens_follow_the_pieces(tmp_path: Path) -> None:
    added = {"150": {"content": "<|im_start|>", "special": True}, "1": {"content": "<s>"}}
    folder = folder_of(tmp_path / "theirs", BPE, {"added_tokens_decoder": added})
    ours = build_hf_tokenizer(str(folder), trust_remote_code=False)
    assert (ours.encode("<|im_start|>"), ours.vocab_size) == ([150], 151)
    (folder / "added_tokens.json").write_text(json.dumps({"<|x|>": 170}))
    with raises_problem("added-token-of-other-id", contains="170"):
        build_hf_tokenizer(str(folder), trust_remote_code=False)


def test_a_file_of_tiktoken_is_named(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    with raises_problem("tokenizer-model-of-tiktoken", contains="tokenizer.model"):
        build_hf_tokenizer(str(tmp_path), trust_remote_code=False)
