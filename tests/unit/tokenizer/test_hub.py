"""Tokenizers from the Hugging Face Hub, and those with code of their own.

Claim (tokenizers): Hugging Face tokenizers load from a file, a folder or by name
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest

from megatron_ds.tokenizer import Tokenizer
from megatron_ds.tokenizer.huggingface import needs_transformers
from tests.problems import raises_problem
from tests.unit.tokenizer.test_golden import FOLDER, build, texts

CODE = """
from transformers import PreTrainedTokenizerFast
class Letters(PreTrainedTokenizerFast):
    vocab_files_names = {"letters_file": "letters.json"}
    def __init__(self, letters_file, **more):
        super().__init__(tokenizer_file=letters_file, **more)
"""


def build_hf(name: str | Path, *, trust: bool = False) -> Tokenizer:
    return build("HFTokenizer", tokenizer_model=str(name), trust_remote_code=trust)


def test_a_hub_name_is_downloaded_and_read_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())

    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    named = build_hf("someone/some-model_1.5")
    local = build_hf(FOLDER / "tokenizer.json")
    assert [named.encode(text) for text in texts()] == [local.encode(text) for text in texts()]
    assert named.fingerprint.same_as(local.fingerprint)
    patterns = download.call_args.kwargs["allow_patterns"]
    download.assert_called_once_with(
        "someone/some-model_1.5", allow_patterns=patterns, local_files_only=False
    )
    assert "*.json" in patterns
    assert not any("py" in pattern for pattern in patterns)
    assert needs_transformers("someone/some-model_1.5")


def test_local_paths_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    assert build_hf("gpt2").vocab_size == 360
    for path in ("/no/such", "../no", "a/b/c", "no such"):
        with raises_problem("tokenizer-not-found", contains=path):
            build_hf(path)


def test_a_folder_that_cannot_be_loaded_is_reported_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("no tokenizer")
    with raises_problem("tokenizer-not-found", contains=str(tmp_path)):
        build_hf(tmp_path)
    (tmp_path / "tokenizer.model").write_text("damaged")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with raises_problem("sentencepiece-model-invalid", contains=str(tmp_path)):
        build_hf(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with raises_problem("library-missing", contains="sentencepiece"):
        build_hf(tmp_path)


def test_a_failed_download_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    download = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with raises_problem("tokenizer-download-failed", contains="nobody/nothing") as raised:
        build_hf("nobody/nothing")
    assert "no network" in str(raised.problem)


def test_code_in_a_folder_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers copies such code here before it imports it.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "letters.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    (tmp_path / "letters.py").write_text(f"{CODE}\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    auto_map = {"AutoTokenizer": [None, "letters.Letters"]}
    plain = build_hf(FOLDER / "tokenizer.json")
    end = plain.decode([plain.eod])
    config = {"tokenizer_class": "Letters", "auto_map": auto_map, "eos_token": end}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with raises_problem("tokenizer-code-not-trusted", contains=str(tmp_path)):
        build_hf(tmp_path)
    assert not (tmp_path / "ran").exists()
    trusted = build_hf(tmp_path, trust=True)
    assert (tmp_path / "ran").exists()
    assert (trusted.eod, trusted.vocab_size) == (plain.eod, plain.vocab_size)
    assert trusted.encode_batch(texts()) == plain.encode_batch(texts())
    assert trusted.encode_batch([]) == []


def test_a_trusted_folder_needs_only_its_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    plain = build_hf(tmp_path)
    end = plain.decode([plain.eod])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert build_hf(tmp_path, trust=True).encode_batch(texts()) == plain.encode_batch(texts())
