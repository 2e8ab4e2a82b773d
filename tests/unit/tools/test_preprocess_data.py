"""The command line of tools/preprocess_data.py, mostly in subprocesses."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from megatron_ds.cli.progress import Update
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.fileio import resumable
from tests.problems import printed_codes
from tools import inspect_dataset, preprocess_data

REPOSITORY = Path(__file__).resolve().parents[3]
TOOL = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
VOCAB = REPOSITORY / "tests" / "golden" / "tokenizers" / "vocab.txt"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOOL, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def corpus(folder: Path, count: int = 50) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n % 100} 1"}) + "\n" for n in range(count)))
    return path


def test_progress_lines_without_a_terminal(tmp_path: Path) -> None:
    prefix = tmp_path / "out"
    files = ["--input", corpus(tmp_path), "--output-prefix", prefix]
    work = ["--append-eod", "--workers", "2", "--chunk-size", "5", "--log-interval", "20"]
    completed = run(*files, *NULL, *work, "--dataset-impl", "mmap")
    assert completed.returncode == 0, completed.stderr
    lines = completed.stderr.splitlines()
    assert [line.split("(")[0] for line in lines] == [
        "Processed 20 documents ",
        "Processed 40 documents ",
    ]
    assert "docs/s, " in lines[0]
    assert lines[0].endswith("MB/s).")
    assert "150 tokens" in completed.stdout
    assert f"wrote {prefix}_text_document.bin and .idx" in completed.stdout
    assert IndexedDataset(f"{prefix}_text_document").get(3).tolist() == [3, 1, 100]


def test_flags_with_underscores_and_several_keys(tmp_path: Path) -> None:
    path = tmp_path / "in_put.jsonl"
    path.write_text('{"a": "1", "b": ""}\n')
    flags = ["--output_prefix", tmp_path / "o_p", "--json_keys", "a", "b", "--append_eod"]
    completed = run(f"--input={path}", *flags, *NULL)
    assert completed.returncode == 0, completed.stderr
    assert f"rejected: 1 empty text; listed in {tmp_path / 'o_p'}.quarantine" in completed.stdout
    names = sorted(os.listdir(tmp_path))
    assert names[1:] == ["o_p.progress.json", "o_p.quarantine"] + [
        f"o_p_{key}_document.{end}" for key in "ab" for end in ("bin", "idx", "tokenizer.json")
    ]


def test_standard_input_with_a_rejected_line_and_without_eod(tmp_path: Path) -> None:
    completed = subprocess.run(
        [*TOOL, "--input", "-", "--output-prefix", str(tmp_path / "out"), *NULL, "--workers", "1"],
        input='{"text": "1 2"}\n{"text": "3"\n',
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert "WARNING: without --append-eod" in completed.stderr
    lines = completed.stdout.splitlines()
    assert lines[0].startswith("Processed 1 documents (")
    assert lines[1].startswith("2 tokens (")
    assert lines[1].endswith(" tokens/s)")
    assert lines[2].startswith("time: start 0.")
    assert "encoding by NullTokenizer 0." in lines[2]
    assert lines[3] == f"rejected: 1 broken JSON; listed in {tmp_path / 'out'}.quarantine"
    assert "<stdin>" in (tmp_path / "out.quarantine").read_text()


def test_several_inputs_and_a_dataset_with_columns(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "a.txt").write_text("1 2\n\n3")
    (tmp_path / "b.csv").write_text("body\n4\n")
    out = ["--output-prefix", str(tmp_path / "out"), *NULL, "--append-eod", "--workers", "1"]
    files = ["--input", str(tmp_path / "a.txt"), str(tmp_path / "b.csv"), "--json-keys", "body"]
    assert preprocess_data.main([*files, "--text-document-unit", "paragraph", *out]) == 0
    data = IndexedDataset(tmp_path / "out_body_document")
    assert data.tokens.tolist() == [1, 2, 100, 3, 100, 4, 100]
    Dataset.from_dict({"body": ["5", "6"], "n": [1, 2]}).save_to_disk(tmp_path / "set")
    named = ["--hf-dataset", str(tmp_path / "set"), "--columns", "body"]
    assert preprocess_data.main([*named, *out]) == 0
    assert IndexedDataset(tmp_path / "out_body_document").tokens.tolist() == [5, 100, 6, 100]


def test_vocab_is_an_alias_of_vocab_file(tmp_path: Path, shared_data: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "Hello world"}\n')
    completed = run(
        *("--input", path, "--output-prefix", tmp_path / "out", "--append-eod"),
        *("--tokenizer-type", "GPT2BPETokenizer", "--vocab", shared_data / "gpt2-vocab.json"),
        *("--merge-file", shared_data / "gpt2-merges.txt", "--workers", "1"),
    )
    assert completed.returncode == 0, completed.stderr
    tokens = IndexedDataset(tmp_path / "out_text_document").tokens
    assert tokens.tolist() == [15496, 995, 50256]


def test_errors_name_all_flags_and_leave_no_files(tmp_path: Path) -> None:
    completed = run(
        *("--input", tmp_path / "none", "--output-prefix", tmp_path / "no" / "out"),
        *("--tokenizer-type", "GPT2BPETokenizer", "--vocab", "v.json", "--workers", "0"),
    )
    assert completed.returncode == 1
    assert "Traceback" not in completed.stderr
    for flag in ("--input", "--output-prefix", "--workers", "--vocab-file", "--merge-file"):
        assert flag in completed.stderr
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "1"}\n{"no": 1}\n')
    completed = run(
        "--input", path, "--output-prefix", tmp_path / "out", *NULL, "--fail-on-bad-document"
    )
    assert completed.returncode == 1
    assert f"{path}:2: " in completed.stderr
    assert "[rejected-document]" in completed.stderr
    assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_legacy_formats_are_rejected(tmp_path: Path) -> None:
    completed = run("--input", "x", "--output-prefix", "y", *NULL, "--dataset-impl", "lazy")
    assert completed.returncode == 2
    assert "[unsupported-value]" in completed.stderr


def test_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    main_end, terminal = pty.openpty()
    flags = ["--input", str(corpus(tmp_path)), "--output-prefix", str(tmp_path / "out"), *NULL]
    process = subprocess.Popen(
        [*TOOL, *flags],
        env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(main_end, 4096):
            shown += part
    except OSError:  # EIO when the writer closes a terminal
        pass
    os.close(main_end)
    assert process.wait() == 0
    assert b"50 documents" in shown
    assert b"100%" in shown


def test_ctrl_c_leaves_no_output(tmp_path: Path) -> None:
    pipe = tmp_path / "in.jsonl"
    corpus(tmp_path, 200_000)
    flags = ["--input", str(pipe), "--output-prefix", str(tmp_path / "out"), *NULL]
    process = subprocess.Popen(
        [*TOOL, *flags, "--append-eod", "--log-interval", "1", "--chunk-size", "1"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate()[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    # The work folder may remain if the run was slow to stop.
    assert set(os.listdir(tmp_path)) - {"out.work"} == {"in.jsonl"}


GOLDEN = REPOSITORY / "tests" / "golden" / "tokenizers"
GPT2 = ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
GPT2 += ["--vocab-file", str(GOLDEN / "vocab.json"), "--merge-file", str(GOLDEN / "merges.txt")]


def test_summary_names_the_encoding_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--input", str(GOLDEN / "corpus.jsonl"), "--output-prefix", str(tmp_path / "out")]
    outputs = set()
    for backend, library in (
        ("auto", "fastokens"),
        ("fastokens", "fastokens"),
        ("tokenizers", "tokenizers"),
    ):
        assert preprocess_data.main([*files, *GPT2, "--tokenizer-backend", backend]) == 0
        output = capsys.readouterr()
        assert f"encoding by {library} " in output.out
        assert output.err == ""
        outputs.add(
            tuple((tmp_path / f"out_text_document.{e}").read_bytes() for e in ("bin", "idx"))
        )
    assert outputs == {
        tuple((GOLDEN / f"GPT2BPETokenizer.{end}").read_bytes() for end in ("bin", "idx"))
    }


def test_missing_fast_library_is_reported_and_not_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    files = ["--input", str(GOLDEN / "corpus.jsonl"), "--output-prefix", str(tmp_path / "out")]
    assert preprocess_data.main([*files, *GPT2]) == 0
    output = capsys.readouterr()
    assert "encoding by tokenizers " in output.out
    assert output.err.count("\n") == 1
    assert "fastokens" in output.err
    assert "pip install" in output.err
    assert preprocess_data.main([*files, *GPT2, "--tokenizer-backend", "fastokens"]) == 1
    assert "--tokenizer-backend fastokens" in capsys.readouterr().err
    assert preprocess_data.main([*files, *NULL, "--tokenizer-backend", "fastokens"]) == 1
    assert "NullTokenizer" in capsys.readouterr().err


def test_time_line_lists_all_stages() -> None:
    parts = {"reading": 1.0, "waiting": 2.0, "writing": 0.5, "parsing": 3.0, "encoding": 4.0}
    assert preprocess_data.time_line(parts, 5.0, "x") == (
        "time: start 1.50 s, reading 1.00 s, waiting for workers 2.00 s, writing 0.50 s; all "
        "workers together: parsing 3.00 s, encoding by x 4.00 s"
    )


def test_sentences_are_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "1 2! 3."}\n')
    out = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    bert = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(VOCAB)]
    split = ["--split-sentences", "--lang", "danish", "--sentence-splitter", "rules"]
    assert preprocess_data.main([*out, *bert, *split, "--keep-newlines"]) == 0
    output = capsys.readouterr()
    prefix = str(tmp_path / "out_text_sentence")
    assert f"wrote {prefix}.bin and .idx" in output.out
    assert " s, splitting sentences 0." in output.out
    assert output.err == (
        "sentences are split by the built-in rules, which know only English abbreviations\n"
    )
    assert IndexedDataset(prefix).document_index.tolist() == [0, 2]
    assert inspect_dataset.main([prefix, "--json"]) == 0
    sentences = {"splitter": "rules", "version": 1, "keep_newlines": True}
    assert json.loads(capsys.readouterr().out)["sentences"] == sentences
    assert inspect_dataset.main([prefix]) == 0
    assert "sentences split by: splitter rules, version 1, keep_newlines True" in (
        capsys.readouterr().out
    )


def test_sentence_flags_are_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--input", str(corpus(tmp_path)), "--output-prefix", str(tmp_path / "out"), *NULL]
    unused = ["--keep-newlines", "--lang", "english", "--sentence-splitter", "rules"]
    assert preprocess_data.main([*out, *unused, "--append-eod"]) == 0
    warnings = capsys.readouterr().err
    assert printed_codes(warnings) == ["no-effect"]
    assert all(name in warnings for name in ("--keep-newlines", "--lang", "--sentence-splitter"))
    wrong = ["--split-sentences", "--lang", "klingon", "--workers", "0"]
    assert preprocess_data.main([*out, *wrong]) == 1
    error = capsys.readouterr().err
    assert "--lang" in error
    assert "--workers 0" in error


@contextmanager
def interrupted(*_: object) -> Iterator[Update]:
    """Progress that raises KeyboardInterrupt after three chunks."""
    numbers = count(1)

    def update(documents: int, input_bytes: int, description: str) -> None:
        if next(numbers) == 3:
            raise KeyboardInterrupt

    yield update


def test_interrupted_run_is_reported_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--input", str(corpus(tmp_path)), "--output-prefix", str(tmp_path / "out"), *NULL]
    flags += ["--append-eod", "--workers", "1", "--chunk-size", "5"]
    with monkeypatch.context() as patch:
        patch.setattr(resumable, "COMMIT_SECONDS", 0.0)
        patch.setattr(preprocess_data, "progress", interrupted)
        assert preprocess_data.main(flags) == 130
    assert str(tmp_path / "out.work") in capsys.readouterr().err
    assert preprocess_data.main([*flags, "--resume"]) == 0
    shown, output = capsys.readouterr()
    assert "50 documents (" in shown
    assert " of them before the interruption" in shown
    assert output.startswith("resuming after ")
    assert preprocess_data.main([*flags, "--resume"]) == 0
    shown, output = capsys.readouterr()
    assert str(tmp_path / "out") in output
    assert shown == f"50 documents, 150 tokens\nin {tmp_path}/out_text_document.bin and .idx\n"
    assert preprocess_data.main([*flags, "--resume", "--json-keys", "a"]) == 1
    error = capsys.readouterr().err
    assert "--json-keys" in error
    assert "[resumed-run-differs]" in error


def test_partitions_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input", str(corpus(tmp_path)), *NULL, "--append-eod", "--workers", "3"]
    for name, more in (("one", []), ("four", ["--partitions", "4"])):
        assert preprocess_data.main([*flags, *more, "--output-prefix", str(tmp_path / name)]) == 0
    warning = capsys.readouterr().err
    assert "--partitions" in warning
    assert "[ignored-flag]" in warning
    for suffix in ("bin", "idx"):
        one, four = (tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "four"))
        assert one.read_bytes() == four.read_bytes()
