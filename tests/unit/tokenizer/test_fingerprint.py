"""Tokenizer fingerprints next to token files, and training with the data of another tokenizer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.data.token_files.indexed_dataset import TOKENIZER_SUFFIX, IndexedDataset
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.data.token_files.tokenizer_metadata import (
    merged_metadata,
    read_tokenizer,
    tokenizer_mismatch,
)
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.tokenizer.base import JsonTokenizer
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint
from megatron_ds.tokenizer.gpt2 import END_OF_TEXT
from megatron_ds.tokenizer.huggingface import build_hf_tokenizer
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.training.start.preflight import check
from tests.problems import raises_problem
from tests.token_files import write_pair
from tests.unit.tokenizer.test_golden import FILES, FOLDER, tokenizer_of
from tests.unit.tokenizer.test_tokenizers import gpt2_files

HASHES = {"vocab.json": "12" * 32, "merges.txt": "34" * 32}
ONE = TokenizerFingerprint("A", HASHES, 9, 8, {"--x": 1})
SPECIAL = {
    "content": END_OF_TEXT,
    "special": True,
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
}
MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --eval-iters 0 --split 1,0,0"
)


def pair(prefix: Path, made_by: bytes | None, tokens: int = 40) -> str:
    return write_pair(prefix, [np.arange(tokens) % 7], np.uint16, made_by)


def test_json_round_trip() -> None:
    again = TokenizerFingerprint.from_json(ONE.to_json())
    assert again == ONE
    assert again.same_as(ONE)
    assert str(ONE) == (
        "A (vocab.json 121212121212, merges.txt 343434343434, --x 1, 9 ids, end of document 8)"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "B"},
        {"files": {"v": "34" * 32, "m": "12" * 32}},
        {"vocab_size": 10},
        {"eod": 7},
        {"settings": {"--x": 2}},
    ],
)
def test_every_value_counts_but_file_names(change: dict[str, Any]) -> None:
    assert ONE.same_as(dataclasses.replace(ONE, files={"v": "12" * 32, "m": "34" * 32}))
    assert not ONE.same_as(dataclasses.replace(ONE, **change))


def test_equal_vocabularies_are_the_same_tokenizer_whatever_it_is_called(tmp_path: Path) -> None:
    """Token files of GPT2BPETokenizer fit our Hugging Face export of it, and the reverse."""
    files = gpt2_files(tmp_path)
    plain = build_tokenizer(files)
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_TEXT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    folder = build_hf_tokenizer(str(tmp_path), trust_remote_code=False)
    assert isinstance(plain, JsonTokenizer)
    complete = {**json.loads(plain.tokenizer_json()), "added_tokens": [SPECIAL | {"id": plain.eod}]}
    names = [plain.fingerprint, folder.fingerprint]

    def as_file(**changes: Any) -> TokenizerFingerprint:
        path = tmp_path / "other" / "tokenizer.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**complete, **changes}))
        return build_hf_tokenizer(str(path), trust_remote_code=False).fingerprint

    assert all(one.same_as(other) for one in names for other in (*names, as_file()))
    prefix = pair(tmp_path / "p", plain.fingerprint.to_json())
    assert list(tokenizer_mismatch(prefix, folder.fingerprint)) == []
    different = (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {**complete["pre_tokenizer"], "add_prefix_space": True}},
        {"model": {**complete["model"], "merges": complete["model"]["merges"][1:]}},
        {"added_tokens": [SPECIAL | {"id": plain.eod, "lstrip": True}]},
    )
    assert not any(plain.fingerprint.same_as(as_file(**changes)) for changes in different)
    other_eod = dataclasses.replace(folder.fingerprint, eod=0)
    assert not plain.fingerprint.same_as(other_eod)


def test_records_of_older_versions_are_compared_by_files(tmp_path: Path) -> None:
    now = build_tokenizer(gpt2_files(tmp_path)).fingerprint
    old = {name: value for name, value in json.loads(now.to_json()).items() if name != "content"}
    prefix = pair(tmp_path / "p", json.dumps(old).encode())
    assert list(tokenizer_mismatch(prefix, now)) == []
    changed = dataclasses.replace(now, files={"vocab.json": "0"})
    assert len(list(tokenizer_mismatch(prefix, changed))) == 1


RECORD = json.loads(ONE.to_json())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"kind": "A"}',
        b"[" * 100_000,
        *(
            json.dumps({**RECORD, **change}).encode()
            for change in ({"eod": "8"}, {"files": ["x"]}, {"vocab_size": True})
        ),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    prefix = str(tmp_path / "p")
    Path(f"{prefix}{TOKENIZER_SUFFIX}").write_bytes(content)
    with pytest.raises(ValueError, match=r"p\.tokenizer\.json"):
        read_tokenizer(prefix)
    assert f"{prefix}{TOKENIZER_SUFFIX}" in str(next(iter(tokenizer_mismatch(prefix, ONE))))


def test_a_new_pair_removes_the_old_fingerprint(tmp_path: Path) -> None:
    pair(tmp_path / "p", ONE.to_json())
    assert read_tokenizer(str(tmp_path / "p")) == ONE
    pair(tmp_path / "p", None, tokens=3)
    assert read_tokenizer(str(tmp_path / "p")) is None
    assert list(tokenizer_mismatch(str(tmp_path / "p"), ONE)) == []
    assert IndexedDataset(tmp_path / "p").get(0).size == 3
    with pytest.raises(RuntimeError), pair_writer(tmp_path / "p", np.uint16, b"{}"):
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_merging_pairs_of_different_tokenizers_is_an_error(tmp_path: Path) -> None:
    other = TokenizerFingerprint("B", {}, 9, 8)
    metadata = {"a": ONE.to_json(), "b": None, "c": other.to_json()}
    a, b, c = (pair(tmp_path / name, content) for name, content in metadata.items())
    with raises_problem("merging-different-tokenizers", contains=str(ONE)) as raised:
        merged_metadata([a, b, c])
    assert all(str(value) in str(raised.problem) for value in (a, c, other))


def problems(prefix: str, tokenizer: str) -> list[Problem]:
    argv = f"{MODEL} --data-path {prefix} {tokenizer}".split()

    def checked(config: Config, *arguments: Any) -> list[Problem]:
        return check(config, LoadPlan(RunFolders()), *arguments)[0]

    return build_config(argv, world_size=1, warn=lambda _: None, check=checked)[1]


def test_training_rejects_data_of_another_tokenizer(tmp_path: Path) -> None:
    """Claim (tokenizers): training rejects data of another tokenizer"""
    made_with = NullTokenizer(100).fingerprint
    prefix = pair(tmp_path / "p", made_with.to_json())
    assert problems(prefix, "--tokenizer-type NullTokenizer --vocab-size 100") == []
    (found,) = problems(prefix, "--tokenizer-type NullTokenizer --vocab-size 120")
    assert all(str(value) in found for value in (prefix, made_with, NullTokenizer(120).fingerprint))
    wrong = pair(tmp_path / "wrong", ONE.to_json())
    blend = f"0.5 {prefix} 0.5 {wrong}"
    (found,) = problems(blend, "--tokenizer-type NullTokenizer --vocab-size 100")
    assert (wrong in found, f"{prefix}.t" in found) == (True, False)
    (tmp_path / f"p{TOKENIZER_SUFFIX}").unlink()
    assert problems(prefix, "--tokenizer-type NullTokenizer --vocab-size 120") == []


@pytest.mark.parametrize("kind", FILES)
def test_golden_files_match_only_their_own_kind(kind: str) -> None:
    same = {"GPT2BPETokenizer", "HFTokenizer"}  # their files are of one vocabulary
    for other in FILES:
        found = list(tokenizer_mismatch(str(FOLDER / kind), tokenizer_of(other).fingerprint))
        assert bool(found) == (kind != other and not {kind, other} <= same), other
