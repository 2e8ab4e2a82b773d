"""Tokenizer training: readable files, the same bytes each time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megatron_ds.preprocess import train_tokenizer
from megatron_ds.tokenizer import Tokenizer, train
from tests.problems import raises_problem
from tests.unit.tokenizer.test_golden import FILES, build, texts

SIZES = {"bpe": 400, "wordpiece": 500, "unigram": 600}
Train = Callable[[Iterable[str], int, Path], int]
TRAINED: dict[str, Train] = {kind: getattr(train, f"train_{kind}") for kind in SIZES}

TYPES = {"bpe": "GPT2BPETokenizer", "wordpiece": "BertWordPieceCase"}
TYPES["unigram"] = "GPTSentencePieceTokenizer"


def read(kind: str, folder: Path) -> Tokenizer:
    files = FILES[TYPES[kind]]
    return build(TYPES[kind], **{name: str(folder / file) for name, file in files.items()})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_both_bpe_formats_give_the_same_ids(tmp_path: Path) -> None:
    train.train_bpe(texts() * 3, 400, tmp_path)
    gpt2 = read("bpe", tmp_path)
    complete = build("HFTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json"))
    assert (complete.eod, complete.vocab_size) == (gpt2.eod, gpt2.vocab_size)
    for text in texts():
        if "<|endoftext|>" not in text:
            assert complete.encode(text) == gpt2.encode(text)


def test_wordpiece_keeps_case_on_request(tmp_path: Path) -> None:
    words = ["Case case CASE case Case"] * 3
    train.train_wordpiece(words, 100, tmp_path / "lower")
    train.train_wordpiece(words, 100, tmp_path / "case", lower_case=False)
    lower, case = (
        (tmp_path / kind / "vocab.txt").read_text().split() for kind in ("lower", "case")
    )
    assert lower[:5] == case[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert "case" in lower
    assert {"Case", "case", "CASE"} <= set(case)
    assert lower == [token for token in lower if token == token.lower() or token in lower[:5]]


def test_wordpiece_keeps_the_most_frequent_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "MAX_ALPHABET", 3)
    train.train_wordpiece(["aab aab cab da"], 100, tmp_path)
    tokens = (tmp_path / "vocab.txt").read_text().split()[5:]
    assert tokens[:5] == ["a", "b", "c", "##a", "##b"]
    assert not any("d" in token for token in tokens)


def test_unigram_is_lossless(tmp_path: Path) -> None:
    train.train_unigram(texts() * 3, 600, tmp_path)
    tokenizer = read("unigram", tmp_path)
    for text in texts():
        if "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("bpe", "vocab-size-too-small"),
        ("wordpiece", "vocab-size-below-characters"),
        ("unigram", "unigram-training-failed"),
    ],
)
def test_too_small_a_vocabulary_is_rejected(kind: str, code: str, tmp_path: Path) -> None:
    with raises_problem(code, "vocab_size", contains="20"):
        TRAINED[kind](texts(), 20, tmp_path)


LINES: list[object] = [{"text": text} for text in texts() * 3]


def corpus(folder: Path, lines: list[object]) -> Path:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder / "in.jsonl"


@pytest.mark.parametrize("kind", train.KINDS)
def test_training_is_deterministic(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tool, and the function that it calls, write the same files.

    Claim (tokenizers): training a tokenizer twice gives the same files byte for byte
    """
    output = tmp_path / "out"
    flags = ["--type", kind, "--vocab-size", str(SIZES[kind]), "--output-dir", str(output)]
    assert train_tokenizer.main(["--input", str(corpus(tmp_path, LINES)), *flags]) == 0
    printed = capsys.readouterr().out
    assert f"tokens from {3 * len(texts())} documents, " in printed
    assert f"{output}/" in printed.splitlines()[1]
    size = TRAINED[kind](texts() * 3, SIZES[kind], tmp_path / "again")
    assert contents(output) == contents(tmp_path / "again") != {}
    assert size <= SIZES[kind]
    assert read(kind, output).vocab_size - size in (0, 2)  # [BOS] and [EOS]


@pytest.mark.parametrize("kind", train.KINDS)
def test_the_tool_counts_or_rejects_lines_without_text(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus(tmp_path, [LINES[0], {"body": "x"}, *LINES[1:], 5])
    flags = ["--input", str(path), "--type", kind, "--vocab-size", str(SIZES[kind])]
    flags += ["--output-dir", str(tmp_path / "out")]
    assert train_tokenizer.main([*flags, "--fail-on-bad-document"]) == 1
    assert f"{path}:2: has no key 'text'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert train_tokenizer.main(flags) == 0
    assert f"2 left out, the first {path}:2: has no key" in capsys.readouterr().out
    assert train_tokenizer.main([*flags, "--json-keys", "none"]) == 1
    assert "[input-without-text]" in capsys.readouterr().err
    assert train_tokenizer.main([*flags[2:], "--input", str(tmp_path / "nope")]) == 2
    assert f"--input {tmp_path / 'nope'}" in capsys.readouterr().err


def test_the_tool_reads_inputs_like_preprocessing_and_reports_all_problems_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus(tmp_path, [{"body": text} for text in ("abc", "x" * 50)])
    flags = ["--columns", "body", "--max-document-bytes", "40", "--output-dir", str(tmp_path / "o")]
    assert train_tokenizer.main(["--input", str(path), *flags, "--vocab-size", "257"]) == 0
    assert "1 left out" in capsys.readouterr().out
    for folder in (path, path / "below"):
        nowhere = ["--input", f"{tmp_path}/nope", "--vocab-size", "9", "--output-dir", str(folder)]
        assert train_tokenizer.main([*flags, *nowhere]) == 2
        printed = capsys.readouterr().err
        for problem in (f"{tmp_path}/nope", "--vocab-size 9", f"--output-dir {folder}: {path}"):
            assert problem in printed


def test_the_tool_prints_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_tokenizer, "REPORT_SECONDS", -1.0)
    flags = ["--vocab-size", "300", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "abc"}\n' * 3)))
    assert train_tokenizer.main(["--input", "-", *flags]) == 0
    lines = capsys.readouterr().err.splitlines()
    progress = ["read 1 document", "read 2 documents", "read 3 documents"]
    assert [line.split(",")[0] for line in lines[:3]] == progress
    (warning,) = lines[3:]
    assert warning.startswith("WARNING: 259 tokens instead of --vocab-size 300")
