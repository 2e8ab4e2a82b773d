"""The command line of tools/preprocess_data.py."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from megatron_ds.data.token_files import inspect_pair as inspect_dataset
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.preprocess import command as preprocess_data
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import Progress
from tests.problems import printed_codes
from tests.token_files import write_texts
from tests.unit.conftest import Run

TOOL = preprocess_data
REPOSITORY = Path(__file__).resolve().parents[3]
GOLDEN = REPOSITORY / "tests" / "golden" / "tokenizers"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "120"}
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Starts the tool in a process of its own."""
    script = REPOSITORY / "tools" / "preprocess_data.py"
    command = [sys.executable, str(script), *map(str, arguments), *NULL]
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, **options)


def corpus(folder: Path, documents: int = 50) -> tuple[object, ...]:
    """The flags of an input and an output."""
    path = write_texts(folder / "in.jsonl", [f"{n % 100} 1" for n in range(documents)])
    return "--input", path, "--output-prefix", folder / "out"


def test_progress_lines_without_a_terminal(tmp_path: Path, run: Run) -> None:
    work = ("--append-eod", "--workers", 2, "--chunk-size", 5, "--log-interval", 20)
    printed = run(*corpus(tmp_path), *NULL, *work, "--dataset-impl", "mmap")
    lines = printed.err.splitlines()
    assert [line[:23] for line in lines] == ["Processed 20 documents ", "Processed 40 documents "]
    assert "docs/s, " in lines[0]
    assert lines[0].endswith("MB/s).")
    assert "150 tokens" in printed.out
    assert f"wrote {tmp_path / 'out'}_text_document.bin and .idx" in printed.out
    assert IndexedDataset(tmp_path / "out_text_document").get(3).tolist() == [3, 1, 100]


@pytest.mark.parametrize("kind", ["characters", "bytes", "unknown"])
def test_characters_that_a_tokenizer_drops_are_counted(kind: str, tmp_path: Path, run: Run) -> None:
    """A BPE without an unknown token drops what is not in its vocabulary."""
    vocab = {"a": 0, "b": 1, "ab": 2, "</s>": 3, "<unk>": 4}
    unknown = {"unk_token": "<unk>"} if kind == "unknown" else {}
    library = Library(models.BPE(vocab, [("a", "b")], **unknown))
    if kind == "bytes":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    path = write_texts(tmp_path / "in.jsonl", ["a\u00e9b", "zzzz", " ", "ab"])
    tokenizer = (
        "--tokenizer-type",
        "HFTokenizer",
        "--tokenizer-model",
        tmp_path / "tokenizer.json",
    )
    printed = run("--input", path, "--output-prefix", tmp_path / "out", *tokenizer, "--append-eod")
    warned = "tokenizer-loses-characters" in printed_codes(printed.err)
    assert warned == (kind != "unknown")
    if kind == "unknown":
        assert "lost" not in printed.out
        return
    assert "lost: 6 characters" in printed.out  # a blank among them
    assert "1 empty text, 1 text without tokens" in printed.out


