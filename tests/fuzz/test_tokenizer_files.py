"""Broken tokenizer files: refused with flag and file, whatever the libraries make of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from megatron_ds.config import TokenizerConfig
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.null import NullTokenizer
from tests.fuzz.fuzz_helpers import FUZZ, JSON, MISSING, paths_in, read_or_refuse, replaced

END = "<|endoftext|>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB: dict[str, Any] = {token: number for number, token in enumerate([*BYTES, "he", "hel", END])}
MERGES = "#version: 0.2\nh e\nhe l\n"
FILE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 3,
            "content": "</s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def gpt2(folder: Path, vocab: str | bytes | None = None, merges: str | bytes = MERGES) -> Tokenizer:
    vocab = json.dumps(VOCAB) if vocab is None else vocab
    for name, content in (("vocab.json", vocab), ("merges.txt", merges)):
        content = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(content)
    return build_tokenizer(
        TokenizerConfig(
            vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
    )


def hf(folder: Path, **files: str | bytes) -> Tokenizer:
    """The tokenizer of a folder that holds these files (`__` for a dot) and nothing else."""
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        content = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(content)
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
    )


def vocab(**changes: Any) -> str:
    return json.dumps({**VOCAB, **changes})


GPT2: dict[str, tuple[dict[str, str | bytes], str]] = {
    "empty vocabulary file": ({"vocab": ""}, "vocab.json: not JSON"),
    "no JSON": ({"vocab": "a 0\nb 1\n"}, "vocab.json: not JSON"),
    "cut": ({"vocab": json.dumps(VOCAB)[:-100]}, "vocab.json: not JSON"),
    "no UTF-8": ({"vocab": b'{"\xff": 0}'}, "vocab.json: not JSON"),
    "NUL bytes": ({"vocab": b"\0" * 64}, "vocab.json: not JSON"),
    "nested deeply": ({"vocab": "[" * 100_000}, "vocab.json: is nested too deeply"),
    "a list": ({"vocab": json.dumps(list(VOCAB))}, "vocab.json: must be one JSON object"),
    "null": ({"vocab": "null"}, "vocab.json: must be one JSON object"),
    "no tokens": ({"vocab": "{}"}, "vocab.json: its vocabulary is empty"),
    "an id that is text": ({"vocab": vocab(he="256")}, "the id of 'he' is '256'"),
    "an id that is true": ({"vocab": vocab(he=True)}, "the id of 'he' is True"),
    "an id that is a fraction": ({"vocab": vocab(he=256.5)}, "the id of 'he' is 256.5"),
    "an id that is null": ({"vocab": vocab(he=None)}, "the id of 'he' is None"),
    "a negative id": ({"vocab": vocab(he=-1)}, "the id -1 of 'he'"),
    "an id beyond int32": ({"vocab": vocab(he=1 << 40)}, "the id 1099511627776 of 'he'"),
    "an id twice": ({"vocab": vocab(he=5)}, "259 tokens need the ids 0 to 258, each once; 256 is"),
    "a gap": ({"vocab": vocab(hel=300)}, "each once; 257 is missing"),
    "ids from 1": ({"vocab": json.dumps({t: n + 1 for t, n in VOCAB.items()})}, "0 is missing"),
    "a token twice": ({"vocab": json.dumps(VOCAB)[:-1] + ', "a": 300}'}, "is missing"),
    "no end of text": (
        {"vocab": json.dumps({t: n for t, n in VOCAB.items() if t != END})},
        "has no <|endoftext|>",
    ),
    "no bytes": ({"vocab": json.dumps({END: 0, "a": 1})}, "lacks 255 of the 256 bytes"),
    "merges of no tokens": ({"merges": "zz zz\n"}, "merges.txt: not the merges of"),
    "merges of three": ({"merges": "h e l\n"}, "merges.txt:1: 'h e l' is no pair"),
    "merges of one": ({"merges": MERGES + "he\n"}, "merges.txt:4: 'he' is no pair"),
    "merges with a tab": ({"merges": "h\te\n"}, "merges.txt:1: 'h\\te' is no pair"),
    "merges with an empty half": ({"merges": "h \n"}, "merges.txt:1: 'h ' is no pair"),
    "merges that are JSON": ({"merges": '{"h": 1}'}, "merges.txt: not the merges of"),
    "merges that are no UTF-8": ({"merges": b"h \xff\n"}, "merges.txt: not UTF-8"),
    "merges of NUL bytes": ({"merges": b"\0" * 9}, "merges.txt:1: "),
}


@pytest.mark.parametrize("name", GPT2)
def test_gpt2_by_hand(tmp_path: Path, name: str) -> None:
    files, message = GPT2[name]
    with pytest.raises(ValueError) as raised:
        gpt2(tmp_path, **files)  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_gpt2_merges_that_end_early(tmp_path: Path) -> None:
    words = [a + b for a in BYTES[:40] for b in BYTES[:40]]
    merges = "".join(f"{word[0]} {word[1]}\n" for word in words)
    larger = json.dumps({token: n for n, token in enumerate([*BYTES, *words, END])})
    assert gpt2(tmp_path, larger, merges).encode(words[-1]) == [256 + len(words) - 1]
    with pytest.raises(ValueError, match=r"makes 1401 tokens of .* not .* its end is missing"):
        gpt2(tmp_path, larger, merges[: 4 * 200])


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
@pytest.mark.parametrize("folder_there", [True, False])
def test_gpt2_files_that_are_none(tmp_path: Path, missing: str, folder_there: bool) -> None:
    gpt2(tmp_path)
    (tmp_path / missing).unlink()
    if folder_there:
        (tmp_path / missing).mkdir()
    config = TokenizerConfig(
        vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt")
    )
    with pytest.raises(ValueError, match=missing):
        build_tokenizer(config)


@given(value=JSON | st.dictionaries(st.sampled_from([*BYTES, END]), JSON, max_size=4))
@FUZZ
def test_gpt2_any_vocabulary(folder: Path, value: object) -> None:
    read_or_refuse(lambda: gpt2(folder, json.dumps(value)), str(folder / "vocab.json"))


@given(token=st.sampled_from(["a", "he", "hel", END]), value=JSON)
@FUZZ
def test_gpt2_any_id(folder: Path, token: str, value: object) -> None:
    read_or_refuse(lambda: gpt2(folder, vocab(**{token: value})), str(folder / "vocab.json"))


@given(merges=st.text(max_size=30) | st.binary(max_size=30) | st.text("he \n#l", max_size=20))
@FUZZ
def test_gpt2_any_merges(folder: Path, merges: str | bytes) -> None:
    content = merges if isinstance(merges, bytes) else merges.encode(errors="replace")
    read_or_refuse(lambda: gpt2(folder, merges=content), str(folder / "merges.txt"))


def test_hf_good(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path, tokenizer__json=json.dumps(FILE))
    assert (tokenizer.encode("a b"), tokenizer.eod, tokenizer.vocab_size) == ([0, 1], 3, 4)


def changed(*path: Any, to: Any) -> str:
    return json.dumps(replaced(FILE, path, to))


GOOD = json.dumps(FILE)
HF: dict[str, tuple[dict[str, str | bytes], str]] = {
    "no files": ({}, "no tokenizer can be read from it"),
    "an empty file": ({"tokenizer__json": ""}, "tokenizer.json: not a tokenizer.json"),
    "no JSON": ({"tokenizer__json": "hello"}, "tokenizer.json: not a tokenizer.json"),
    "no UTF-8": ({"tokenizer__json": b"\xff\xfe"}, "tokenizer.json: not a tokenizer.json"),
    "a list": ({"tokenizer__json": "[]"}, "tokenizer.json: not a tokenizer.json"),
    "an empty object": ({"tokenizer__json": "{}"}, "tokenizer.json: not a tokenizer.json"),
    "nested deeply": ({"tokenizer__json": "[" * 100_000}, "not a tokenizer.json"),
    "cut": ({"tokenizer__json": GOOD[:-9]}, "tokenizer.json: not a tokenizer.json"),
    "no model": ({"tokenizer__json": changed("model", to=MISSING)}, "not a tokenizer.json"),
    "model null": ({"tokenizer__json": changed("model", to=None)}, "not a tokenizer.json"),
    "unknown model": ({"tokenizer__json": changed("model", "type", to="X")}, "not a tokenizer"),
    "vocabulary a list": ({"tokenizer__json": changed("model", "vocab", to=[])}, "not a tokenizer"),
    "a negative id": ({"tokenizer__json": changed("model", "vocab", "a", to=-1)}, "not a tok"),
    "an id beyond int32": (
        {"tokenizer__json": changed("model", "vocab", "a", to=(1 << 32) - 1)},
        "the id 4294967295 of 'a'",
    ),
    "no vocabulary": (
        {"tokenizer__json": json.dumps({**FILE, "added_tokens": [], "model": {
            "type": "WordLevel", "vocab": {}, "unk_token": "x"}})},
        "tokenizer.json: its vocabulary is empty",
    ),
    "no end token": (
        {"tokenizer__json": changed("added_tokens", to=[])},
        "tokenizer.json: no token to end documents is known",
    ),
    "side file no JSON": (
        {"tokenizer__json": GOOD, "tokenizer_config__json": "{"},
        "tokenizer_config.json: not JSON",
    ),
    "side file a list": (
        {"tokenizer__json": GOOD, "tokenizer_config__json": "[]"},
        "tokenizer_config.json: must be one JSON object",
    ),
    "side file no UTF-8": (
        {"tokenizer__json": GOOD, "special_tokens_map__json": b"\xff"},
        "special_tokens_map.json: not JSON",
    ),
    "end token a list": (
        {"tokenizer__json": GOOD, "tokenizer_config__json": '{"eos_token": ["</s>"]}'},
        "tokenizer_config.json: its eos_token ['</s>'] is no token of",
    ),
    "end token unknown": (
        {"tokenizer__json": GOOD, "special_tokens_map__json": '{"eos_token": "<end>"}'},
        "special_tokens_map.json: its eos_token '<end>' is no token of",
    ),
    "a configuration alone": (
        {"tokenizer_config__json": '{"tokenizer_class": "GPT2Tokenizer"}'},
        "it has no tokenizer.json and no vocab.json, merges.txt",
    ),
    "merges missing": (
        {
            "tokenizer_config__json": '{"tokenizer_class": "GPT2Tokenizer"}',
            "vocab__json": json.dumps(VOCAB),
        },
        "no tokenizer can be read from it: `vocab` and `merges`",
    ),
    "a configuration of no class": (
        {"tokenizer_config__json": '{"tokenizer_class": 5}', "config__json": "[]"},
        "no tokenizer can be read from it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_hf_by_hand(tmp_path: Path, name: str) -> None:
    files, message = HF[name]
    with pytest.raises(ValueError) as raised:
        hf(tmp_path, **files)
    assert message in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_hf_names_that_are_none(tmp_path: Path) -> None:
    for name in ("none", "", "no\0where", "x" * 5000):
        config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=name)
        with pytest.raises(ValueError, match="--tokenizer-model"):
            build_tokenizer(config)


@given(path=st.sampled_from(paths_in(FILE)), value=JSON)
@FUZZ
def test_hf_any_value_anywhere(folder: Path, path: tuple[Any, ...], value: object) -> None:
    content = json.dumps(replaced(FILE, path, value))
    read_or_refuse(lambda: hf(folder, tokenizer__json=content), str(folder))


MODELS: list[Callable[[Any], dict[str, Any]]] = [
    lambda value: {"type": "Unigram", "unk_id": value, "vocab": [["a", -1.0], ["</s>", 0.0]]},
    lambda value: {"type": "Unigram", "unk_id": 0, "vocab": value},
    lambda value: {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": value},
    lambda value: {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "unk_token": value},
    lambda value: {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": value},
]


@given(model=st.sampled_from(MODELS), value=JSON)
@FUZZ
def test_hf_any_value_in_every_model(
    folder: Path, model: Callable[[Any], dict[str, Any]], value: object
) -> None:
    content = json.dumps({**FILE, "model": model(value)})
    read_or_refuse(lambda: hf(folder, tokenizer__json=content), str(folder))


@given(value=JSON, key=st.sampled_from(["eos_token", "content"]))
@FUZZ
def test_hf_any_side_file(folder: Path, value: object, key: str) -> None:
    side = {"eos_token": value} if key == "eos_token" else {"eos_token": {"content": value}}
    files = {"tokenizer__json": GOOD, "tokenizer_config__json": json.dumps(side)}
    read_or_refuse(lambda: hf(folder, **files), str(folder))


@pytest.mark.parametrize("size", [0, -1, 1 << 31, 10**400])
def test_null_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="--vocab-size"):
        NullTokenizer(size)


@given(text=st.text(max_size=12) | st.text("0123456789+-_. ", max_size=12))
@FUZZ
def test_null_any_text(text: str) -> None:
    tokenizer = NullTokenizer(500)
    result = read_or_refuse(lambda: tokenizer.encode(text), "NullTokenizer")
    if isinstance(result, list):
        assert [word.lstrip("0") or "0" for word in text.split()] == list(map(str, result))
