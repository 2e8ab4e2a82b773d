"""The tokenizer that a checkpoint stores: complete, verified, and compared on a resume.

Claim (checkpoints): a checkpoint generates from any folder without the original tokenizer files
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ds.checkpoint.files.native_settings import select_native, tokenizer_config
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import Checkpoint, read_manifest
from megatron_ds.checkpoint.run_checkpoints import StoredTokenizer
from megatron_ds.config import TokenizerConfig
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.inference import load_checkpoint
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint
from megatron_ds.tokenizer.stored_files import read_files
from tests.problems import raises_problem
from tests.unit.checkpoint.fakes import Managers, load, save, state_at
from tests.unit.tokenizer.test_tokenizers import gpt2_files

WithTokenizer = Callable[..., CheckpointManager]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TokenizerConfig:
    (tmp_path / "files").mkdir()
    return gpt2_files(tmp_path / "files")


@pytest.fixture
def with_tokenizer(manager: Managers, tokenizer: TokenizerConfig) -> WithTokenizer:
    """with_tokenizer(**fields): the manager of a run with this tokenizer."""
    fingerprint = build_tokenizer(tokenizer).fingerprint
    files = read_files(tokenizer)

    def make(fingerprint: TokenizerFingerprint = fingerprint, **fields: bool) -> CheckpointManager:
        changed = dataclasses.replace(tokenizer, **fields)
        return manager(StoredTokenizer(fingerprint, files), tokenizer=changed)

    return make


def found_in(folder: Path) -> Checkpoint:
    return select_native(folder, print)


def test_generation_needs_no_file_outside_the_checkpoint(
    with_tokenizer: WithTokenizer,
    folder: Path,
    tokenizer: TokenizerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = build_tokenizer(tokenizer).fingerprint
    save(with_tokenizer(), 4)
    for path in (tmp_path / "files").iterdir():
        path.rename(path.with_suffix(".moved"))
    moved = tmp_path / "another machine"
    folder.rename(moved)
    monkeypatch.chdir(moved)
    config = tokenizer_config(found_in(Path(".")))
    assert build_tokenizer(config).fingerprint == expected


def test_a_damaged_tokenizer_file_is_found(with_tokenizer: WithTokenizer, folder: Path) -> None:
    checkpoints = with_tokenizer()
    save(checkpoints, 4, 8)
    name = "tokenizer/merge_file/merges.txt"
    assert name in read_manifest(folder / "global_step8")
    content = (folder / "global_step8" / name).read_bytes()
    (folder / "global_step8" / name).write_bytes(content.replace(b"h e", b"e h"))
    assert found_in(folder).iteration == 4
    assert load(checkpoints)[0] == state_at(4)


def test_flags_replace_a_tokenizer_and_its_code_needs_this_users_consent(
    with_tokenizer: WithTokenizer, folder: Path
) -> None:
    save(with_tokenizer(trust_remote_code=True), 4)
    stored = dataclasses.asdict(tokenizer_config(found_in(folder)))
    source = SourceCheckpoint(folder, "native", ModelSettings({}, tokenizer=stored), {})
    with raises_problem("checkpoint-tokenizer-runs-code", "trust_remote_code"):
        load_checkpoint.tokenizer_config(source, {})
    given = {"trust_remote_code": True, "merge_file": "mine.txt"}
    config = load_checkpoint.tokenizer_config(source, given)
    assert config.trust_remote_code
    assert config.merge_file == "mine.txt"


def test_a_resume_with_another_tokenizer_is_rejected(
    with_tokenizer: WithTokenizer, tokenizer: TokenizerConfig
) -> None:
    save(with_tokenizer(), 4)
    same = build_tokenizer(tokenizer).fingerprint
    files = {"vocab.json": "1", "merges.txt": "2"}
    other = dataclasses.replace(same, files=files, content="3")
    exported = dataclasses.replace(same, kind="HFTokenizer", files=files)
    with raises_problem("resume-tokenizer-changed", "tokenizer_type"):
        with_tokenizer(other).restoring.select()
    renamed = dataclasses.replace(same, files=dict(zip("ab", same.files.values(), strict=True)))
    without_text = TokenizerFingerprint("NullTokenizer", {}, same.vocab_size, same.eod)
    for fingerprint in (same, renamed, exported, without_text):
        assert with_tokenizer(fingerprint).restoring.select() is not None
