"""GPT-2, Hugging Face and Null tokenizers: ids, end of document, fingerprint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from megatron_ds.config import TokenizerConfig
from megatron_ds.config.problems import UserError
from megatron_ds.tokenizer import Tokenizer, build_tokenizer, gpt2
from megatron_ds.tokenizer.base import count_ids
from tests.problems import fields, raises_problem

END = "<|endoftext|>"


def gpt2_files(
    folder: Path, merges: tuple[str, ...] = ("h e", "he l"), end: int | None = None
) -> TokenizerConfig:
    """A vocabulary of bytes, merges and, with id `end` (by default the last one), the end token."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [merge.replace(" ", "") for merge in merges]
    words.insert(len(words) if end is None else end, END)
    vocab = {word: index for index, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return TokenizerConfig(vocab_file=f"{folder}/vocab.json", merge_file=f"{folder}/merges.txt")


def hf_file(folder: Path, end: str = "</s>") -> Path:
    library = Library(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", end])
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def hf(path: Path) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(path)))


def test_gpt2_ids(tmp_path: Path) -> None:
    """Claim (tokenizers): GPT-2's byte-level BPE gives GPT-2's ids"""
    tokenizer = build_tokenizer(gpt2_files(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
    assert tokenizer.encode("helhe") == [257, 256]
    assert tokenizer.encode_batch(["hel", "", "he"]) == [[257], [], [256]]
    assert tokenizer.decode([257, tokenizer.eod]) == f"hel{END}"


@pytest.mark.parametrize("end", [0, 100])
def test_gpt2_end_of_document_has_any_id(end: int, tmp_path: Path) -> None:
    """Trainers of vocabularies put special tokens first, GPT-2's has it last."""
    tokenizer = build_tokenizer(gpt2_files(tmp_path, end=end))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.fingerprint.eod) == (259, end, end)
    assert tokenizer.encode("helhe") == [258, 257]
    assert tokenizer.decode([258, end]) == f"hel{END}"


@given(st.text("hel \n\t\u00a0\x1c\u3000's1é\0", max_size=60))
def test_gpt2_pieces_of_a_long_text_keep_its_ids(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    merges = ("h e", "he l", "Ġ h", "Ġ Ġ", "Ġ he", "Ċ Ċ", "' s")
    tokenizer = build_tokenizer(gpt2_files(tmp_path_factory.mktemp("gpt2"), merges))
    expected = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2, "LONG_TEXT", 3)
        assert ("".join(gpt2._pieces(text)), tokenizer.encode(text)) == (text, expected)
        assert tokenizer.encode_batch(["h", text]) == [tokenizer.encode("h"), expected]
        assert list(gpt2._pieces("hello  hello hel he")) == ["hello  hello", " hel", " he"]


def test_gpt2_published_vocabulary(shared_data: Path) -> None:
    files = [str(shared_data / f"gpt2-{name}") for name in ("vocab.json", "merges.txt")]
    tokenizer = build_tokenizer(TokenizerConfig(vocab_file=files[0], merge_file=files[1]))
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    # Ids of the original GPT-2 code for this text.
    assert tokenizer.encode(END) == [27, 91, 437, 1659, 5239, 91, 29]


def test_gpt2_fingerprint_depends_on_both_files(tmp_path: Path) -> None:
    digests = []
    for merges in (("h e", "he l"), ("h e",), ("h e", "e l"), ("h e", "he l")):
        config = gpt2_files(tmp_path, merges)
        digests.append(build_tokenizer(config).fingerprint.digest)
    assert (len({*digests[:3]}), digests[3]) == (3, digests[0])


def test_swapped_gpt2_files_are_recognized(tmp_path: Path) -> None:
    files = gpt2_files(tmp_path)
    swapped = TokenizerConfig(vocab_file=files.merge_file, merge_file=files.vocab_file)
    with raises_problem("vocabulary-and-merges-swapped", "vocab_file", "merge_file"):
        build_tokenizer(swapped)


def test_all_missing_options_are_reported_at_once() -> None:
    with pytest.raises(UserError) as raised:
        build_tokenizer(TokenizerConfig())
    assert [names[0] for names in fields(raised.value.problems)] == ["vocab_file", "merge_file"]
    with raises_problem("tokenizer-option-required", contains="NullTokenizer"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"))


def test_null_tokenizer_reads_ids() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"), 10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert (tokenizer.encode(" 3  9 0\n"), tokenizer.decode([3, 9])) == ([3, 9, 0], "3 9")
    for text, code in (("10", "text-id-out-of-range"), ("-1", "text-not-token-ids")):
        with raises_problem(code, contains=text):
            tokenizer.encode(text)
    other = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"), 11)
    assert not other.fingerprint.same_as(tokenizer.fingerprint)


def test_number_of_ids_includes_unused_ones() -> None:
    assert count_ids({"a": 7, "b": 0}, "vocab_file", "file") == 8


def test_hf_reads_a_file_or_its_folder(tmp_path: Path) -> None:
    path = hf_file(tmp_path)
    for tokenizer in (hf(path), hf(tmp_path)):
        assert (tokenizer.vocab_size, tokenizer.eod) == (5, 4)
        assert tokenizer.encode("a b </s> a") == [0, 1, 4, 0]
        assert tokenizer.encode_batch(["a", "b b"]) == [[0], [1, 1]]
        assert tokenizer.decode([0, 4]) == "a </s>"


def test_hf_reads_the_end_token_from_tokenizer_config(tmp_path: Path) -> None:
    path = hf_file(tmp_path, end="the-end")
    with raises_problem("end-token-unknown", "tokenizer_model"):
        hf(path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "the-end"}}')
    assert hf(path).eod == 4
    before = hf(path).fingerprint
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert hf(path).eod == 3
    assert not hf(path).fingerprint.same_as(before)
