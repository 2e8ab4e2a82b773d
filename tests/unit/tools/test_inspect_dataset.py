"""The command line of tools/inspect_dataset.py: text and JSON output, samples of a run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.indexed_writer import pair_writer
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import printed_codes
from tools.inspect_dataset import main

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def pair(prefix: Path, documents: list[list[int]]) -> str:
    with pair_writer(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def test_text_and_json_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "p", [[1, 2, 100], [3, 100], [4]])
    flags = [prefix, "--check", "--documents", "0", "1-2", "--max-tokens", "2", *NULL]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "3 documents (0 empty), 3 sequences, 6 tokens" in shown
    assert "tokens 1 to 100" in shown
    assert "end with the EOD token: 2" in shown
    assert "--- document 0, 3 tokens\n1 2\n--- document 1, 2 tokens\n3 100\n" in shown
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["tokens"] == 6
    assert found["check"]["documents_ending_with_eod"] == 2
    assert found["documents"][0] == {"number": 0, "tokens": 3, "ids": [1, 2], "text": "1 2"}
    assert [entry["number"] for entry in found["documents"]] == [0, 1, 2]


def test_samples_are_those_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "p", [[n, n + 1, n + 2, 100] for n in range(50)])
    tokenizer = NullTokenizer(100)
    run = build_datasets(
        DataConfig(data_path=(prefix,), split="8,2", data_cache_path=str(tmp_path / "cache")),
        seq_length=6,
        seed=7,
        num_samples=(60, 10, 0),
        tokenizer_fingerprint=tokenizer.fingerprint.digest,
        vocab_size=tokenizer.vocab_size,
    )
    flags = [prefix, "--seq-length", "6", "--seed", "7", "--split", "8,2", "--json", *NULL]
    for part, count, dataset in (("train", 60, run.train), ("valid", 10, run.valid[""])):
        assert dataset is not None
        wanted = ["--samples", "0-4", "9", "--num-samples", str(count), "--part", part]
        assert main([*flags, *wanted]) == 0
        found = json.loads(capsys.readouterr().out)["samples"]
        numbers = [0, 1, 2, 3, 4, 9]
        assert [entry["ids"] for entry in found] == [dataset[at].tolist() for at in numbers]
        assert [entry["id"] for entry in found] == [dataset.sample_id(at) for at in numbers]
    assert not (tmp_path / "index-cache").exists()


def test_comparison_reports_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = pair(tmp_path / "a", [[1], [2, 3, 4]])
    right = pair(tmp_path / "b", [[1], [2, 7, 4]])
    assert main([left, "--compare", left]) == 0
    assert "difference: none" in capsys.readouterr().out
    assert main([left, "--compare", right]) == 1
    shown = capsys.readouterr().out
    assert f"token 1 of document 1 is 3 in {left} and 7 in {right}" in shown
    assert f"{right}, around it: '2 7 4'" in shown


def test_damaged_files_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "p", [[1, 2], [200]])
    assert main([prefix, "--check", *NULL]) == 1
    assert "first is 200 in document 1" in capsys.readouterr().err
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\0\0")
    assert main([prefix]) == 1
    error = capsys.readouterr().err
    assert f"{prefix}.bin has 8 bytes, but {prefix}.idx describes 6" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--samples", "1"], "samples-without-length"),
        (["--documents", "-1"], "not-a-range"),
        (["--check", "--vocab-size", "5"], "vocab-size-without-tokenizer"),
        (["--samples", "1", "--seq-length", "0"], "out-of-range"),
    ],
)
def test_rejects_invalid_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: str
) -> None:
    assert main([pair(tmp_path / "p", [[1]]), *flags]) == 2
    assert printed_codes(capsys.readouterr().err) == [code]


def test_rejects_missing_documents_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = pair(tmp_path / "p", [[1, 2, 3]])
    assert main([prefix, "--documents", "1"]) == 1
    assert "document 1" in capsys.readouterr().err
    flags = [prefix, "--seq-length", "1", "--split", "1,0", "--samples", "5"]
    assert main([*flags, "--num-samples", "5"]) == 1
    assert printed_codes(capsys.readouterr().err) == ["sample-beyond-run"]
    assert main([*flags, "--part", "valid"]) == 1
    assert printed_codes(capsys.readouterr().err) == ["split-without-documents"]


@pytest.mark.parametrize("flags", [[], ["--json"], ["--documents", "0-1999"]])
def test_closed_stdout_exits_silently(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    prefix = pair(tmp_path / "p", [[1, 2]] * 2000)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main([prefix, *flags]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""
