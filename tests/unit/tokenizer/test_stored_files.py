"""A copy of a tokenizer's files gives the same ids in another place, without the originals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from megatron_ds.config import TokenizerConfig
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.tokenizer.end_tokens import read_end_tokens
from megatron_ds.tokenizer.stored_files import read_files, with_copies
from tests.unit.tokenizer.test_golden import FILES, FOLDER, texts

CASES: dict[str, dict[str, Any]] = {
    **{kind: {"tokenizer_type": kind, **fields} for kind, fields in FILES.items() if fields},
    "a folder": {"tokenizer_type": "HFTokenizer", "tokenizer_model": "."},
    "a name on the Hub": {"tokenizer_type": "HFTokenizer", "tokenizer_model": "someone/model"},
}


@pytest.mark.parametrize("case", CASES)
def test_copy(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    copy = tmp_path / "copy"
    elsewhere = tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    for path in FOLDER.iterdir():
        if path.suffix in (".json", ".txt", ".model") and path.stem.islower():
            shutil.copy(path, here)
    # The token that ends documents, in a file that no flag names.
    (here / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    (here / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    monkeypatch.chdir(here)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(return_value=str(here)))
    settings = CASES[case]
    config = TokenizerConfig(**settings)
    original = build_tokenizer(config)
    ids = original.encode_batch(texts())

    for name, content in read_files(config).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    monkeypatch.chdir(elsewhere)
    shutil.rmtree(here)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError))
    copied = build_tokenizer(TokenizerConfig(**with_copies(settings, copy)))

    assert copied.fingerprint.same_as(original.fingerprint)
    assert copied.eod == original.eod
    is_known = copied.folder is not None
    assert read_end_tokens(copied.folder) == ({3, 5} if is_known else set())
    assert is_known == (config.tokenizer_type == "HFTokenizer")
    assert copied.encode_batch(texts()) == ids
