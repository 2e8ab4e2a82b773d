"""TikTokenizer: Megatron-LM's and tiktoken's files, special ids first, </s> ends documents."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.tokenizer import Tokenizer
from megatron_ds.tokenizer.tiktoken_tokenizer import PATTERNS
from tests.problems import codes, raises_problem
from tests.tables import tables
from tests.unit.tokenizer import test_golden
from tests.unit.tokenizer.test_golden import FOLDER, texts

TABLES = tables(__file__)

ITEMS = json.loads((FOLDER / "tiktoken.json").read_text())
TOKENS = [base64.b64decode(item["token_bytes"]) for item in ITEMS]


def build(path: Path = FOLDER / "tiktoken.json", size: int | None = None, **more: Any) -> Tokenizer:
    fields = {"tiktoken_pattern": "v2", "tiktoken_num_special_tokens": 10, **more}
    return test_golden.build("TikTokenizer", size, tokenizer_model=str(path), **fields)


V1 = build(tiktoken_pattern="v1")
V2 = build()


def reference(text: str, pattern: str, tokens: list[bytes], special: int) -> list[int]:
    """Splits by the pattern and merges, in each word, the pair of lowest rank first."""
    ids = []
    for word in regex.findall(PATTERNS[pattern], text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            known = [(tokens.index(pair), at) for at, pair in enumerate(pairs) if pair in tokens]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [special + tokens.index(part) for part in parts]
    return ids


@given(text=st.text(max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_any_text_has_the_reference_ids_and_is_recovered(text: str) -> None:
    for tokenizer, pattern in ((V1, "v1"), (V2, "v2")):
        ids = tokenizer.encode(text)
        assert (tokenizer.decode(ids), ids) == (text, reference(text, pattern, TOKENS, 10))


def test_the_corpus_has_the_reference_ids() -> None:
    encoded = V2.encode_batch(texts())
    assert encoded == [reference(text, "v2", TOKENS, 10) for text in texts()]
    assert min(number for ids in encoded for number in ids) >= 10


def test_special_tokens_have_the_first_ids() -> None:
    assert (V2.eod, V2.vocab_size) == (2, 10 + len(TOKENS))
    assert V2.decode([0, 1, 2, 3, 9]) == "<unk><s></s><SPECIAL_3><SPECIAL_9>"
    named = build(tiktoken_special_tokens=("<s>", "<x>", "</s>", "<unk>"))
    assert (named.eod, named.decode([1, 4])) == (2, "<x><SPECIAL_4>")
    assert named.encode("</s>") == V2.encode("</s>")
    assert 2 not in named.encode("</s>")
    assert not named.fingerprint.same_as(V2.fingerprint)


def test_the_vocabulary_is_truncated_to_its_size() -> None:
    truncated = build(size=270)
    assert truncated.vocab_size == truncated.fingerprint.vocab_size == 270
    assert truncated.encode("the") == reference("the", "v2", TOKENS[:260], 10)
    for size in (200, 10_000):
        with raises_problem("vocab-size-not-available", contains=f"{10 + len(TOKENS)}"):
            build(size=size)


def tekken(path: Path, **changes: Any) -> Path:
    """A file as Mistral publishes it, with more tokens than it uses."""
    names = ["<unk>", "<s>", "</s>", "[INST]", "<pad>"]
    config = {
        "pattern": PATTERNS["v2"],
        "num_vocab_tokens": len(ITEMS),
        "default_vocab_size": 300,
        "default_num_special_tokens": 10,
        "version": "v7",
    }
    special = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
    ]
    content = {"config": config | changes, "vocab": ITEMS, "special_tokens": special}
    path.write_text(json.dumps(content))
    return path


def test_files_of_mistral_are_read(tmp_path: Path) -> None:
    """The ids of mistral-common: special tokens first, then as many tokens as the file uses."""
    read = build(tekken(tmp_path / "tekken.json"))
    expected = [reference(text, "v2", TOKENS[:290], 10) for text in texts()]
    assert read.encode_batch(texts()) == expected
    assert (read.vocab_size, read.eod, read.token_id("[INST]")) == (300, 2, 3)
    assert read.token_id("<SPECIAL_5>") == 5
    names = ["<unk>", "<s>", "</s>"]
    for options, field in (
        ({"tiktoken_pattern": "v1"}, "tiktoken_pattern"),
        ({"tiktoken_num_special_tokens": 1000}, "tiktoken_num_special_tokens"),
        ({"tiktoken_special_tokens": names}, "tiktoken_special_tokens"),
    ):
        with raises_problem("tekken-option-differs", field):
            build(tmp_path / "tekken.json", **options)
    with raises_problem("tekken-pattern-unknown", contains="abc"):
        build(tekken(tmp_path / "other.json", pattern="abc"))
    for content in ("{}", '{"config": {}, "vocab": []}'):
        (tmp_path / "other.json").write_text(content)
        with raises_problem("tiktoken-file-invalid", contains="other.json"):
            build(tmp_path / "other.json")


def test_files_of_tiktoken_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tiktoken"
    path.write_text("".join(f"{item['token_bytes']} {item['rank']}\n" for item in ITEMS))
    with pytest.warns(
        UserWarning, match="HFTokenizer"
    ) as warned:  # the ids are not those of a model such as Llama 3
        read = build(path)
    assert codes([one.message.args[0] for one in warned]) == ["tiktoken-ids-differ"]
    assert read.encode_batch(texts()) == V2.encode_batch(texts())


def test_the_patterns_differ_inside_words(tmp_path: Path) -> None:
    path = tmp_path / "a.tiktoken"
    tokens = [*(bytes([byte]) for byte in range(256)), b"aB", b"//"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    assert build(path, tiktoken_pattern="v1").encode("aB//") == [266, 267]
    assert build(path, tiktoken_pattern="v2").encode("aB//") == [10 + 97, 10 + 66, 267]


INVALID_FILES = TABLES["invalid_files"]


@pytest.mark.parametrize("code", INVALID_FILES)
def test_damaged_files_are_rejected(tmp_path: Path, code: str) -> None:
    path = tmp_path / "t.json"
    for content in INVALID_FILES[code]:
        path.write_text(content)
        with raises_problem(code, "tokenizer_model", contains=str(path)):
            build(path)


def test_a_panic_of_tiktoken_is_an_error() -> None:
    for tokenizer in (V1, V2):
        with raises_problem("text-not-encodable"):
            tokenizer.encode(" " * 1_000_000)
        assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
