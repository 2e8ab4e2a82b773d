"""TikTokenizer: Megatron-LM's file and tiktoken's, special ids first, </s> ends documents."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import TokenizerConfig
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.tiktoken_tokenizer import PATTERNS
from tests.unit.tokenizer.test_golden import FOLDER, texts

ITEMS = json.loads((FOLDER / "tiktoken.json").read_text())
TOKENS = [base64.b64decode(item["token_bytes"]) for item in ITEMS]


def build(path: Path = FOLDER / "tiktoken.json", size: int | None = None, **more: Any) -> Tokenizer:
    fields = {"tiktoken_pattern": "v2", "tiktoken_num_special_tokens": 10, **more}
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(path), **fields), size
    )


V1, V2 = build(tiktoken_pattern="v1"), build()


def reference(text: str, pattern: str, tokens: list[bytes], special: int) -> list[int]:
    """Words by the pattern; in each, the neighbours that make the token of least rank merge."""
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
def test_any_text_comes_back_and_has_the_ids_of_the_definition(text: str) -> None:
    for tokenizer, pattern in ((V1, "v1"), (V2, "v2")):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == reference(text, pattern, TOKENS, 10)


def test_corpus() -> None:
    encoded = V2.encode_batch(texts())
    assert encoded == [reference(text, "v2", TOKENS, 10) for text in texts()]
    assert min(number for ids in encoded for number in ids) >= 10
    again = pickle.loads(pickle.dumps(V2))
    assert again.encode_batch(texts()) == encoded


def test_special_tokens() -> None:
    assert (V2.eod, V2.vocab_size) == (2, 10 + len(TOKENS))
    assert V2.decode([0, 1, 2, 3, 9]) == "<unk><s></s><SPECIAL_3><SPECIAL_9>"
    named = build(tiktoken_special_tokens=("<s>", "<x>", "</s>", "<unk>"))
    assert named.eod == 2
    assert named.decode([1, 4]) == "<x><SPECIAL_4>"
    assert named.encode("</s>") == V2.encode("</s>")
    assert 2 not in named.encode("</s>")
    assert not named.identity.same_as(V2.identity)
    assert named.fingerprint != V2.fingerprint


def test_the_vocabulary_is_cut_to_its_size() -> None:
    cut = build(size=270)
    assert cut.vocab_size == 270
    assert cut.encode("the") == reference("the", "v2", TOKENS[:260], 10)
    assert cut.identity.vocab_size == 270
    with pytest.raises(ValueError, match=f"from 266 to {10 + len(TOKENS)} ids can be had"):
        build(size=10_000)
    with pytest.raises(ValueError, match="from 266"):
        build(size=200)


def test_tiktokens_own_files(tmp_path: Path) -> None:
    path = tmp_path / "a.tiktoken"
    path.write_text("".join(f"{item['token_bytes']} {item['rank']}\n" for item in ITEMS))
    assert build(path).encode_batch(texts()) == V2.encode_batch(texts())


def test_the_patterns_are_megatrons() -> None:
    assert PATTERNS["v1"] == (
        r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    assert PATTERNS["v2"] == (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def test_the_patterns_differ_inside_words(tmp_path: Path) -> None:
    path = tmp_path / "a.tiktoken"
    tokens = [*(bytes([byte]) for byte in range(256)), b"aB", b"//"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    assert build(path, tiktoken_pattern="v1").encode("aB//") == [266, 267]
    assert build(path, tiktoken_pattern="v2").encode("aB//") == [10 + 97, 10 + 66, 267]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "first 256 tokens are not the 256 bytes"),
        ("[", "neither a JSON list"),
        ('[{"rank": 0}]', "neither a JSON list"),
        ('[{"rank": true, "token_bytes": "YQ=="}]', "the ranks 0 to 0, each once"),
        ('[{"rank": 1, "token_bytes": "YQ=="}]', "the ranks 0 to 0, each once"),
        ('[{"rank": 0, "token_bytes": "!"}]', "neither a JSON list"),
        ("YQ== x\n", "neither a JSON list"),
        ("YQ== 0\nYQ== 1\n", "2 tokens need the ranks 0 to 1, each once"),
        ("YQ== 0\n", "first 256 tokens are not the 256 bytes"),
        ("[" * 100_000, "neither a JSON list"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError) as raised:
        build(tmp_path / "t.json")
    assert f"--tokenizer-model {tmp_path / 't.json'}: " in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tiktoken_pattern": None}, "--tokenizer-type TikTokenizer needs --tiktoken-pattern"),
        ({"tiktoken_num_special_tokens": 2}, "--tiktoken-num-special-tokens 2: must be at least 3"),
        ({"tiktoken_special_tokens": ("<s>", "</s>")}, "must hold <unk>, <s> and </s>"),
        ({"tiktoken_special_tokens": ("<s>", "</s>", "<unk>", "<s>")}, "a token is given twice"),
    ],
)
def test_wrong_flags(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        build(**fields)
    assert message in str(raised.value)


def test_a_text_that_tiktoken_panics_at_is_an_error() -> None:
    for tokenizer in (V1, V2):
        with pytest.raises(ValueError, match="TikTokenizer"):
            tokenizer.encode(" " * 1_000_000)
        assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
