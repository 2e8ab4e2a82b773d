"""The command line of tools/merge_datasets.py: folders and lists of inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ds.data.token_files import merge_program as merge_datasets
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.preprocess import command as preprocess_data
from tests.problems import printed_codes
from tests.token_files import write_texts
from tests.unit.conftest import Run, closed_stdout

TOOL = merge_datasets
NULL = ["--tokenizer-type", "NullTokenizer", "--append-eod", "--workers", "1", "--vocab-size"]


def tokens(folder: Path, name: str, numbers: range, vocab_size: int = 100) -> str:
    path = write_texts(folder / f"{name}.jsonl", [f"{number} 1" for number in numbers])
    prefix = folder / name
    flags = ["--input", str(path), "--output-prefix", str(prefix), *NULL, str(vocab_size)]
    assert preprocess_data.main(flags) == 0
    return f"{prefix}_text_document"


def test_merged_files_equal_a_single_preprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Claim (data): merging token files gives the bytes of preprocessing all text at once"""
    (tmp_path / "parts").mkdir()
    parts = [
        tokens(tmp_path / "parts", name, numbers)
        for name, numbers in (("a", range(10)), ("b", range(10, 25)))
    ]
    complete = tokens(tmp_path, "complete", range(25))
    monkeypatch.chdir(tmp_path)
    run("--input", "parts", "--output-prefix", "x")
    run("--datasets", *parts, "--output_prefix", "y")
    for suffix in (".bin", ".idx"):
        wanted = Path(complete + suffix).read_bytes()
        assert Path("x" + suffix).read_bytes() == Path("y" + suffix).read_bytes() == wanted
    run("--datasets", *parts[::-1], "--output-prefix", "z")
    assert IndexedDataset("z").get(0).tolist() == [10, 1, 100]


def test_different_tokenizers_are_rejected(tmp_path: Path, run: Run) -> None:
    a = tokens(tmp_path, "a", range(2))
    b = tokens(tmp_path, "b", range(2))
    other = tokens(tmp_path, "c", range(2), vocab_size=200)
    out = ["--output-prefix", str(tmp_path / "out")]
    named = Path(f"{a}.tokenizer.json")
    run("--datasets", a, b, *out)
    assert (tmp_path / "out.tokenizer.json").read_bytes() == named.read_bytes()
    error = run("--datasets", a, other, *out, status=1).err
    assert printed_codes(error) == ["merging-different-tokenizers"]
    named.unlink()
    run("--datasets", a, b, *out)
    assert not (tmp_path / "out.tokenizer.json").exists()


def test_unsupported_flags_and_missing_inputs_are_reported(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tokens(tmp_path, "a", range(2))
    capsys.readouterr()
    out = ["--output-prefix", str(tmp_path / "out")]
    extra = ["--merge", "distributed", "--torch-backend", "mpi", "--local_rank", "0"]
    printed = run("--datasets", part, *out, *extra)
    assert printed_codes(printed.err) == ["ignored-flag"]
    assert all(name in printed.err for name in extra[::2])
    assert "1 dataset: 2 documents, 2 sequences, 6 tokens" in printed.out
    error = run("--datasets", part, tmp_path / "none", *out, status=1).err
    assert f"{tmp_path / 'none'}.idx" in error
    found = printed_codes(run(*out, "--multimodal", status=2).err)
    assert found == ["unsupported-flag", "merge-input-not-unique"]


def test_closed_stdout_is_not_an_error(tmp_path: Path, run: Run) -> None:
    with closed_stdout():
        prefix = tokens(tmp_path, "a", range(2))
        printed = run("--datasets", prefix, prefix, "--output-prefix", tmp_path / "x")
    assert "Traceback" not in printed.err


def test_warning_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "image.png").touch()
    write_texts(tmp_path / "in" / "a.jsonl", ["1"])
    flags = ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "x")]
    assert preprocess_data.main([*flags, *NULL, "100"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "image.png" in line]
    assert line.startswith("WARNING: --input ")
