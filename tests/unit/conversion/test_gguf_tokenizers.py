"""Tokenizers in files of llama.cpp, as the tokenizers of runs that load them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers

from megatron_ds.config import TokenizerConfig
from megatron_ds.conversion.gguf.read_write import open_gguf, write_gguf
from megatron_ds.conversion.huggingface.read_write import write_hf
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.chat_template import read_chat_template, read_special_tokens
from megatron_ds.tokenizer.gguf.keys import (
    CHAT_TEMPLATE,
    JSON,
    KEEPS_SPECIAL_TEXT,
    TEMPLATES,
    read_keys,
)
from megatron_ds.tokenizer.gguf.library import built
from megatron_ds.tokenizer.gguf.pre_tokenizers import BY_NAME
from megatron_ds.tokenizer.gguf.settings import settings_of
from megatron_ds.tokenizer.stored_files import read_files, with_copies
from tests.problems import raises_problem
from tests.tables import tables
from tests.unit.conversion.test_exported_tokenizers import SPECIAL, TEXTS, config_of
from tests.unit.conversion.test_gguf import SPM, byte_level, with_library, with_tokenizer
from tests.unit.conversion.test_gguf import TABLES as GGUF_TABLES
from tests.unit.tokenizer.test_hf_settings import make_folder
from tests.unit.tokenizer.test_sentencepiece import trained

TABLES = tables(__file__)


def file_of(config: TokenizerConfig, folder: Path) -> Path:
    """A file with a tokenizer, and rows without a token."""
    is_full = config.tokenizer_type == "TikTokenizer"
    path = folder / "model.gguf"
    write_gguf(with_tokenizer(config, 0 if is_full else 3), path)
    return path


def loaded(path: Path) -> Tokenizer:
    """The tokenizer of a run with `--load` of a file."""
    config = open_gguf(path).settings.tokenizer_config
    assert config is not None
    return build_tokenizer(config)


def assert_same(path: Path, tokenizer: Tokenizer) -> None:
    """Compares the ids of a file with those of the tokenizer that it was written from.

    They are compared once more without the content of tokenizer.json, as other programs write
    files, apart from the name of the unknown token, which one type of tokenizer takes for text.
    """
    again = loaded(path)
    assert (again.eod, again.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)
    keys = read_keys(path)
    del keys[JSON]
    library = built(keys, str(path)).library
    library.encode_special_tokens = bool(keys.get(KEEPS_SPECIAL_TEXT))
    for text in [*TEXTS, *SPECIAL]:
        expected = tokenizer.begin(tokenizer.encode(text))
        assert again.begin(again.encode(text)) == expected
        if "<unk>" not in text:
            assert library.encode(text).ids == expected
            assert again.decode(expected) == library.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["gpt2", "tokenizer.json", "tiktoken-v1", "tiktoken-v2"])
def test_a_file_has_the_tokenizer_of_the_run(name: str, tmp_path: Path) -> None:
    """Claim (tokenizers): a run that loads a GGUF file gives the ids of the run that wrote it, for
    each kind of tokenizer that llama.cpp has, by the file's tokens, merges and scores alone, too
    """
    config = config_of(name, tmp_path)
    assert_same(file_of(config, tmp_path), build_tokenizer(config))


@pytest.mark.parametrize(("kind", "training"), TABLES["pieces"])
def test_a_file_has_the_sentencepiece_model_of_the_run(
    kind: str, training: dict[str, Any], tmp_path: Path
) -> None:
    model = trained(tmp_path / "m.model", **{"vocab_size": 400, **SPM, **training})
    config = TokenizerConfig(tokenizer_type=kind, tokenizer_model=model)
    path = file_of(config, tmp_path)
    assert_same(path, build_tokenizer(config))
    assert loaded(path).adds_bos == (kind == "Llama2Tokenizer")
    second = dataclasses.replace(open_gguf(path), path=tmp_path)
    write_gguf(second, tmp_path / "second.gguf")
    assert loaded(tmp_path / "second.gguf").encode("the end") == loaded(path).encode("the end")


@pytest.mark.parametrize(("splits", "has_own", "ignore_merges", "pre"), GGUF_TABLES["splits"])
def test_a_file_has_the_splits_of_its_pre(
    splits: list[str], has_own: bool, ignore_merges: bool, pre: str, tmp_path: Path
) -> None:
    library = byte_level(splits, has_own=has_own, ignore_merges=ignore_merges)
    source = with_library(library, tmp_path)
    write_gguf(source, tmp_path / "model.gguf")
    assert_same(tmp_path / "model.gguf", loaded_of(source))
    keys = read_keys(tmp_path / "model.gguf")
    assert keys["tokenizer.ggml.pre"] == pre
    for alias in BY_NAME[pre].aliases:
        changed = {**keys, "tokenizer.ggml.pre": alias, JSON: None}
        same = built(changed, "file").library
        assert same.encode("it's 1234 words").ids == library.encode("it's 1234 words").ids


def loaded_of(source: Any) -> Tokenizer:
    assert source.settings.tokenizer_config is not None
    return build_tokenizer(source.settings.tokenizer_config)


def test_a_bpe_whose_merges_have_the_order_of_scores(tmp_path: Path) -> None:
    """A tokenizer.json of characters and bytes, without an unknown token."""
    path = trained(tmp_path / "m", model_type="bpe", vocab_size=400, byte_fallback=True, **SPM)
    config = TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=path)
    library = build_tokenizer(config).exported().library
    state = json.loads(library.to_str())
    state["model"]["unk_token"] = None
    changed = tokenizers.Tokenizer.from_str(json.dumps(state))
    source = with_library(changed, tmp_path)
    write_gguf(source, tmp_path / "model.gguf")
    assert_same(tmp_path / "model.gguf", loaded_of(source))


def test_a_wordpiece_vocabulary() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s", "hello", "un", "##do"]
    library = tokenizers.Tokenizer(
        models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    keys = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [
            word if word[0] == "[" else word[2:] if word[0] == "#" else f"\u2581{word}"
            for word in words
        ],
        "tokenizer.ggml.token_type": [3, 2, 3, 3, 3, *(1 for _ in words[5:])],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 1,
    }
    again = built(keys, "file").library
    for text in ("The hellos undo", "unknown \u00dcndo, thes", "hell\u00f3 do s"):
        assert again.encode(text).ids == [2, *library.encode(text).ids]


@pytest.mark.parametrize("name", ["tokenizer.json", "gpt2"])
def test_a_checkpoint_keeps_the_tokenizer_and_not_the_weights(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    path = file_of(config, tmp_path)
    stored = open_gguf(path).settings.tokenizer_config
    assert stored is not None
    files = read_files(stored)
    assert sum(map(len, files.values())) < path.stat().st_size / 2
    for file, content in files.items():
        (tmp_path / "copy" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / file).write_bytes(content)
    path.rename(tmp_path / "gone.gguf")
    settings = with_copies(dataclasses.asdict(stored), tmp_path / "copy")
    copy = build_tokenizer(TokenizerConfig(**settings))
    again = loaded(tmp_path / "gone.gguf")
    assert copy.fingerprint == again.fingerprint
    assert copy.fingerprint.same_as(build_tokenizer(config).fingerprint)
    for text in [*TEXTS, *SPECIAL]:
        assert copy.encode(text) == again.encode(text)


def test_begin_token_and_chat_template_are_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "theirs", "begin")
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ messages }}")
    config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
    tokenizer = build_tokenizer(config)
    path = file_of(config, tmp_path)
    again = loaded(path)
    assert (again.bos, again.adds_bos) == (tokenizer.bos, True)
    template = read_chat_template(again.folder)
    assert template is not None
    assert template.source == "{{ eos_token }}{{ messages }}"
    assert template.tokens["eos_token"] == read_special_tokens(again.folder)["eos_token"]
    assert again.token_id(template.tokens["eos_token"]) == tokenizer.eod
    keys = read_keys(path)
    keys |= {TEMPLATES: ["tool_use"], f"{CHAT_TEMPLATE}.tool_use": "tools"}
    assert settings_of(keys)["chat_template"][1] == {"name": "tool_use", "template": "tools"}


@pytest.mark.parametrize(("changes", "code"), TABLES["damaged"])
def test_what_cannot_be_read_is_named(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "m", model_type="bpe", vocab_size=400, byte_fallback=True, **SPM)
    config = TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model)
    keys = read_keys(file_of(config, tmp_path)) | changes
    present = {key: value for key, value in keys.items() if value is not None}
    with raises_problem(code, contains="file.gguf"):
        built(present, "file.gguf")


def test_tokens_that_a_program_changed_are_read_from_the_file(tmp_path: Path) -> None:
    """The content of tokenizer.json counts only next to the tokens that it has."""
    path = file_of(config_of("gpt2", tmp_path), tmp_path)
    keys = read_keys(path)
    end = keys["tokenizer.ggml.eos_token_id"]
    keys["tokenizer.ggml.tokens"][end] = "<|renamed|>"
    library = built(keys, str(path)).library
    assert library.encode("a<|renamed|>").ids[-1] == end


def test_an_export_of_a_file_has_its_tokenizer(tmp_path: Path) -> None:
    config = config_of("gpt2", tmp_path)
    write_hf(open_gguf(file_of(config, tmp_path)), tmp_path / "hf")
    settings = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(tmp_path / "hf"))
    again = build_tokenizer(settings)
    for text in [*TEXTS, *SPECIAL]:
        assert again.encode(text) == build_tokenizer(config).encode(text)
