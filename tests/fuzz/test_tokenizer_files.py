"""Damaged tokenizer files: rejected with option and file, whatever the libraries raise."""

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
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, JSON, MISSING, paths_in, read_or_error, replaced
from tests.problems import raises_problem

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
    """The tokenizer of a folder with exactly these files, with `__` for a dot in their names."""
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


GPT2: dict[str, tuple[dict[str, str | bytes], str, str]] = {
    "empty vocabulary file": ({"vocab": ""}, "tokenizer-file-not-json", "vocab.json"),
    "not JSON": ({"vocab": "a 0\nb 1\n"}, "tokenizer-file-not-json", "vocab.json"),
    "truncated": ({"vocab": json.dumps(VOCAB)[:-100]}, "tokenizer-file-not-json", "vocab.json"),
    "not UTF-8": ({"vocab": b'{"\xff": 0}'}, "tokenizer-file-not-json", "vocab.json"),
    "NUL bytes": ({"vocab": b"\0" * 64}, "tokenizer-file-not-json", "vocab.json"),
    "nested deeply": ({"vocab": "[" * 100_000}, "tokenizer-file-not-json", "vocab.json"),
    "list": ({"vocab": json.dumps(list(VOCAB))}, "tokenizer-file-not-json-object", "vocab.json"),
    "null": ({"vocab": "null"}, "tokenizer-file-not-json-object", "vocab.json"),
    "no tokens": ({"vocab": "{}"}, "vocabulary-empty", "vocab.json"),
    "id as text": ({"vocab": vocab(he="256")}, "token-id-not-integer", "'he' is '256'"),
    "id true": ({"vocab": vocab(he=True)}, "token-id-not-integer", "'he' is True"),
    "id fraction": ({"vocab": vocab(he=256.5)}, "token-id-not-integer", "'he' is 256.5"),
    "id null": ({"vocab": vocab(he=None)}, "token-id-not-integer", "'he' is None"),
    "negative id": ({"vocab": vocab(he=-1)}, "token-id-out-of-range", "-1 of 'he'"),
    "id beyond int32": ({"vocab": vocab(he=1 << 40)}, "token-id-out-of-range", "1099511627776"),
    "id repeated": ({"vocab": vocab(he=5)}, "token-ids-not-contiguous", "256 is missing"),
    "gap": ({"vocab": vocab(hel=300)}, "token-ids-not-contiguous", "257 is missing"),
    "ids from 1": (
        {"vocab": json.dumps({t: n + 1 for t, n in VOCAB.items()})},
        "token-ids-not-contiguous",
        "0 is missing",
    ),
    "token repeated": (
        {"vocab": json.dumps(VOCAB)[:-1] + ', "a": 300}'},
        "token-ids-not-contiguous",
        "vocab.json",
    ),
    "no end of text": (
        {"vocab": json.dumps({t: n for t, n in VOCAB.items() if t != END})},
        "end-of-text-token-missing",
        END,
    ),
    "no bytes": ({"vocab": json.dumps({END: 0, "a": 1})}, "byte-tokens-missing", "255"),
    "merges of no tokens": ({"merges": "zz zz\n"}, "merges-of-another-vocabulary", "merges.txt"),
    "merges of three": ({"merges": "h e l\n"}, "merge-not-a-pair", "merges.txt:1: 'h e l'"),
    "merges of one": ({"merges": MERGES + "he\n"}, "merge-not-a-pair", "merges.txt:4: 'he'"),
    "merges with a tab": ({"merges": "h\te\n"}, "merge-not-a-pair", "merges.txt:1: 'h\\te'"),
    "merges with an empty half": ({"merges": "h \n"}, "merge-not-a-pair", "merges.txt:1: 'h '"),
    "merges in JSON": ({"merges": '{"h": 1}'}, "merges-of-another-vocabulary", "merges.txt"),
    "merges not UTF-8": ({"merges": b"h \xff\n"}, "tokenizer-file-not-utf8", "merges.txt"),
    "merges of NUL bytes": ({"merges": b"\0" * 9}, "merge-not-a-pair", "merges.txt:1: "),
}


@pytest.mark.parametrize("name", GPT2)
def test_gpt2_rejects_damaged_files(tmp_path: Path, name: str) -> None:
    files, code, shown = GPT2[name]
    with raises_problem(code, contains=shown) as raised:
        gpt2(tmp_path, **files)  # type: ignore[arg-type]
    assert str(tmp_path) in raised.problem


