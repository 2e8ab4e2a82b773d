"""Preprocessing: contents, invariance, rejected documents and refused options."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import TokenizerConfig
from megatron_ds.config.problems import PROBLEMS_SHOWN, UserError
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.preprocess import pipeline as module
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import Progress, preprocess
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.tokenizer.fast_backend import select_backend
from tests.preprocess_runs import TOKENIZER, pair
from tests.problems import codes, fields, raises_problem


def write(path: Path, lines: list[Any]) -> str:
    """Strings are lines as they are, other values JSON."""
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    path.write_text(text)
    return str(path)


def options(folder: Path, lines: list[Any], **values: Any) -> PreprocessOptions:
    inputs = InputSpec((write(folder / "in.jsonl", lines),))
    return PreprocessOptions(inputs, str(folder / "out"), overwrite=True, **values)


def written(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("out"))


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": " ".join(["7"] * (1 + n % 5) + [str(n % 100)])} for n in range(count)]


def test_documents_eod_and_empty_texts(tmp_path: Path) -> None:
    lines = [{"text": "1 2"}, {"text": " "}, "", "  ", {"text": "3", "other": 1}]
    done = preprocess(options(tmp_path, lines, append_eod=True), TOKENIZER)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data.get(i).tolist() for i in range(len(data))] == [[1, 2, 100], [3, 100]]
    assert data.document_index.tolist() == [0, 1, 2]
    size = os.path.getsize(tmp_path / "in.jsonl")
    assert done == Progress(2, 5, text_bytes=5, input_bytes=size, dropped={"empty text": 1})
    preprocess(options(tmp_path, lines), TOKENIZER)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data.get(i).tolist() for i in range(len(data))] == [[1, 2], [3]]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_bytes_are_the_same_for_any_workers_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Claim (data): preprocessing writes the same bytes for any number of workers"""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    base = options(tmp_path, numbered(100), append_eod=True)
    seen = set()
    for workers, chunk_size in ((1, 64), (2, 7), (5, 1), (3, 1000)):
        preprocess(dataclasses.replace(base, workers=workers, chunk_size=chunk_size), TOKENIZER)
        seen.add(pair(tmp_path / "out_text_document"))
    assert len(seen) == 1
    tokens = IndexedDataset(tmp_path / "out_text_document").tokens
    assert tokens.size == sum(3 + n % 5 for n in range(100))


def test_seconds_are_counted_for_every_stage(tmp_path: Path) -> None:
    seconds = preprocess(options(tmp_path, numbered(50), chunk_size=3), TOKENIZER).seconds
    assert seconds.keys() == {"reading", "waiting", "writing", "parsing", "encoding"}
    assert all(spent > 0 for spent in seconds.values())


def test_reports_grow_to_the_end(tmp_path: Path) -> None:
    seen: list[Progress] = []
    done = preprocess(options(tmp_path, numbered(10), chunk_size=3), TOKENIZER, seen.append)
    assert [progress.documents for progress in seen] == [3, 6, 9, 10]
    assert seen[-1] == done


def test_strict_run_reports_rejected_lines_together_and_leaves_nothing(tmp_path: Path) -> None:
    lines: list[Any] = numbered(30)
    for at, line in ((4, "{"), (11, {"txt": "1"}), (12, {"text": 5}), (20, [1]), (21, "x")):
        lines[at] = line
    for workers, chunk_size in ((1, 64), (2, 1)):
        given = options(
            tmp_path, lines, fail_on_bad_document=True, workers=workers, chunk_size=chunk_size
        )
        with pytest.raises(UserError) as raised:
            preprocess(given, TOKENIZER)
        found = raised.value.problems
        assert codes(found) == ["rejected-document"] * 5
        assert [str(line).split(":")[:2] for line in found] == [
            [given.inputs.paths[0], number] for number in ("5", "12", "13", "21", "22")
        ]
        assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "ahead", "shown"),
    [([*numbered(3), *["x"] * 500], 100_000, PROBLEMS_SHOWN), (["x", *numbered(200), "y"], 10, 1)],
)
def test_reported_rejects_and_the_check_for_more_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Any], ahead: int, shown: int
) -> None:
    monkeypatch.setattr(module, "DOCUMENTS_CHECKED_AHEAD", ahead)
    with pytest.raises(UserError) as raised:
        preprocess(options(tmp_path, lines, fail_on_bad_document=True, chunk_size=5), TOKENIZER)
    found = codes(raised.value.problems)
    assert found == ["rejected-document"] * shown + ["more-rejected-documents"]


def test_failed_run_keeps_an_older_pair(tmp_path: Path) -> None:
    preprocess(options(tmp_path, numbered(3)), TOKENIZER)
    before = (tmp_path / "out_text_document.idx").read_bytes()
    with raises_problem("no-documents", contains="in.jsonl:1: "):
        preprocess(options(tmp_path, ["x", {"a": 1}]), TOKENIZER)
    assert (tmp_path / "out_text_document.idx").read_bytes() == before
    assert written(tmp_path) == ["out.progress.json"] + [
        f"out_text_document.{end}" for end in ("bin", "idx", "tokenizer.json")
    ]


def test_wrong_options_are_reported_together(tmp_path: Path) -> None:
    inputs = InputSpec((str(tmp_path / "none"),))
    prefix = f"{__file__}/out"
    given = PreprocessOptions(inputs, prefix, ("a", "a"), workers=0, chunk_size=-1)
    with pytest.raises(UserError) as raised:
        preprocess(given, TOKENIZER)
    names = ("workers", "chunk_size", "paths", "output_prefix", "json_keys")
    assert fields(raised.value.problems) == [(name,) for name in names]


