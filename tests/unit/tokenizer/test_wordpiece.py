"""WordPiece equals its published definition on any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.tokenizer.wordpiece import Splitter, WordPieceTokenizer, read_vocab
from tests.problems import raises_problem
from tests.proofs.cases import with_proofs
from tests.unit.tokenizer.references import bert_words, word_pieces
from tests.unit.tokenizer.test_golden import FOLDER, texts

SPLITTERS = {lower: Splitter(lower) for lower in (True, False)}
NEEDED = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write(folder: Path, tokens: list[str]) -> str:
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return str(folder / "vocab.txt")


def reference(text: str, lower: bool, vocab: dict[str, int]) -> list[int]:
    return [number for word in bert_words(text, lower) for number in word_pieces(word, vocab)]


@pytest.mark.parametrize("lower", [True, False])
@given(text=st.text(max_size=60))
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_words_equal_the_definition(lower: bool, text: str) -> None:
    assert SPLITTERS[lower](text).split() == bert_words(text, lower)


@pytest.mark.parametrize("lower", with_proofs([True, False], [False]))
def test_every_character_is_split_as_defined(lower: bool) -> None:
    """Inside a word, in all planes that have characters.

    Claim (tokenizers): BERT's WordPiece in lower case follows the published definition for every
    character, in the proofs the cased one, too
    """
    for first in (0, 0x1F000, 0x20000, 0x2A600, 0x2F000, 0xE0000):
        size = 0x3000 if first else 0x10000
        for code in range(first, first + size):
            if not 0xD800 <= code <= 0xDFFF:
                text = f"Σ{chr(code)}b"
                if SPLITTERS[lower](text).split() != bert_words(text, lower):
                    pytest.fail(f"U+{code:04X}")


def test_ids_equal_the_definition() -> None:
    for lower in (True, False):
        tokenizer = WordPieceTokenizer(str(FOLDER / "vocab.txt"), lower_case=lower)
        vocab = read_vocab(str(FOLDER / "vocab.txt"))
        for text in texts():
            assert tokenizer.encode(text) == reference(text, lower, vocab)


def test_special_tokens_have_ids_but_texts_cannot_contain_them(tmp_path: Path) -> None:
    path = write(tmp_path, [*NEEDED, "a", "##b", "[BOS]"])
    tokenizer = WordPieceTokenizer(path, lower_case=True, extra_ids=2)
    assert tokenizer.decode(range(5)) == " ".join(NEEDED)
    assert (tokenizer.decode([7]), tokenizer.eod, tokenizer.vocab_size) == ("[BOS]", 8, 11)
    assert tokenizer.encode("AB Á [MASK]")[:3] == [5, 6, 5]
    assert 4 not in tokenizer.encode("[MASK]")
    assert tokenizer.decode([2, 5, 6, 5, 8, 9]) == "[CLS] ab a [EOS] <extra_id_0>"


def test_only_the_lower_case_kind_removes_case_and_accents(tmp_path: Path) -> None:
    path = write(tmp_path, [*NEEDED, "a", "A", "é"])
    assert WordPieceTokenizer(path, lower_case=False).encode("A a é") == [6, 5, 7]
    assert WordPieceTokenizer(path, lower_case=True).encode("A a é") == [5, 5, 1]


def test_words_of_more_than_200_characters_are_unknown(tmp_path: Path) -> None:
    tokenizer = WordPieceTokenizer(write(tmp_path, [*NEEDED, "a", "##a"]), lower_case=True)
    assert (tokenizer.encode("a" * 200), tokenizer.encode("a" * 201)) == ([5, *[6] * 199], [1])


@pytest.mark.parametrize(
    ("content", "code", "shown"),
    [
        (b"", "wordpiece-special-tokens-missing", "[UNK], [CLS], [SEP], [PAD], [MASK]"),
        ("\n".join(NEEDED[:-1]).encode(), "wordpiece-special-tokens-missing", " [MASK]"),
        ("\n".join([*NEEDED, "a", "b", "a"]).encode(), "vocabulary-token-repeated", "txt:8: 'a'"),
        (b"\xff\xfe", "tokenizer-file-not-utf8", "vocab.txt"),
    ],
)
def test_damaged_vocabularies_are_rejected(
    tmp_path: Path, content: bytes, code: str, shown: str
) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with raises_problem(code, "vocab_file", contains=shown) as raised:
        WordPieceTokenizer(str(path), lower_case=False)
    assert str(path) in str(raised.problem)


def test_published_vocabulary(shared_data: Path) -> None:
    path = str(shared_data / "bert-base-uncased-vocab.txt")
    tokenizer = WordPieceTokenizer(path, lower_case=True)
    assert (tokenizer.vocab_size, tokenizer.eod) == (30524, 30523)
    assert tokenizer.decode([0, 101, 102, 103, 30522]) == "[PAD] [CLS] [SEP] [MASK] [BOS]"
    assert tokenizer.encode("Hello, world!") == [7592, 1010, 2088, 999]
    vocab = read_vocab(path)
    with open(shared_data / "openwebtext-1000.jsonl") as file:
        sample = [json.loads(line)["text"] for _, line in zip(range(40), file, strict=False)]
    for text, ids in zip(sample, tokenizer.encode_batch(sample), strict=True):
        assert ids == reference(text, True, vocab)