def test_gpt2_rejects_truncated_merges(tmp_path: Path) -> None:
    words = [a + b for a in BYTES[:40] for b in BYTES[:40]]
    merges = "".join(f"{word[0]} {word[1]}\n" for word in words)
    larger = json.dumps({token: n for n, token in enumerate([*BYTES, *words, END])})
    assert gpt2(tmp_path, larger, merges).encode(words[-1]) == [256 + len(words) - 1]
    with raises_problem("merges-incomplete", "merge_file", "vocab_file", contains=" 1401 "):
        gpt2(tmp_path, larger, merges[: 4 * 200])


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_gpt2_rejects_missing_files(tmp_path: Path, missing: str, is_folder: bool) -> None:
    gpt2(tmp_path)
    (tmp_path / missing).unlink()
    if is_folder:
        (tmp_path / missing).mkdir()
    config = TokenizerConfig(
        vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt")
    )
    with pytest.raises(ValueError, match=missing):
        build_tokenizer(config)


@given(value=JSON | st.dictionaries(st.sampled_from([*BYTES, END]), JSON, max_size=4))
@FUZZ_SETTINGS
def test_gpt2_with_any_vocabulary(folder: Path, value: object) -> None:
    read_or_error(lambda: gpt2(folder, json.dumps(value)), str(folder / "vocab.json"))


@given(token=st.sampled_from(["a", "he", "hel", END]), value=JSON)
@FUZZ_SETTINGS
def test_gpt2_with_any_id(folder: Path, token: str, value: object) -> None:
    read_or_error(lambda: gpt2(folder, vocab(**{token: value})), str(folder / "vocab.json"))


@given(merges=st.text(max_size=30) | st.binary(max_size=30) | st.text("he \n#l", max_size=20))
@FUZZ_SETTINGS
def test_gpt2_with_any_merges(folder: Path, merges: str | bytes) -> None:
    content = merges if isinstance(merges, bytes) else merges.encode(errors="replace")
    read_or_error(lambda: gpt2(folder, merges=content), str(folder / "merges.txt"))


def test_hf_reads_an_intact_file(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path, tokenizer__json=json.dumps(FILE))
    assert (tokenizer.encode("a b"), tokenizer.eod, tokenizer.vocab_size) == ([0, 1], 3, 4)


def changed(*path: Any, to: Any) -> str:
    return json.dumps(replaced(FILE, path, to))


GOOD = json.dumps(FILE)
EMPTY_MODEL = {"type": "WordLevel", "vocab": {}, "unk_token": "x"}
BAD_TOKENIZER_JSON: dict[str, str | bytes] = {
    "empty file": "",
    "not JSON": "hello",
    "not UTF-8": b"\xff\xfe",
    "list": "[]",
    "empty object": "{}",
    "nested deeply": "[" * 100_000,
    "truncated": GOOD[:-9],
    "no model": changed("model", to=MISSING),
    "model null": changed("model", to=None),
    "unknown model": changed("model", "type", to="X"),
    "vocabulary a list": changed("model", "vocab", to=[]),
    "negative id": changed("model", "vocab", "a", to=-1),
}
GPT2_CLASS = '{"tokenizer_class": "GPT2Tokenizer"}'
HF: dict[str, tuple[dict[str, str | bytes], str, str]] = {
    **{
        name: ({"tokenizer__json": content}, "tokenizer-json-invalid", "tokenizer.json")
        for name, content in BAD_TOKENIZER_JSON.items()
    },
    "no files": ({}, "pretrained-tokenizer-unreadable", ""),
    "id beyond int32": (
        {"tokenizer__json": changed("model", "vocab", "a", to=(1 << 32) - 1)},
        "token-id-out-of-range",
        "4294967295 of 'a'",
    ),
    "no vocabulary": (
        {"tokenizer__json": json.dumps({**FILE, "added_tokens": [], "model": EMPTY_MODEL})},
        "vocabulary-empty",
        "tokenizer.json",
    ),
    "no end token": (
        {"tokenizer__json": changed("added_tokens", to=[])},
        "end-token-unknown",
        "tokenizer.json",
    ),
    "side file not JSON": (
        {"tokenizer__json": GOOD, "tokenizer_config__json": "{"},
        "tokenizer-file-not-json",
        "tokenizer_config.json",
    ),
    "side file a list": (
        {"tokenizer__json": GOOD, "tokenizer_config__json": "[]"},
        "tokenizer-file-not-json-object",
        "tokenizer_config.json",
    ),
    "side file not UTF-8": (
        {"tokenizer__json": GOOD, "special_tokens_map__json": b"\xff"},
        "tokenizer-file-not-json",
        "special_tokens_map.json",
    ),
    "end token a list": (
        {"tokenizer__json": GOOD, "tokenizer_config__json": '{"eos_token": ["</s>"]}'},
        "end-token-not-in-vocabulary",
        "['</s>']",
    ),
    "end token unknown": (
        {"tokenizer__json": GOOD, "special_tokens_map__json": '{"eos_token": "<end>"}'},
        "end-token-not-in-vocabulary",
        "'<end>'",
    ),
    "only a configuration": (
        {"tokenizer_config__json": GPT2_CLASS},
        "pretrained-tokenizer-incomplete",
        "vocab.json, merges.txt",
    ),
    "merges missing": (
        {"tokenizer_config__json": GPT2_CLASS, "vocab__json": json.dumps(VOCAB)},
        "pretrained-tokenizer-unreadable",
        "`vocab` and `merges`",
    ),
    "configuration without a class": (
        {"tokenizer_config__json": '{"tokenizer_class": 5}', "config__json": "[]"},
        "pretrained-tokenizer-unreadable",
        "",
    ),
}


