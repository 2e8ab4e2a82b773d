"""Broken JSON lines: rejected with file and line; a strict run keeps an older pair."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config.problems import UserError
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.preprocess import pipeline as module
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.parsing import REFUSED_TEXT
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import preprocess
from megatron_ds.preprocess.worker_pool import Workers
from megatron_ds.tokenizer.null import NullTokenizer
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, JSON, REJECTED, read_or_error
from tests.problems import codes, raises_problem


class InProcessWorkers(Workers):
    """The worker in this process: hundreds of runs without a fork."""

    def __enter__(self) -> InProcessWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, items):
        yield from map(self._function, items)


@pytest.fixture(scope="module", autouse=True)
def _no_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Workers", InProcessWorkers)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


LONGEST = 5_000_000


def run(folder: Path, content: bytes, strict: bool = True) -> list[list[int]]:
    """The documents that `content` gives."""
    path = folder / "in.jsonl"
    path.write_bytes(content)
    inputs = InputSpec((str(path),), max_document_bytes=LONGEST)
    prefix = str(folder / "out")
    options = PreprocessOptions(inputs, prefix, fail_on_bad_document=strict, overwrite=True)
    preprocess(options, NullTokenizer(1000))
    data = IndexedDataset(options.prefix("text"))
    return [data.get(number).tolist() for number in range(len(data))]


GOOD = b'{"text": "1 2"}\n'
# Files of a single rejected line, by the reason.
REJECTED_LINES = {
    "broken JSON": [
        b"\0",
        b"{'text': '1'}\n",
        b'{"text": "1",}\n',
        b'{"text": "1"} {"text": "2"}\n',
        b'{"text": "1\x01"}\n',
        b'{"text": "1\r2"}\n',
        rb'{"text": "\x31"}',
        b"1" * 5000,
        b'{"text": "1"}\r{"text": "2"}\r',  # lines that end in CR alone
        b'{"text": "1\n' + GOOD,  # a truncated object with more after it
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    "invalid UTF-8": [
        b'{"text": "\xff\xfe"}\n',
        b'{"text": "\xc3"}\n',
        '{"text": "é"}'.encode("latin-1"),
        rb'{"text": "\ud800"}',
        b'{"text": "\xed\xa0\x80"}',  # a lone surrogate
    ],
    "wrong type": [
        b'["text"]\n',
        b'"text"\n',
        b"5\n",
        b"null\n",
        b"NaN\n",
        b'{"text": null}\n',
        b'{"text": 12}\n',
        b'{"text": ["1"]}\n',
        b'{"text": {"a": 1}}\n',
        b'{"text": true}\n',
    ],
    "missing key": [
        b"{}\n",
        b'{"Text": "1"}\n',
        json.dumps({"k" * 1_000_000: 1}).encode(),
        json.dumps({f"k{n}": n for n in range(1000)}).encode(),
    ],
    REFUSED_TEXT: [
        b'{"text": "x"}\n',
        b'{"text": "1 1000"}\n',
        b'{"text": "' + b"9" * 5000 + b'"}',
        '{"text": "١"}'.encode(),
        b'{"text": "1_0"}',
        '{"text": "²"}'.encode(),
    ],
    "too long": [b'{"text": "' + b"1 " * 3_000_000 + b'"}'],
}
REJECTED_FILES = [
    *((reason, content, 1) for reason, contents in REJECTED_LINES.items() for content in contents),
    ("invalid UTF-8", GOOD + b"\0" * 100, 2),
    ("invalid UTF-8", GOOD + '{"text": "1"}\n'.encode("utf-16"), 2),
    ("invalid UTF-8", GOOD + bytes.fromhex("1f8b0808d1") + GOOD, 2),  # gzip
    *(("broken JSON", GOOD + line, 2) for line in (b"hello\n", b'{"text": "1 2')),
]


@pytest.mark.parametrize(
    ("reason", "content", "line"), REJECTED_FILES, ids=range(len(REJECTED_FILES))
)
def test_rejected_line_is_an_error_if_strict_and_listed_otherwise(
    tmp_path: Path, reason: str, content: bytes, line: int
) -> None:
    assert run(tmp_path, GOOD) == [[1, 2]]
    older = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    with pytest.raises(UserError) as raised:
        run(tmp_path, content)
    assert set(codes(raised.value.problems)) == {"rejected-document"}
    assert str(raised.value.problems[0]).startswith(f"{tmp_path / 'in.jsonl'}:{line}: ")
    assert len(str(raised.value)) < 5000
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == older
    run(tmp_path, content + b"\n" + GOOD, strict=False)
    first = json.loads((tmp_path / "out.quarantine").read_text().splitlines()[0])
    assert (first["line"], first["reason"]) == (line, reason)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n  \n\t\r\n", b'{"text": "  "}\n'],
    ids=["empty", "blank lines", "blank text"],
)
def test_input_without_documents_is_an_error(tmp_path: Path, content: bytes) -> None:
    with raises_problem("no-documents", contains=str(tmp_path / "in.jsonl")):
        run(tmp_path, content, strict=False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbf" + GOOD, [[1, 2]]),
        (b"\n" + GOOD + b"\n" + GOOD.strip(), [[1, 2], [1, 2]]),
        (GOOD.replace(b"\n", b"\r\n") * 2, [[1, 2], [1, 2]]),
        (b'{"text": ""}\n' + GOOD, [[1, 2]]),
        (b'{"text": "  "}\n' + GOOD, [[1, 2]]),
        (b'{"text": "' + b"7 " * 100_000 + b'"}', [[7] * 100_000]),
        (b'{"text": "1", "other": ' + b"[" * 200 + b"]" * 200 + b"}", [[1]]),
        (b'{"text": "1", "other": 1e999}', [[1]]),
        (b'{"text": "007"}', [[7]]),
    ],
    ids=["BOM", "blank", "CRLF", "empty", "spaces", "long", "nested", "infinity", "zeros"],
)
def test_unusual_valid_lines(tmp_path: Path, content: bytes, expected: list[list[int]]) -> None:
    assert run(tmp_path, content, strict=False) == expected


@given(content=st.binary(max_size=60) | st.lists(JSON, max_size=3).map(lambda v: dumped(v)))
@settings(FUZZ_SETTINGS, max_examples=30)
def test_rejected_lines_are_listed(folder: Path, content: bytes) -> None:
    lines = content.split(b"\n")
    good = []
    bad = []
    for number, line in enumerate(lines, 2):
        strictly = functools.partial(run, folder, line + b"\n")
        found = read_or_error(strictly, str(folder / "in.jsonl"))
        if found is not REJECTED and found:
            good += found
        elif line.strip():
            bad.append(number)
    # The first bytes of a file are those of no other format.
    assert run(folder, GOOD + b"\n".join([*lines, GOOD]), strict=False) == [[1, 2], *good, [1, 2]]
    listed = folder / "out.quarantine"
    found = [json.loads(line) for line in listed.open()] if listed.exists() else []
    assert [entry["line"] for entry in found] == bad
    assert all(entry["file"] == str(folder / "in.jsonl") for entry in found)


def dumped(values: list[object]) -> bytes:
    return "\n".join(json.dumps(value) for value in values).encode()


def ids_of(texts: list[str]) -> list[list[int]]:
    return [[int(word) for word in text.split()] for text in texts if text.split()]


@given(
    values=st.lists(JSON, min_size=1, max_size=3), key=st.none() | st.sampled_from(["text", "a"])
)
@FUZZ_SETTINGS
def test_any_values(folder: Path, values: list[object], key: str | None) -> None:
    wrapped = values if key is None else [{key: value} for value in values]
    content = "\n".join(json.dumps(value) for value in wrapped).encode()
    result = read_or_error(lambda: run(folder, content), str(folder / "in.jsonl"))
    if result is not REJECTED:
        assert result == ids_of([value["text"] for value in wrapped])


@given(at=st.integers(0, 3 * len(GOOD) - 1), new=st.integers(0, 255))
@FUZZ_SETTINGS
def test_one_byte_changed(folder: Path, at: int, new: int) -> None:
    content = bytearray(GOOD * 3)
    content[at] = new
    result = read_or_error(lambda: run(folder, bytes(content)), str(folder / "in.jsonl"))
    if result is not REJECTED:
        lines = [line for line in content.split(b"\n") if line.strip()]
        assert result == ids_of([json.loads(line)["text"] for line in lines])


def inputs(*paths: str, **options: Any) -> dict[str, Any]:
    return {"inputs": InputSpec(paths, **options)}


WRONG_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "input-not-unique": [inputs(), inputs(__file__, hf_dataset="x")],
    "no-input-file-in-folder": [inputs(str(Path(__file__).parent))],
    "no-input-file": [inputs(path) for path in ("", "no\0where", "no*where")],
    "output-prefix-without-name": [{"output_prefix": p} for p in ("x/", "/")],
    "no-keys": [{"json_keys": ()}],
    "key-not-a-file-name": [{"json_keys": ("a/b",)}, {"json_keys": ("a\0",)}],
    "out-of-range": [inputs(__file__, max_document_bytes=0), {"workers": -1}, {"chunk_size": 0}],
}


@pytest.mark.parametrize("code", WRONG_OPTIONS)
def test_wrong_option_is_an_error(code: str) -> None:
    for changes in WRONG_OPTIONS[code]:
        options = PreprocessOptions(**{**inputs(__file__), "output_prefix": "x", **changes})
        with raises_problem(code):
            preprocess(options, NullTokenizer(9))
