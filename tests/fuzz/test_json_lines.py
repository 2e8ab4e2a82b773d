"""Broken JSON lines: each named by file and line, and no output left; an older pair stays."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.preprocess import pipeline as module
from megatron_ds.preprocess.document_readers import InputSpec
from megatron_ds.preprocess.pipeline import PreprocessOptions, preprocess
from megatron_ds.preprocess.worker_pool import Workers
from megatron_ds.tokenizer.null import NullTokenizer
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, JSON, REJECTED, read_or_error


class Here(Workers):  # type: ignore[type-arg]
    """The worker in this process: hundreds of runs without a fork."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, items):  # type: ignore[no-untyped-def]
        yield from map(self._function, items)


@pytest.fixture(scope="module", autouse=True)
def _no_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Workers", Here)
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
    options = PreprocessOptions(inputs, str(folder / "out"), strict=strict)
    preprocess(options, NullTokenizer(1000))
    data = IndexedDataset(options.prefix("text"))
    return [data.get(number).tolist() for number in range(len(data))]


GOOD = b'{"text": "1 2"}\n'
BY_HAND = {
    "empty file": (b"", "has no documents"),
    "blank lines": (b"\n  \n\t\r\n", "has no documents"),
    "a NUL byte": (b"\0", ":1: not JSON"),
    "NUL bytes": (GOOD + b"\0" * 100, ":2: not JSON"),
    "no JSON": (GOOD + b"hello\n", ":2: not JSON"),
    "a cut object": (GOOD + b'{"text": "1 2', ":2: not JSON"),
    "a cut object with more after it": (b'{"text": "1\n' + GOOD, ":1: not JSON"),
    "single quotes": (b"{'text': '1'}\n", ":1: not JSON"),
    "a comma at the end": (b'{"text": "1",}\n', ":1: not JSON"),
    "two objects in a line": (b'{"text": "1"} {"text": "2"}\n', ":1: not JSON: Extra data"),
    "a raw control character": (b'{"text": "1\x01"}\n', ":1: not JSON"),
    "a raw line break": (b'{"text": "1\r2"}\n', ":1: not JSON"),
    "lines that end in CR alone": (b'{"text": "1"}\r{"text": "2"}\r', ":1: not JSON"),
    "a bad escape": (rb'{"text": "\x31"}', ":1: not JSON"),
    "invalid UTF-8": (b'{"text": "\xff\xfe"}\n', ":1: not JSON: 'utf-8' codec"),
    "UTF-8 cut midway": (b'{"text": "\xc3"}\n', ":1: not JSON: 'utf-8' codec"),
    "Latin-1": ('{"text": "é"}'.encode("latin-1"), ":1: not JSON"),
    "UTF-16": ('{"text": "1"}\n{"text": "2"}\n'.encode("utf-16"), ":1: not JSON"),
    "UTF-32": ('{"text": "1"}\n{"text": "2"}\n'.encode("utf-32"), ":1: not JSON"),
    "gzip": (bytes.fromhex("1f8b0808d1") + GOOD, ":1: not JSON"),
    "half a surrogate pair": (rb'{"text": "\ud800"}', ":1: 'text' holds half of a surrogate"),
    "half a surrogate pair, raw": (b'{"text": "\xed\xa0\x80"}', "half of a surrogate pair"),
    "a list": (b'["text"]\n', ":1: must be a JSON object, not list"),
    "a string": (b'"text"\n', ":1: must be a JSON object, not str"),
    "a number": (b"5\n", ":1: must be a JSON object, not int"),
    "null": (b"null\n", ":1: must be a JSON object, not NoneType"),
    "NaN": (b"NaN\n", ":1: must be a JSON object, not float"),
    "a number of 5000 digits": (b"1" * 5000, ":1: not JSON: Exceeds the limit"),
    "an empty object": (b"{}\n", ":1: has no key 'text' (it has none)"),
    "another key": (b'{"Text": "1"}\n', ":1: has no key 'text' (it has 'Text')"),
    "a thousand other keys": (
        json.dumps({f"k{n}": n for n in range(1000)}).encode(),
        "'k6', 'k7', ...)",
    ),
    "a key of a megabyte": (json.dumps({"k" * 1_000_000: 1}).encode(), f"'{'k' * 40}')"),
    "null for text": (b'{"text": null}\n', ":1: 'text' must be text, not NoneType"),
    "a number for text": (b'{"text": 12}\n', ":1: 'text' must be text, not int"),
    "a list for text": (b'{"text": ["1"]}\n', ":1: 'text' must be text, not list"),
    "an object for text": (b'{"text": {"a": 1}}\n', ":1: 'text' must be text, not dict"),
    "true for text": (b'{"text": true}\n', ":1: 'text' must be text, not bool"),
    "lists nested deeply": (b"[" * 100_000, ":1: not read: it is nested too deeply"),
    "objects nested deeply": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "text the tokenizer refuses": (b'{"text": "x"}\n', ":1: NullTokenizer reads ids"),
    "ids beyond the vocabulary": (b'{"text": "1 1000"}\n', ":1: NullTokenizer: id 1000 is"),
    "an id of 5000 digits": (b'{"text": "' + b"9" * 5000 + b'"}', ":1: NullTokenizer: id 999"),
    "an id of other digits": ('{"text": "١"}'.encode(), ":1: NullTokenizer reads ids"),
    "an id with an underscore": (b'{"text": "1_0"}', ":1: NullTokenizer reads ids"),
    "a superscript": ('{"text": "²"}'.encode(), ":1: NullTokenizer reads ids"),
    "a line that is too long": (
        b'{"text": "' + b"1 " * 3_000_000 + b'"}',
        ":1: the line is longer",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(tmp_path: Path, name: str) -> None:
    content, message = BY_HAND[name]
    assert run(tmp_path, GOOD) == [[1, 2]]
    older = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    with pytest.raises(ValueError) as raised:
        run(tmp_path, content)
    assert message in str(raised.value)
    assert str(tmp_path / "in.jsonl") in str(raised.value)
    assert len(str(raised.value)) < 5000
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == older


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbf" + GOOD, [[1, 2]]),
        (b"\n" + GOOD + b"\n" + GOOD.strip(), [[1, 2], [1, 2]]),
        (GOOD.replace(b"\n", b"\r\n") * 2, [[1, 2], [1, 2]]),
        (b'{"text": ""}\n' + GOOD, [[1, 2]]),
        (b'{"text": "  "}\n', []),
        (b'{"text": "' + b"7 " * 100_000 + b'"}', [[7] * 100_000]),
        (b'{"text": "1", "other": ' + b"[" * 200 + b"]" * 200 + b"}", [[1]]),
        (b'{"text": "1", "other": 1e999}', [[1]]),
        (b'{"text": "007"}', [[7]]),
    ],
    ids=["BOM", "blank", "CRLF", "empty", "spaces", "long", "nested", "infinity", "zeros"],
)
def test_odd_but_right(tmp_path: Path, content: bytes, expected: list[list[int]]) -> None:
    assert run(tmp_path, content, strict=False) == expected


