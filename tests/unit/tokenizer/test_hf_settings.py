"""Settings next to a tokenizer.json: ids, sizes and special tokens equal AutoTokenizer's.

Claim (tokenizers): settings next to a `tokenizer.json` (added tokens, `add_prefix_space`,
`do_lower_case`, `split_special_tokens`, classes) give the ids of AutoTokenizer, in 30 folders
"""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from megatron_ds.tokenizer.fast_backend import select_backend
from tests.problems import raises_problem
from tests.tables import tables
from tests.unit.tokenizer.test_hub import build_hf

TABLES = tables(__file__)

TEXTS = (
    "Hello world",
    "the thing in 2024",
    " <|im_start|>in<|im_end|>\n",
    "the <|endoftext|> end",
    "x<mask> <s>y</s>  THE",
    "it's   <img>\u00e9\U0001f600",
)
END = "<|endoftext|>"
GENERIC = TABLES["generic"]
NAMES = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
CONFIG, MAP, ADDED, MODEL = NAMES
FOLDERS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    name: (form, files) for name, (form, files) in TABLES["folders"].items()
}
"""Kind of tokenizer.json and the files next to it."""
WITHOUT_TRANSFORMERS = {"nothing", "generic", "same_decoder", "harmless", "generic_llama"} | {
    "begin",
    "begin_of_map",
    "begin_that_is_not_added",
    "split",
}


def library(kind: str) -> Library:
    if kind == "words":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "hello", "world", "Hello"]
        made = Library(
            models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
        )
        made.normalizer = normalizers.BertNormalizer(lowercase=False)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.add_special_tokens(words[:5])
        return made
    if kind == "spaces":
        letters = [
            "<unk>",
            "<s>",
            "</s>",
            "\u2581",
            *map(chr, range(33, 127)),
            "\u2581t",
            "\u2581th",
        ]
        merges = [("\u2581", "t"), ("\u2581t", "h")]
        vocab = {letter: at for at, letter in enumerate(letters)}
        made = Library(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        made.add_special_tokens(["<unk>", "<s>", "</s>"])
        return made
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "he", "th", "in"]
    merges = [("h", "e"), ("t", "h"), ("i", "n")]
    made = Library(models.BPE({word: at for at, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, normalized=False)])
    if kind == "begin":
        made.add_special_tokens(["<|begin|>"])
        begin = ("<|begin|>", 260)
        made.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[begin])
    return made


def make_folder(folder: Path, name: str) -> Path:
    kind, files = FOLDERS[name]
    folder.mkdir(exist_ok=True)
    library(kind).save(str(folder / "tokenizer.json"))
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_equal_those_of_auto_tokenizer(name: str, tmp_path: Path) -> None:
    import transformers

    folder = make_folder(tmp_path / "tokenizer", name)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = build_hf(folder)
    same = [ours, build_hf(folder / "tokenizer.json"), pickle.loads(pickle.dumps(ours))]
    if name in ("decoder", "split_chat"):
        same.append(select_backend(ours, "auto").tokenizer)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert [one.encode(text) for one in same] == [ids] * len(same)
    assert {one.vocab_size for one in same} == {max(theirs.get_vocab().values()) + 1}
    assert {one.bos for one in same} == {theirs.bos_token_id}
    first = theirs("").input_ids[:1]
    assert {one.adds_bos for one in same} == {first != [] and first == [theirs.bos_token_id]}
    if theirs.eos_token_id is not None:
        assert {one.eod for one in same} == {theirs.eos_token_id}


@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_is_used_only_for_settings_that_have_an_effect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = make_folder(tmp_path / "tokenizer", name)
    if name in WITHOUT_TRANSFORMERS:
        build_hf(folder)
    else:
        with raises_problem("library-missing", contains=str(folder)):
            build_hf(folder)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        (CONFIG, "added_tokens_decoder", {"260": 5}),
        (CONFIG, "added_tokens_decoder", 5),
        (CONFIG, "eos_token", 5),
        (ADDED, "<|im_start|>", "260"),
        (MODEL, "model_type", ["llama"]),
    ],
)
def test_settings_that_cannot_be_applied_are_named(
    file: str, key: str, value: Any, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "tokenizer", "generic")
    content = {**GENERIC, key: value} if file == CONFIG else {key: value}
    (folder / file).write_text(json.dumps(content))
    with raises_problem("pretrained-tokenizer-unreadable", contains=f"{file}: {key}"):
        build_hf(folder)


def test_tokenizers_of_other_settings_are_not_the_same(tmp_path: Path) -> None:
    made = [
        build_hf(make_folder(tmp_path / name, name))
        for name in ("generic", "decoder", "split", "prefix_space", "split_chat")
    ]
    pairs = itertools.combinations(made, 2)
    assert not any(one.fingerprint.same_as(other.fingerprint) for one, other in pairs)


def test_a_token_named_none_does_not_begin_texts(tmp_path: Path) -> None:
    """A vocabulary of code has it, and settings may name no begin token."""
    library = Library(models.WordLevel({"None": 0, "<|endoftext|>": 1}, "None"))
    library.save(str(tmp_path / "tokenizer.json"))
    assert build_hf(tmp_path).bos is None
