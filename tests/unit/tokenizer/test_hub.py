"""Tokenizers by name, and those that bring their own code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import huggingface_hub
import pytest

from megatron_ds.config import TokenizerConfig
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.huggingface import needs_transformers
from tests.unit.tokenizer.test_golden import FOLDER, texts

CODE = """
from transformers import PreTrainedTokenizer


class Letters(PreTrainedTokenizer):
    vocab_files_names = {"letters_file": "letters.txt"}

    def __init__(self, letters_file, **more):
        self._letters = open(letters_file).read().split()
        super().__init__(**more)

    @property
    def vocab_size(self):
        return len(self._letters)

    def get_vocab(self):
        return {**{c: n for n, c in enumerate(self._letters)}, **self.added_tokens_encoder}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._letters.index(token)

    def _convert_id_to_token(self, number):
        return self._letters[number]
"""


def build(name: str | Path, *, trust: bool = False) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="HFTokenizer", tokenizer_model=str(name), trust_remote_code=trust
        )
    )


def test_a_name_is_fetched_and_read_as_the_folder_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())

    def download(name: str, *, allow_patterns: Iterable[str]) -> str:
        asked.append((name, list(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    named, local = build("someone/some-model_1.5"), build(FOLDER / "tokenizer.json")
    assert [named.encode(text) for text in texts()] == [local.encode(text) for text in texts()]
    assert named.identity.same_as(local.identity)
    ((name, patterns),) = asked
    assert name == "someone/some-model_1.5"
    assert "*.json" in patterns
    assert not any("py" in pattern for pattern in patterns)
    assert needs_transformers("someone/some-model_1.5")


def test_what_lies_here_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise AssertionError("fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    assert build("gpt2").vocab_size == 360
    for path in ("/no/such", "../no", "a/b/c", "no such"):
        with pytest.raises(ValueError, match="no such tokenizer"):
            build(path)


def test_a_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError) as raised:
        build("nobody/nothing")
    assert "--tokenizer-model nobody/nothing: there is no such" in str(raised.value)
    assert "Hugging Face Hub it cannot be fetched: no network" in str(raised.value)


def test_code_of_a_folder_is_run_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where transformers copies such code to.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "letters.txt").write_text("a b c .")
    (tmp_path / "letters.py").write_text(f"{CODE}\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Letters",
                "auto_map": {"AutoTokenizer": ["letters.Letters", None]},
                "eos_token": ".",
            }
        )
    )
    with pytest.raises(ValueError, match="no tokenizer can be read from it"):
        build(tmp_path)
    assert not (tmp_path / "ran").exists()
    trusted = build(tmp_path, trust=True)
    assert (tmp_path / "ran").exists()
    assert trusted.encode("abca") == [0, 1, 2, 0]
    assert (trusted.vocab_size, trusted.eod) == (4, 3)


def test_a_trusted_folder_needs_no_other_file_than_its_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    plain = build(tmp_path)
    end = plain.decode([plain.eod])
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})
    )
    trusted = build(tmp_path, trust=True)
    assert trusted.encode_batch(texts()) == plain.encode_batch(texts())
    assert trusted.encode_batch([]) == []
