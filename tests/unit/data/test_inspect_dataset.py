"""The command line of tools/inspect_dataset.py: text and JSON output, samples of a run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.token_files import inspect_pair as inspect_dataset
from megatron_ds.data.validation import DataFiles
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import printed_codes
from tests.token_files import write_pair
from tests.unit.conftest import Run, closed_stdout

TOOL = inspect_dataset
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def test_text_and_json_agree(tmp_path: Path, run: Run) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2, 100], [3, 100], [4]])
    flags = [prefix, "--check", "--documents", "0", "1-2", "--max-tokens", "2", *NULL]
    shown = run(*flags).out
    assert "3 documents (0 empty), 3 sequences, 6 tokens" in shown
    assert "tokens 1 to 100" in shown
    assert "end with the EOD token: 2" in shown
    assert "--- document 0, 3 tokens\n1 2\n--- document 1, 2 tokens\n3 100\n" in shown
    found = json.loads(run(*flags, "--json").out)
    assert found["summary"]["tokens"] == 6
    assert found["check"]["documents_ending_with_eod"] == 2
    assert found["documents"][0] == {"number": 0, "tokens": 3, "ids": [1, 2], "text": "1 2"}
    assert [entry["number"] for entry in found["documents"]] == [0, 1, 2]


def test_samples_are_those_of_a_run(tmp_path: Path, run: Run) -> None:
    prefix = write_pair(tmp_path / "p", [[n, n + 1, n + 2, 100] for n in range(50)])
    tokenizer = NullTokenizer(100)
    built = build_datasets(
        DataFiles(
            DataConfig(data_path=(prefix,), split="8,2", data_cache_path=str(tmp_path / "cache"))
        ),
        seq_length=6,
        seed=7,
        num_samples=(60, 10, 0),
        tokenizer_fingerprint=tokenizer.fingerprint.digest,
        vocab_size=tokenizer.vocab_size,
    )
    flags = [prefix, "--seq-length", "6", "--seed", "7", "--split", "8,2", "--json", *NULL]
    for part, count, dataset in (("train", 60, built.train), ("valid", 10, built.valid[""])):
        wanted = ["--samples", "0-4", "9", "--num-samples", str(count), "--part", part]
        found = json.loads(run(*flags, *wanted).out)["samples"]
        numbers = [0, 1, 2, 3, 4, 9]
        assert [entry["ids"] for entry in found] == [dataset[at].tolist() for at in numbers]
        assert [entry["id"] for entry in found] == [dataset.sample_id(at) for at in numbers]
    assert not (tmp_path / "index-cache").exists()


def test_comparison_reports_the_first_difference(tmp_path: Path, run: Run) -> None:
    left = write_pair(tmp_path / "a", [[1], [2, 3, 4]])
    right = write_pair(tmp_path / "b", [[1], [2, 7, 4]])
    assert "difference: none" in run(left, "--compare", left).out
    shown = run(left, "--compare", right, status=1).out
    assert f"token 1 of document 1 is 3 in {left} and 7 in {right}" in shown
    assert f"{right}, around it: '2 7 4'" in shown


def test_damaged_files_are_rejected(tmp_path: Path, run: Run) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2], [200]])
    assert "first is 200 in document 1" in run(prefix, "--check", *NULL, status=1).err
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\0\0")
    error = run(prefix, status=1).err
    assert f"{prefix}.bin has 8 bytes, but {prefix}.idx describes 6" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "status", "code"),
    [
        ("--samples 1", 2, "samples-without-length"),
        ("--documents -1", 2, "not-a-range"),
        ("--check --vocab-size 5", 2, "vocab-size-without-tokenizer"),
        ("--samples 1 --seq-length 0", 2, "out-of-range"),
        ("--samples 5 --seq-length 1 --num-samples 5", 1, "sample-beyond-run"),
        ("--samples 5 --seq-length 1 --split 1,0 --part valid", 1, "split-without-documents"),
    ],
)
def test_invalid_options_are_rejected(
    tmp_path: Path, run: Run, flags: str, status: int, code: str
) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2, 3]])
    assert printed_codes(run(prefix, *flags.split(), status=status).err) == [code]


def test_a_missing_document_is_reported(tmp_path: Path, run: Run) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2, 3]])
    assert "document 1" in run(prefix, "--documents", "1", status=1).err


@pytest.mark.parametrize("flags", [[], ["--json"], ["--documents", "0-1999"]])
def test_closed_stdout_exits_silently(tmp_path: Path, run: Run, flags: list[str]) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2]] * 2000)
    with closed_stdout():
        assert run(prefix, *flags, status=128 + signal.SIGPIPE).err == ""