def test_flags_with_underscores_and_several_keys(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "in_put.jsonl"
    path.write_text('{"a": "1", "b": ""}\n')
    flags = ["--output_prefix", tmp_path / "o_p", "--json_keys", "a", "b", "--append_eod"]
    printed = run(f"--input={path}", *flags, *NULL, "--partitions", 4)
    assert f"rejected: 1 empty text; listed in {tmp_path / 'o_p'}.quarantine" in printed.out
    assert printed_codes(printed.err) == ["ignored-flag"]
    assert "--partitions" in printed.err
    names = sorted(os.listdir(tmp_path))
    assert names[1:] == ["o_p.progress.json", "o_p.quarantine"] + [
        f"o_p_{key}_document.{end}" for key in "ab" for end in ("bin", "idx", "tokenizer.json")
    ]


def test_standard_input_with_a_rejected_line_and_without_eod(tmp_path: Path) -> None:
    flags = ("--input", "-", "--output-prefix", tmp_path / "out", "--workers", 1)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start(*flags, **pipes)
    output, error = process.communicate('{"text": "1 2"}\n{"text": "3"\n')
    assert process.returncode == 0, error
    assert "WARNING: without --append-eod" in error
    lines = output.splitlines()
    assert lines[0].startswith("Processed 1 documents (")
    assert lines[1].startswith("2 tokens (")
    assert lines[1].endswith(" tokens/s)")
    assert lines[2].startswith("time: start 0.")
    assert "encoding by NullTokenizer 0." in lines[2]
    assert lines[3] == f"rejected: 1 broken JSON; listed in {tmp_path / 'out'}.quarantine"
    assert "<stdin>" in (tmp_path / "out.quarantine").read_text()


def test_begin_tokens_are_added_or_a_warning_names_the_flag(tmp_path: Path, run: Run) -> None:
    library = Library.from_file(str(GOLDEN / "tokenizer.json"))
    library.add_special_tokens(["<s>"])
    begin = library.token_to_id("<s>")
    library.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    path = write_texts(tmp_path / "in.jsonl", ["the", "fox"])
    flags = ("--input", path, "--output-prefix", tmp_path / "out", "--append-eod", "--workers", 1)
    kind = ("--tokenizer-type", "HFTokenizer", "--tokenizer-model", tmp_path)
    assert printed_codes(run(*flags, *kind).err) == ["prepend-bos-missing"]
    assert begin not in IndexedDataset(tmp_path / "out_text_document").tokens
    assert printed_codes(run(*flags, *kind, "--prepend-bos", "--overwrite").err) == []
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data.get(at)[0] for at in range(2)] == [begin] * 2
    error = run(*flags, *NULL, "--prepend-bos", "--overwrite", status=1).err
    assert printed_codes(error) == ["begin-token-missing"]


def test_several_inputs_and_a_dataset_with_columns(tmp_path: Path, run: Run) -> None:
    from datasets import Dataset

    (tmp_path / "a.txt").write_text("1 2\n\n3")
    (tmp_path / "b.csv").write_text("body\n4\n")
    out = ("--output-prefix", tmp_path / "out", *NULL, "--append-eod", "--workers", 1)
    files = ("--input", tmp_path / "a.txt", tmp_path / "b.csv", "--json-keys", "body")
    run(*files, "--text-document-unit", "paragraph", *out)
    data = IndexedDataset(tmp_path / "out_body_document")
    assert data.tokens.tolist() == [1, 2, 100, 3, 100, 4, 100]
    Dataset.from_dict({"body": ["5", "6"], "n": [1, 2]}).save_to_disk(tmp_path / "set")
    run("--hf-dataset", tmp_path / "set", "--columns", "body", *out, "--overwrite")
    assert IndexedDataset(tmp_path / "out_body_document").tokens.tolist() == [5, 100, 6, 100]


def test_errors_name_all_flags_and_leave_no_files(tmp_path: Path, run: Run) -> None:
    files = ("--input", tmp_path / "none", "--output-prefix", f"{__file__}/out")
    kind = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab", "v.json")
    error = run(*files, *kind, "--workers", 0, status=2).err
    for flag in ("--input", "--output-prefix", "--workers", "--vocab-file", "--merge-file"):
        assert flag in error
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "1"}\n{"no": 1}\n')
    bad = ("--input", path, "--output-prefix", tmp_path / "out", "--fail-on-bad-document")
    error = run(*bad, *NULL, status=1).err
    assert f"{path}:2: " in error
    assert "[rejected-document]" in error
    assert os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize("chunk_size", [1, 3, 512])