@given(content=st.binary(max_size=20) | st.lists(JSON, max_size=3).map(lambda v: dumped(v)))
@settings(FUZZ_SETTINGS, max_examples=50)
def test_what_is_no_document_is_left_out_and_listed(folder: Path, content: bytes) -> None:
    lines = content.split(b"\n")
    good, bad = [], []
    for number, line in enumerate(lines, 1):
        found = read_or_error(lambda one=line: run(folder, one + b"\n"), "")  # type: ignore[misc]
        if found is not REJECTED and found:
            good += found  # type: ignore[operator]
        elif line.strip():
            bad.append(number)
    assert run(folder, b"\n".join([*lines, GOOD]), strict=False) == [*good, [1, 2]]
    listed = folder / "out.quarantine"
    found = [json.loads(line) for line in listed.open()] if listed.exists() else []
    assert [entry["line"] for entry in found] == bad
    assert all(entry["file"] == str(folder / "in.jsonl") for entry in found)


def dumped(values: list[object]) -> bytes:
    return "\n".join(json.dumps(value) for value in values).encode()


@given(content=st.binary(max_size=60) | st.binary(max_size=8).map(lambda b: GOOD + b + GOOD))
@FUZZ_SETTINGS
def test_any_bytes(folder: Path, content: bytes) -> None:
    read_or_error(lambda: run(folder, content), str(folder / "in.jsonl"))


