"""The command line of tools/merge_datasets.py: folders and lists of inputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_ds.data.indexed_dataset import IndexedDataset
from tests.problems import printed_codes
from tools import merge_datasets, preprocess_data

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod"]


def tokens(folder: Path, name: str, numbers: range) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} 1"}) + "\n" for n in numbers))
    prefix = folder / name
    flags = ["--input", str(path), "--output-prefix", str(prefix), "--workers", "1", *NULL]
    assert preprocess_data.main(flags) == 0
    return f"{prefix}_text_document"


def test_merged_files_equal_a_single_preprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts").mkdir()
    parts = [
        tokens(tmp_path / "parts", name, numbers)
        for name, numbers in (("a", range(10)), ("b", range(10, 25)))
    ]
    complete = tokens(tmp_path, "complete", range(25))
    monkeypatch.chdir(tmp_path)
    assert merge_datasets.main(["--input", "parts", "--output-prefix", "x"]) == 0
    assert merge_datasets.main(["--datasets", *parts, "--output_prefix", "y"]) == 0
    for suffix in (".bin", ".idx"):
        wanted = Path(complete + suffix).read_bytes()
        assert Path("x" + suffix).read_bytes() == Path("y" + suffix).read_bytes() == wanted
    assert merge_datasets.main(["--datasets", *parts[::-1], "--output-prefix", "z"]) == 0
    assert IndexedDataset("z").get(0).tolist() == [10, 1, 100]


def test_different_tokenizers_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tokens(tmp_path, "a", range(2)), tokens(tmp_path, "b", range(2))
    out = ["--output-prefix", str(tmp_path / "out")]
    named = Path(f"{a}.tokenizer.json")
    assert merge_datasets.main(["--datasets", a, b, *out]) == 0
    assert (tmp_path / "out.tokenizer.json").read_bytes() == named.read_bytes()
    other = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "c")]
    assert preprocess_data.main([*other, *NULL[:3], "200", "--workers", "1"]) == 0
    capsys.readouterr()
    assert merge_datasets.main(["--datasets", a, f"{tmp_path}/c_text_document", *out]) == 1
    assert printed_codes(capsys.readouterr().err) == ["merging-different-tokenizers"]
    named.unlink()
    assert merge_datasets.main(["--datasets", a, b, *out]) == 0
    assert not (tmp_path / "out.tokenizer.json").exists()


def test_unsupported_flags_and_missing_inputs_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tokens(tmp_path, "a", range(2))
    out = ["--output-prefix", str(tmp_path / "out")]
    extra = ["--merge", "distributed", "--torch-backend", "mpi", "--local_rank", "0"]
    assert merge_datasets.main(["--datasets", part, *out, *extra]) == 0
    printed = capsys.readouterr()
    assert printed_codes(printed.err) == ["ignored-flag"]
    assert all(name in printed.err for name in extra[::2])
    assert "1 datasets: 2 documents, 2 sequences, 6 tokens" in printed.out
    assert merge_datasets.main(["--datasets", part, str(tmp_path / "none"), *out]) == 1
    assert f"{tmp_path / 'none'}.idx" in capsys.readouterr().err
    assert merge_datasets.main([*out, "--multimodal"]) == 2
    found = printed_codes(capsys.readouterr().err)
    assert found == ["unsupported-flag", "merge-input-not-unique"]


def test_closed_stdout_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        prefix = tokens(tmp_path, "a", range(2))
        flags = ["--datasets", prefix, prefix, "--output-prefix", str(tmp_path / "x")]
        assert merge_datasets.main(flags) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_warning_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "image.png").touch()
    tokens(tmp_path / "in", "a", range(2))
    capsys.readouterr()
    flags = ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "x"), *NULL]
    assert preprocess_data.main([*flags, "--workers", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "image.png" in line]
    assert len(lines) == 1
    assert lines[0].startswith("WARNING: --input ")