def test_an_input_file_without_documents_is_an_error_after_the_others(
    tmp_path: Path, run: Run, chunk_size: int
) -> None:
    """Also when the complete output is asked for again; blank files lose nothing.

    Claim (data): an input file whose lines are all rejected ends the command with an error, after
    the others are written
    """
    contents = {
        "a": '{"text": "1"}\n{"txt": "2"}\n{"txt": "2"}\n{"txt": "2"}\n{"txt": "2"}\n',
        "b": '{"txt": "2"}\n' * 4,
        "c": "\n",
        "d": '{"txt": "2"}\n{"txt": "2"}\n{"txt": "2"}\n{"text": "3"}\n{"txt": "2"}\n',
        "e": "1 2 3\n",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    files = ("--input", *sorted(tmp_path.iterdir()), "--output-prefix", tmp_path / "out")
    for _ in range(2):
        printed = run(*files, *NULL, "--workers", 2, "--chunk-size", chunk_size, status=1)
        assert printed_codes(printed.err)[-2:] == ["input-file-without-documents"] * 2
        for name in "abcde":
            assert (f"{name}.jsonl: no document" in printed.err) == (name in "be")
        assert "rejected: 1 broken JSON, 12 missing key" in printed.out
    assert IndexedDataset(tmp_path / "out_text_document").tokens.tolist() == [1, 3]
    assert run(*files[:2], *files[-2:], *NULL, "--workers", 1, "--overwrite").out


def test_output_of_another_run_is_kept_without_overwrite(tmp_path: Path, run: Run) -> None:
    flags = (*corpus(tmp_path, 5), *NULL, "--append-eod", "--workers", 1)
    run(*flags)
    pair = tmp_path / "out_text_document.bin"
    other = ("--max-document-bytes", 50)
    before = pair.stat()
    shown = f"5 documents, 15 tokens\nin {pair} and .idx\n"
    assert run(*flags).out == run(*flags, "--resume").out == shown
    error = run(*flags, *other, "--resume", status=1).err
    assert printed_codes(error) == ["resumed-run-differs"]
    refused = ["resumed-run-differs", "output-exists"]
    assert printed_codes(run(*flags, *other, status=2).err) == refused
    assert pair.stat() == before
    pair.write_bytes(b"other tokens")  # the record no longer describes it
    assert printed_codes(run(*flags, status=2).err) == ["output-exists"]
    (tmp_path / "out.progress.json").unlink()
    assert printed_codes(run(*flags, status=2).err) == ["output-exists"]
    assert pair.read_bytes() == b"other tokens"
    run(*flags, *other, "--overwrite")
    assert len(IndexedDataset(tmp_path / "out_text_document").tokens) == 15


def test_default_tokenizer_type_is_that_of_training(tmp_path: Path, run: Run) -> None:
    error = run(*corpus(tmp_path), status=2).err
    assert printed_codes(error) == ["tokenizer-option-required"] * 2


def test_legacy_formats_are_rejected(tmp_path: Path, run: Run) -> None:
    printed = run(*corpus(tmp_path), *NULL, "--dataset-impl", "lazy", status=2)
    assert printed_codes(printed.err) == ["unsupported-value"]


def test_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    main_end, terminal = pty.openpty()
    process = start(*corpus(tmp_path), stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # EIO when the writer closes a terminal
        while part := os.read(main_end, 4096):
            shown += part
    os.close(main_end)
    assert process.wait() == 0
    assert b"50 documents" in shown
    assert b"100%" in shown


def test_ctrl_c_leaves_no_output(tmp_path: Path) -> None:
    flags = (*corpus(tmp_path, 200_000), "--append-eod", "--log-interval", 1, "--chunk-size", 1)
    process = start(*flags, stderr=subprocess.PIPE, start_new_session=True)
    process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    # The work folder may remain if the run was slow to stop.
    assert set(os.listdir(tmp_path)) - {"out.work"} == {"in.jsonl"}


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[object, ...]:
    """Flags of a run with GPT-2's tokenizer, whose output is in GOLDEN."""
    files = ("--input", GOLDEN / "corpus.jsonl", "--output-prefix", tmp_path / "out")
    vocabulary = ("--vocab", GOLDEN / "vocab.json", "--merge-file", GOLDEN / "merges.txt")
    return (*files, "--tokenizer-type", "GPT2BPETokenizer", "--append-eod", *vocabulary)


def test_summary_names_the_encoding_library(
    tmp_path: Path, run: Run, gpt2: tuple[object, ...]
) -> None:
    for backend in ("auto", "fastokens", "tokenizers"):
        printed = run(*gpt2, "--tokenizer-backend", backend, "--overwrite")
        assert f"encoding by {backend.replace('auto', 'fastokens')} " in printed.out
        assert printed.err == ""
        for end in ("bin", "idx"):
            found = (tmp_path / f"out_text_document.{end}").read_bytes()
            assert found == (GOLDEN / f"GPT2BPETokenizer.{end}").read_bytes()


def test_missing_fast_library_is_reported_and_not_required(
    run: Run, gpt2: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    printed = run(*gpt2)
    assert "encoding by tokenizers " in printed.out
    assert printed.err.count("\n") == 1
    assert "fastokens" in printed.err
    assert "pip install" in printed.err
    required = ("--tokenizer-backend", "fastokens")
    assert "--tokenizer-backend fastokens" in run(*gpt2, *required, status=1).err
    assert "NullTokenizer" in run(*gpt2[:4], *NULL, *required, status=1).err


def test_time_line_lists_all_stages() -> None:
    parts = {"reading": 1.0, "waiting": 2.0, "writing": 0.5, "parsing": 3.0, "encoding": 4.0}
    done = Progress(documents=50, seconds=parts, before=Progress(documents=20))
    lines = preprocess_data.final_report(done, PreprocessOptions(json_keys=()), 5.0, "x")
    assert "20 of them before the interruption" in lines
    assert preprocess_data.time_line(parts, 5.0, "x") == (
        "time: start 1.50 s, reading 1.00 s, waiting for workers 2.00 s, writing 0.50 s; all "
        "workers together: parsing 3.00 s, encoding by x 4.00 s"
    )


def test_sentences_are_split(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_texts(tmp_path / "in.jsonl", ["1 2! 3."])
    out = ("--input", path, "--output-prefix", tmp_path / "out", "--append-eod")
    bert = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", GOLDEN / "vocab.txt")
    split = ("--split-sentences", "--lang", "danish", "--sentence-splitter", "rules")
    printed = run(*out, *bert, *split, "--keep-newlines")
    prefix = str(tmp_path / "out_text_sentence")
    assert f"wrote {prefix}.bin and .idx" in printed.out
    assert " s, splitting sentences 0." in printed.out
    assert printed.err == (
        "sentences are split by the built-in rules, which know only English abbreviations\n"
    )
    assert IndexedDataset(prefix).document_index.tolist() == [0, 2]
    assert inspect_dataset.main([prefix, "--json"]) == 0
    sentences = {"splitter": "rules", "version": 1, "keep_newlines": True}
    assert json.loads(capsys.readouterr().out)["sentences"] == sentences
    assert inspect_dataset.main([prefix]) == 0
    shown = "sentences split by: splitter rules, version 1, keep_newlines True"
    assert shown in capsys.readouterr().out


def test_sentence_flags_are_validated(tmp_path: Path, run: Run) -> None:
    unused = ("--keep-newlines", "--lang", "english", "--sentence-splitter", "rules")
    warnings = run(*corpus(tmp_path), *NULL, *unused, "--append-eod").err
    assert printed_codes(warnings) == ["no-effect"]
    assert all(name in warnings for name in ("--keep-newlines", "--lang", "--sentence-splitter"))
    wrong = ("--split-sentences", "--lang", "klingon", "--workers", 0)
    error = run(*corpus(tmp_path), *NULL, *wrong, status=2).err
    assert "--lang" in error
    assert "--workers 0" in error
