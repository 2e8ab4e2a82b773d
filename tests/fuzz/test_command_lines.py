"""Whole command lines over malformed files: exit status and words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.cli import arguments
from megatron_ds.config.problems import Problem
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.engine.ds_config_merge import merge_file
from megatron_ds.training import preflight
from tests.token_files import write_pair
from tools import preprocess_data

NULL_SIZE = "--tokenizer-type NullTokenizer --vocab-size"
NULL = f"{NULL_SIZE} 100"
FILES = "--input in.jsonl --output-prefix out --workers 1 --fail-on-bad-document"
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file in.jsonl"
HF = "--tokenizer-type HFTokenizer --tokenizer-model"
GOOD = b'{"text": "1"}\n'
PREPROCESS: dict[str, tuple[bytes, str, list[str]]] = {
    "broken JSON": (b'{"text": "1"}\n{"text": \n', NULL, ["in.jsonl:2: "]),
    "an empty file": (b"", NULL, ["in.jsonl: "]),
    "invalid UTF-8": (b'{"text": "\xff"}\n', NULL, ["in.jsonl:1: "]),
    "nested deeply": (b"[" * 100_000, NULL, ["in.jsonl:1: "]),
    "two bad lines": (b'5\n{"a": "1"}\n', NULL, ["in.jsonl:1: ", "in.jsonl:2: "]),
    "a broken vocabulary": (GOOD, GPT2, ["--vocab-file vocab.json: "]),
    "a broken tokenizer.json": (GOOD, f"{HF} vocab.json", ["--tokenizer-model vocab.json: "]),
    "a vocabulary too large": (GOOD, f"{NULL_SIZE} {1 << 40}", ["--vocab-size 1099511627776: "]),
}


def check(*arguments: Any) -> list[Problem]:
    return preflight.check(*arguments)[0]


def check_messages(shown: str, messages: list[str]) -> None:
    assert "Traceback" not in shown
    assert [message for message in messages if message not in shown] == []


@pytest.mark.parametrize("name", PREPROCESS)
def test_preprocess_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content, tokenizer, messages = PREPROCESS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": ')
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "7"}\n')
    files = FILES.split()
    assert preprocess_data.main([*files, *NULL.split()]) == 0
    (tmp_path / "in.jsonl").write_bytes(content)
    capsys.readouterr()
    assert preprocess_data.main([*files, *tokenizer.split()]) == 1
    check_messages(capsys.readouterr().err, messages)
    assert IndexedDataset("out_text_document").get(0).tolist() == [7]
    names = sorted(path.name for path in tmp_path.iterdir())
    pair = [f"out_text_document{end}" for end in (".bin", ".idx", ".tokenizer.json")]
    assert names == ["in.jsonl", "out.progress.json", *pair, "vocab.json"]


MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --train-iters 10 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --split 1"
)
BAD = ["--deepspeed_config", "bad.json"]
PRETRAIN: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "an index cut": ({"p.idx": lambda content: content[:-5]}, [], ["p.idx has "]),
    "tokens cut": ({"p.bin": lambda content: content[:-1]}, [], ["p.bin has 19 bytes"]),
    "an index of text": ({"p.idx": lambda content: b"text"}, [], ["p.idx is ", "MMIDIDX"]),
    "no tokens": ({"p.bin": lambda content: None}, [], ["p.bin"]),
    "a broken DeepSpeed file": ({}, BAD, ["bad.json:1:2: "]),
    "a strange split": ({}, ["--split", "nan"], ["--split nan"]),
    "a strange blend": ({}, ["--data-path", "-1", "p"], ["'-1'"]),
    "a broken tokenizer": ({}, [*HF.split(), "bad.json"], ["--tokenizer-model bad.json: "]),
    "several at once": (
        {"p.idx": lambda content: content[:20]},
        BAD,
        ["bad.json:1:2: ", "p.idx is "],
    ),
}


@pytest.mark.parametrize("name", PRETRAIN)
def test_pretrain_gpt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, flags, messages = PRETRAIN[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    write_pair("p", [range(10)])
    argv = [*MODEL.split(), "--data-path", "p", *NULL.split()]

    def run(argv: list[str]) -> None:
        arguments.parse(argv, complete=merge_file, check=check)

    run(argv)  # without the damage there is nothing to say
    for file, change in changes.items():
        content = change((tmp_path / file).read_bytes())
        (tmp_path / file).unlink()
        if content is not None:
            (tmp_path / file).write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        run([*argv, *flags])  # of a flag that is given twice, the last counts
    assert ended.value.code == 2
    check_messages(capsys.readouterr().err, messages)


def test_a_cut_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pair("p", [range(10)])
    folder = tmp_path / "save" / "global_step5"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps([1]))
    (folder / "manifest.json").write_text("{")
    argv = [*MODEL.split(), "--data-path", "p", *NULL.split(), "--load", "save"]
    with pytest.raises(SystemExit):
        arguments.parse([*argv, "--exit-on-missing-checkpoint"], complete=merge_file, check=check)
    assert "global_step5" in capsys.readouterr().err