@pytest.mark.parametrize("name", HF)
def test_hf_rejects_damaged_files(tmp_path: Path, name: str) -> None:
    files, code, shown = HF[name]
    with raises_problem(code, "tokenizer_model", contains=shown) as raised:
        hf(tmp_path, **files)
    assert str(tmp_path) in raised.problem


def test_hf_rejects_paths_that_do_not_exist() -> None:
    for name in ("no where", "", "no\0where", "x/" * 500):
        config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=name)
        with raises_problem("tokenizer-not-found", "tokenizer_model", contains=name):
            build_tokenizer(config)
    config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model="x" * 5000)
    with raises_problem("tokenizer-download-failed", "tokenizer_model"):
        build_tokenizer(config)


@given(path=st.sampled_from(paths_in(FILE)), value=JSON)
@FUZZ_SETTINGS
def test_hf_with_any_value_anywhere(folder: Path, path: tuple[Any, ...], value: object) -> None:
    content = json.dumps(replaced(FILE, path, value))
    read_or_error(lambda: hf(folder, tokenizer__json=content), str(folder))


MODELS: list[Callable[[Any], dict[str, Any]]] = [
    lambda value: {"type": "Unigram", "unk_id": value, "vocab": [["a", -1.0], ["</s>", 0.0]]},
    lambda value: {"type": "Unigram", "unk_id": 0, "vocab": value},
    lambda value: {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": value},
    lambda value: {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "unk_token": value},
    lambda value: {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": value},
]


@given(model=st.sampled_from(MODELS), value=JSON)
@FUZZ_SETTINGS
def test_hf_with_any_value_in_every_model(
    folder: Path, model: Callable[[Any], dict[str, Any]], value: object
) -> None:
    content = json.dumps({**FILE, "model": model(value)})
    read_or_error(lambda: hf(folder, tokenizer__json=content), str(folder))


@given(value=JSON, key=st.sampled_from(["eos_token", "content"]))
@FUZZ_SETTINGS
def test_hf_with_any_side_file(folder: Path, value: object, key: str) -> None:
    side = {"eos_token": value} if key == "eos_token" else {"eos_token": {"content": value}}
    files = {"tokenizer__json": GOOD, "tokenizer_config__json": json.dumps(side)}
    read_or_error(lambda: hf(folder, **files), str(folder))


@pytest.mark.parametrize("size", [0, -1, 1 << 31, 10**400])
def test_null_tokenizer_rejects_sizes_beyond_int32(size: int) -> None:
    with raises_problem("vocab-size-out-of-range", "vocab_size"):
        NullTokenizer(size)


@given(text=st.text(max_size=12) | st.text("0123456789+-_. ", max_size=12))
@FUZZ_SETTINGS
def test_null_tokenizer_with_any_text(text: str) -> None:
    tokenizer = NullTokenizer(500)
    result = read_or_error(lambda: tokenizer.encode(text), "NullTokenizer")
    if isinstance(result, list):
        assert [word.lstrip("0") or "0" for word in text.split()] == list(map(str, result))