@pytest.mark.proof
def test_openwebtext(tmp_path: Path, shared_data: Path) -> None:
    files = [str(shared_data / f"gpt2-{name}") for name in ("vocab.json", "merges.txt")]
    reference = build_tokenizer(TokenizerConfig(vocab_file=files[0], merge_file=files[1]))
    tokenizer = select_backend(reference, "fastokens").tokenizer
    inputs = InputSpec((str(shared_data / "openwebtext-1000.jsonl"),))
    given = PreprocessOptions(inputs, str(tmp_path / "out"), append_eod=True, workers=2)
    assert preprocess(given, tokenizer).tokens == 1_053_999 + 1_000
    data = IndexedDataset(tmp_path / "out_text_document")
    assert data.dtype == "uint16"
    assert len(data) == 1000
    assert int((data.tokens == tokenizer.eod).sum()) == 1000
    with open(given.inputs.paths[0]) as file:
        text = json.loads(file.readline())["text"]
    assert tokenizer.decode(data.get(0).tolist()) == text + "<|endoftext|>"


def quarantined(folder: Path) -> list[dict[str, Any]]:
    with open(folder / "out.quarantine", encoding="ascii") as file:
        return [json.loads(line) for line in file]


def test_rejected_documents_are_listed_in_input_order(tmp_path: Path) -> None:
    first = tmp_path / "a.jsonl"
    second = tmp_path / "b.csv"
    lines = [b'{"text": "1"}', b"{", b'{"txt": "2"}', b'{"text": 3}', b"[4]", b'{"text": "\xff"}']
    lines += [b'{"text": " "}', b'{"text": "7 x"}', b'{"text": "' + b"8 " * 50 + b'"}', b""]
    first.write_bytes(b"\n".join([*lines, b'{"text": "9", "b": 1}\n']))
    second.write_bytes(b"text\n10\nx,y\n\xff\n11\n")
    expected = [
        (str(first), 2, "broken JSON", "{"),
        (str(first), 3, "missing key", '{"txt": "2"}'),
        (str(first), 4, "wrong type", '{"text": 3}'),
        (str(first), 5, "wrong type", "[4]"),
        (str(first), 6, "invalid UTF-8", '{"text": "\udcff"}'),
        (str(first), 7, "empty text", '{"text": " "}'),
        (str(first), 8, "refused by the tokenizer", '{"text": "7 x"}'),
        (str(first), 9, "too long", lines[8][:61].decode()),
        (str(second), 3, "broken row", '["x", "y"]'),
        (str(second), 4, "invalid UTF-8", '{"text": "\\udcff"}'),
    ]
    inputs = InputSpec((str(first), str(second)), max_document_bytes=60)
    seen = set()
    for workers, chunk_size in ((1, 64), (3, 1), (2, 3)):
        prefix = str(tmp_path / "out")
        given = PreprocessOptions(
            inputs, prefix, workers=workers, chunk_size=chunk_size, overwrite=True
        )
        done = preprocess(given, TOKENIZER)
        assert IndexedDataset(tmp_path / "out_text_document").tokens.tolist() == [1, 9, 10, 11]
        found = quarantined(tmp_path)
        names = ("file", "line", "reason", "content")
        assert [tuple(entry[name] for name in names) for entry in found] == expected
        assert all(entry["message"] for entry in found)
        assert sum(done.dropped.values()) == 10
        assert (done.dropped["wrong type"], done.dropped["invalid UTF-8"]) == (2, 2)
        assert (done.documents, done.tokens) == (4, 4)
        assert done.input_bytes == inputs.total_bytes()
        seen.add(tuple(path.read_bytes() for path in sorted(tmp_path.glob("out*"))))
    assert len(seen) == 1
    second.write_text("text\n1\n")
    given = PreprocessOptions(InputSpec((str(second),)), prefix, overwrite=True)
    preprocess(given, TOKENIZER)
    assert not (tmp_path / "out.quarantine").exists(), "the list of an earlier run"


def test_missing_key_rejects_the_line_and_an_empty_text_only_itself(tmp_path: Path) -> None:
    lines = [{"a": "1", "b": "2"}, {"a": "3"}, {"a": "", "b": "4"}]
    done = preprocess(options(tmp_path, lines, json_keys=("a", "b")), TOKENIZER)
    a, b = (IndexedDataset(tmp_path / f"out_{key}_document").tokens.tolist() for key in "ab")
    assert (a, b) == ([1], [2, 4])
    assert done.dropped == {"missing key": 1, "empty text": 1}
    assert quarantined(tmp_path)[1]["reason"] == "empty text"


def test_folder_of_the_output_is_created(tmp_path: Path) -> None:
    given = options(tmp_path, [{"text": "1 2"}])
    prefix = str(tmp_path / "data" / "new" / "my")
    preprocess(dataclasses.replace(given, output_prefix=prefix), TOKENIZER)
    assert IndexedDataset(f"{prefix}_text_document").tokens.tolist() == [1, 2]


@pytest.mark.parametrize("key", ["a", "b"])
def test_no_key_has_its_pair_if_another_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{key}_document.idx"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        preprocess(options(tmp_path, [{"a": "1", "b": "2"}], json_keys=("a", "b")), TOKENIZER)
    assert written(tmp_path) == []
