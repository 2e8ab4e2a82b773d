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
SWITCHES = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
FILE: dict[str, Any] = {
    **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "</s>", "special": True, **SWITCHES}],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def gpt2_config(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(vocab_file=f"{folder}/vocab.json", merge_file=f"{folder}/merges.txt")


def gpt2(folder: Path, vocab: str | bytes | None = None, merges: str | bytes = MERGES) -> Tokenizer:
    vocab = json.dumps(VOCAB) if vocab is None else vocab
    for name, content in (("vocab.json", vocab), ("merges.txt", merges)):
        content = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(content)
    return build_tokenizer(gpt2_config(folder))


def hf_config(name: str) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=name)


def hf(folder: Path, **files: str | bytes) -> Tokenizer:
    """The tokenizer of a folder with exactly these files, with `__` for a dot in their names."""
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        content = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(content)
    return build_tokenizer(hf_config(str(folder)))


def vocab(**changes: Any) -> str:
    return json.dumps({**VOCAB, **changes})


BAD_VOCABS: dict[str, list[str | bytes]] = {
    "tokenizer-file-not-json": [
        "",
        "a 0\nb 1\n",
        json.dumps(VOCAB)[:-100],
        "[" * 100_000,
        b'{"\xff": 0}',
        b"\0" * 64,
    ],
    "tokenizer-file-not-json-object": [json.dumps(list(VOCAB)), "null"],
    "vocabulary-empty": ["{}"],
    "token-id-not-integer": [vocab(he=number) for number in ("256", True, 256.5, None)],
    "token-id-out-of-range": [vocab(he=-1), vocab(he=1 << 40)],
    "token-ids-not-contiguous": [
        vocab(he=5),
        vocab(hel=300),
        json.dumps(VOCAB)[:-1] + ', "a": 300}',
        json.dumps({token: number + 1 for token, number in VOCAB.items()}),
    ],
    "end-of-text-token-missing": [json.dumps({t: n for t, n in VOCAB.items() if t != END})],
    "byte-tokens-missing": [json.dumps({END: 0, "a": 1})],
}
BAD_MERGES: list[tuple[str, str | bytes, str]] = [
    ("merges-of-another-vocabulary", "zz zz\n", "merges.txt"),
    ("merges-of-another-vocabulary", '{"h": 1}', "merges.txt"),
    ("merge-not-a-pair", "h e l\n", "merges.txt:1: 'h e l'"),
    ("merge-not-a-pair", MERGES + "he\n", "merges.txt:4: 'he'"),
    ("merge-not-a-pair", "h\te\n", "merges.txt:1: 'h\\te'"),
    ("merge-not-a-pair", "h \n", "merges.txt:1: 'h '"),
    ("merge-not-a-pair", b"\0" * 9, "merges.txt:1: "),
    ("tokenizer-file-not-utf8", b"h \xff\n", "merges.txt"),
]


@pytest.mark.parametrize("code", BAD_VOCABS)
def test_gpt2_rejects_damaged_vocabularies(tmp_path: Path, code: str) -> None:
    for content in BAD_VOCABS[code]:
        with raises_problem(code, "vocab_file", contains=f"{tmp_path}/vocab.json"):
            gpt2(tmp_path, content)


@pytest.mark.parametrize(("code", "content", "shown"), BAD_MERGES)
def test_gpt2_rejects_damaged_merges(
    tmp_path: Path, code: str, content: str | bytes, shown: str
) -> None:
    with raises_problem(code, contains=f"{tmp_path}/{shown}"):
        gpt2(tmp_path, merges=content)


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
    with raises_problem("not-a-file" if is_folder else "file-not-found", contains=missing):
        build_tokenizer(gpt2_config(tmp_path))


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
GPT2_CLASS = '{"tokenizer_class": "GPT2Tokenizer"}'
BAD_TOKENIZER_JSON: dict[str, list[str | bytes]] = {
    "tokenizer-json-invalid": [
        "",
        "hello",
        b"\xff\xfe",
        "[]",
        "{}",
        "[" * 100_000,
        GOOD[:-9],
        changed("model", to=MISSING),
        changed("model", to=None),
        changed("model", "type", to="X"),
        changed("model", "vocab", to=[]),
        changed("model", "vocab", "a", to=-1),
    ],
    "token-id-out-of-range": [changed("model", "vocab", "a", to=(1 << 32) - 1)],
    "vocabulary-empty": [json.dumps({**FILE, "added_tokens": [], "model": EMPTY_MODEL})],
    "end-token-unknown": [changed("added_tokens", to=[])],
}
BAD_SIDE_FILES: list[tuple[str, str, str | bytes]] = [
    ("tokenizer-file-not-json", "tokenizer_config", "{"),
    ("tokenizer-file-not-json", "tokenizer_config", b"\xff"),
    ("tokenizer-file-not-json-object", "tokenizer_config", "[]"),
    ("end-token-not-in-vocabulary", "tokenizer_config", '{"eos_token": ["</s>"]}'),
]
UNREADABLE_FOLDERS: list[dict[str, str | bytes]] = [
    {"tokenizer_config__json": GPT2_CLASS, "vocab__json": json.dumps(VOCAB)},
    {"tokenizer_config__json": '{"tokenizer_class": 5}', "config__json": "[]"},
]
# The code of the problem, the file or folder that it names, and the files.
BAD_FOLDERS: list[tuple[str, str, dict[str, str | bytes]]] = [
    *(
        (code, "tokenizer.json", {"tokenizer__json": content})
        for code, contents in BAD_TOKENIZER_JSON.items()
        for content in contents
    ),
    *(
        (code, f"{name}.json", {"tokenizer__json": GOOD, f"{name}__json": content})
        for code, name, content in BAD_SIDE_FILES
    ),
    ("tokenizer-not-found", "", {}),
    ("pretrained-tokenizer-incomplete", "", {"tokenizer_config__json": GPT2_CLASS}),
    *(("pretrained-tokenizer-unreadable", "", files) for files in UNREADABLE_FOLDERS),
]


@pytest.mark.parametrize(("code", "file", "files"), BAD_FOLDERS)
def test_hf_rejects_damaged_files(
    tmp_path: Path, code: str, file: str, files: dict[str, str | bytes]
) -> None:
    with raises_problem(code, "tokenizer_model", contains=str(tmp_path / file)):
        hf(tmp_path, **files)


def test_hf_rejects_paths_that_do_not_exist() -> None:
    for name in ("no where", "", "no\0where", "x/" * 500):
        with raises_problem("tokenizer-not-found", "tokenizer_model", contains=name):
            build_tokenizer(hf_config(name))
    with raises_problem("tokenizer-download-failed", "tokenizer_model"):
        build_tokenizer(hf_config("x" * 5000))


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