@given(
    values=st.lists(JSON, min_size=1, max_size=3), key=st.none() | st.sampled_from(["text", "a"])
)
@FUZZ_SETTINGS
def test_any_values(folder: Path, values: list[object], key: str | None) -> None:
    wrapped = values if key is None else [{key: value} for value in values]
    content = "\n".join(json.dumps(value) for value in wrapped).encode()
    result = read_or_error(lambda: run(folder, content), str(folder / "in.jsonl"))
    if result is not REJECTED:
        texts = [value["text"] for value in wrapped]  # type: ignore[index, call-overload]
        assert result == [[int(word) for word in text.split()] for text in texts if text.split()]


@given(at=st.integers(0, 3 * len(GOOD) - 1), new=st.integers(0, 255))
@FUZZ_SETTINGS
def test_one_byte_changed(folder: Path, at: int, new: int) -> None:
    content = bytearray(GOOD * 3)
    content[at] = new
    result = read_or_error(lambda: run(folder, bytes(content)), str(folder / "in.jsonl"))
    if result is not REJECTED:
        right = [json.loads(line)["text"] for line in bytes(content).split(b"\n") if line.strip()]
        assert result == [[int(word) for word in text.split()] for text in right if text.split()]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing beyond so many bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [1 << 20, 61, 0])
def test_a_disk_without_room_is_named_and_costs_nothing_older(tmp_path: Path, room: int) -> None:
    assert run(tmp_path, GOOD) == [[1, 2]]
    older = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    content = b'{"text": "' + b"7 " * 30 + b'"}\n'
    (tmp_path / "in.jsonl").write_bytes(content * (20_000 if room > 100 else 1))
    options = PreprocessOptions(InputSpec((str(tmp_path / "in.jsonl"),)), str(tmp_path / "out"))
    with largest_file(room), pytest.raises(OSError, match=r"out_text_document\.(bin|idx)\.partial"):
        preprocess(options, NullTokenizer(1000))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == older


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": InputSpec(())}, "--input or --hf-dataset is needed"),
        ({"inputs": InputSpec((__file__,), hf_dataset="x")}, "one of them"),
        ({"inputs": InputSpec((__file__, __file__))}, "would be read twice"),
        ({"inputs": InputSpec(("/dev",))}, "--input /dev: the folder has no file of a kind"),
        ({"inputs": InputSpec(("",))}, "--input : there is no such file"),
        ({"inputs": InputSpec(("no\0where",))}, "there is no such file"),
        ({"inputs": InputSpec(("no*where",))}, "--input no*where: there is no such file"),
        ({"inputs": InputSpec((__file__,), max_document_bytes=0)}, "--max-document-bytes 0"),
        ({"output_prefix": "/dev/null/x"}, "there is no folder /dev/null"),
        ({"output_prefix": "x" * 5000 + "/y"}, "there is no folder"),
        ({"keys": ()}, "at least one key"),
        ({"keys": ("a", "a")}, "given twice"),
        ({"keys": ("a/b",)}, "'a/b': cannot be part of"),
        ({"keys": ("a\0",)}, "cannot be part of"),
        ({"workers": -1}, "--workers -1"),
        ({"chunk_size": 0}, "--chunk-size 0"),
    ],
)
def test_settings(changes: dict[str, object], message: str) -> None:
    values: dict[str, object] = {
        "inputs": InputSpec((__file__,)),
        "output_prefix": "x",
        **changes,
    }
    with pytest.raises(ValueError) as raised:
        preprocess(PreprocessOptions(**values), NullTokenizer(9))  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert not os.path.exists("x_text_document.bin.partial")
