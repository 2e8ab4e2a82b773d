"""Every kind of input gives the same documents, in order, with the places they come from."""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import io
import json
import lzma
import os
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_ds.cleaning.command import files_of
from megatron_ds.config.fields import ineffective
from megatron_ds.preprocess.documents import formats
from megatron_ds.preprocess.documents.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.documents.formats import RawDocument, UnreadableDocument
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.parsing import RejectedDocument, TextFields, texts_of
from tests.foreign_files import CASES, input_code
from tests.problems import codes, raises_problem
from tests.token_files import write_pair

TEXTS = [
    "plain",
    "two\nlines",
    'a "quote", a comma',
    "é 漢字 🙂\u2028",
    "  blanks ",
    "x" * 5000,
    "end",
]
ROWS: list[dict[str, Any]] = [
    {"id": number, "text": text, "meta": {"text": text.upper()}}
    for number, text in enumerate(TEXTS)
]


def read(*paths: str | Path, keys: tuple[str, ...] = ("text",), **values: Any) -> list[RawDocument]:
    inputs = InputSpec(tuple(str(path) for path in paths), **values)
    assert list(inputs.problems()) == []
    return list(DocumentReader(inputs, keys))


def fields(items: list[RawDocument], key: str = "text") -> list[Any]:
    values = (json.loads(v) if isinstance(v, bytes) else v for v in (item.value for item in items))
    return [value[key] for value in values]


def jsonl() -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(content: bytes, codec: str = "zstd") -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)


def write_arrow(
    path: Path, table: Any = None, open_writer: Callable[..., Any] = pa.ipc.new_file
) -> bytes:
    """Writes a table, by default that of ROWS. Returns the content of the file."""
    table = pa.Table.from_pylist(ROWS) if table is None else table
    with open_writer(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path.read_bytes()


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([("id", "text"), *((row["id"], row["text"]) for row in ROWS)])


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".json": bytes,
    ".unknown": bytes,
    ".jsonl.gz": gzip.compress,
    ".jsonl.xz": lzma.compress,
    ".jsonl.bz2": bz2.compress,
    ".jsonl.zst": zstd,
    ".jsonl.zstd": zstd,
    ".jsonl.lz4": functools.partial(zstd, codec="lz4"),
    ".JSONL.GZ": gzip.compress,
}
WRITERS: dict[str, Callable[[Path], object]] = {
    **{
        f"a{suffix}": lambda path, pack=pack: path.write_bytes(pack(jsonl()))
        for suffix, pack in COMPRESS.items()
    },
    "a.parquet": write_parquet,
    "a.pq": write_parquet,
    "a.arrow": lambda path: write_arrow(path, open_writer=pa.ipc.new_stream),
    "a.feather": write_arrow,
    "a.csv": write_csv,
    "a.tsv": lambda path: write_csv(path, "\t"),
}


def check_continuation(inputs: InputSpec) -> list[RawDocument]:
    """After every document, a second reader continues from the position of the first.

    Returns:
        The documents.
    """
    reader = DocumentReader(inputs, ("text",))
    items: list[RawDocument] = []
    positions = [START]
    for item in reader:
        items.append(item)
        positions.append(reader.position(item.line))
    positions.append(reader.end)
    for at, position in enumerate(positions):
        second = DocumentReader(inputs, ("text",), ReadPosition(*position))
        assert list(second) == items[at:]
        assert second.bytes_read == reader.bytes_read
        assert second.end == reader.end
    if inputs.hf_dataset is None and "memory:" not in str(inputs.paths):
        assert reader.bytes_read == inputs.total_bytes()
    return items


@pytest.mark.parametrize("batch", [2, 128])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents_from_any_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    """Claim (data): all input formats give the same documents"""
    monkeypatch.setattr(formats, "ROWS", batch)
    paths = [tmp_path / part / name for part in ("1", "2")]
    for path in paths:
        path.parent.mkdir()
        WRITERS[name](path)
    items = check_continuation(InputSpec(tuple(map(str, paths))))
    lines = [2, 3, 5, 6, 7, 8, 9] if name in ("a.csv", "a.tsv") else range(1, 8)
    assert fields(items) == TEXTS * 2
    assert [item[:2] for item in items] == [(str(path), n) for path in paths for n in lines]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_joined_and_damaged_archives(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    pack = COMPRESS[f".jsonl{suffix}"]
    path.write_bytes(pack(jsonl()) + pack(jsonl()))
    assert fields(read(path)) == TEXTS * 2
    for content in (pack(jsonl())[:-9], b"these are other bytes than those"):
        path.write_bytes(content)
        with raises_problem("input-file-unreadable", contains=str(path)):
            read(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_damaged_tables(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    whole = path.read_bytes()
    for content in (b"", b"no table at all", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with raises_problem("input-file-unreadable", contains=str(path)):
            read(path)
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(whole))
    with raises_problem("table-not-seekable", contains=str(packed)):
        read(packed)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather", "a.csv"])
def test_missing_column_is_an_error(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    with raises_problem("column-missing", "json_keys", contains="'text'"):
        read(tmp_path / name, keys=("txt",))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_only_the_columns_of_the_keys_are_read(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    items = read(tmp_path / name, keys=("meta.text", "text"))
    assert items[0].value == {"meta": {"text": "PLAIN"}, "text": "plain"}
    assert "id" not in read(tmp_path / name)[0].value


def test_plain_text_by_file_and_by_block(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\nfirst\r\n more\r\n\r\n \n\nsecond\n\nthird")
    whole = "\r\nfirst\r\n more\r\n\r\n \n\nsecond\n\nthird"
    assert read(path) == [RawDocument(str(path), 1, {"text": whole})]
    blocks = read(path, text_document_unit="paragraph", keys=("body",))
    assert fields(blocks, "body") == ["first\r\n more", "second", "third"]
    assert [item.line for item in blocks] == [2, 7, 9]
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert fields(read(packed)) == [whole]
    with raises_problem("plain-text-needs-one-key", "json_keys"):
        read(path, keys=("a", "b"))
    path.write_bytes(jsonl())
    with raises_problem("text-file-holds-json-lines", "format"):
        read(path)
    assert fields(read(path, format="text")) == [jsonl().decode()]
    assert fields(read(path, format="jsonl")) == TEXTS


def test_too_long_documents_are_skipped(tmp_path: Path) -> None:
    lines = [b"1" * 10, b"2" * 11, b"3" * 3_000_000, b"4"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    one, two, three, four = (item.value for item in read(path, max_document_bytes=10))
    assert (one, four) == (lines[0] + b"\n", lines[3])
    for value in (two, three):
        assert isinstance(value, UnreadableDocument)
        assert value.reason == "too long"
        assert "10 bytes" in value.message
        assert len(value.content) <= formats.PREVIEW_BYTES
    text = tmp_path / "a.txt"
    text.write_bytes(b"1\n2\n\n" + lines[2] + b"\n3\n\n4444\n5555\n6666\n\n7")
    blocks = [i.value for i in read(text, max_document_bytes=10, text_document_unit="paragraph")]
    assert [isinstance(value, UnreadableDocument) for value in blocks] == [False, True, True, False]
    (whole,) = read(text, max_document_bytes=10)
    assert isinstance(whole.value, UnreadableDocument)
    assert whole.value.reason == "too long"
    assert fields(read(text, max_document_bytes=text.stat().st_size)) == [text.read_text()]


def test_broken_rows_and_texts_do_not_affect_others(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,b\n1,2\n3\n"x\ny",4\n\n5,6,7\n\xff,8\n')
    items = read(path)
    assert [item.line for item in items] == [2, 3, 4, 7, 8]
    bad = [item for item in items if isinstance(item.value, UnreadableDocument)]
    assert bad == [items[1], items[3]]
    assert items[1].value[0] == "broken row"
    assert fields([items[4]]) == ["\udcff"]
    table = pa.table({"text": pa.array([b"1", b"\xff", b"3"]).view(pa.string())})
    parquet.write_table(table, tmp_path / "a.parquet")
    good, bad, after = (item.value for item in read(tmp_path / "a.parquet"))
    assert (good, after) == ({"text": "1"}, {"text": "3"})
    assert isinstance(bad, UnreadableDocument)
    assert bad.reason == "invalid UTF-8"


def test_many_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("d/b.jsonl", "d/sub/c.jsonl.gz", "d/a.parquet", "e/1.jsonl", "e/2.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS["a" + "".join(path.suffixes)](path)
    made = ("d/x.bin", "d/x.idx", "d/x.tokenizer.json", "d/x.quarantine")  # by an earlier run
    for name in ("d/.hidden.jsonl", "d/_SUCCESS", "d/.cache/x.jsonl", *made):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (tmp_path / "d/notes.pdf").write_text("")
    with pytest.warns(UserWarning, match=r"notes\.pdf"):
        items = read(tmp_path / "e/2.jsonl", tmp_path / "d", f"{tmp_path}/e/1*")
    names = ["e/2.jsonl", "d/a.parquet", "d/b.jsonl", "d/sub/c.jsonl.gz", "e/1.jsonl"]
    assert list(dict.fromkeys(item.file for item in items)) == [str(tmp_path / n) for n in names]
    assert fields(items) == TEXTS * 5
    assert len(read(f"{tmp_path}/**/*.gz")) == len(TEXTS)
    (tmp_path / "odd[1].jsonl").write_bytes(jsonl())
    assert fields(read(tmp_path / "odd[1].jsonl")) == TEXTS


@pytest.mark.parametrize("format", ["auto", "jsonl", "text"])
def test_files_of_this_package_in_a_folder_are_no_input(tmp_path: Path, format: str) -> None:
    """Token files, text and the index cache are often in one folder."""
    written = (
        "index-cache/x-1.json",
        "index-cache/x-1.documents.npy",
        "index-cache/x-1.lock",
        "clean.jsonl.work/output",
        "my_text_document.bin.partial",
        "x.lock",
        "x.npy",
        "my_text_document.bin",
        "my_text_document.idx",
        "my.quarantine",
        "my.progress.json",
    )
    for name in ("a.jsonl", *written):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jsonl())
    spec = InputSpec((str(tmp_path),), format=format)
    assert list(spec.local_files()) == [str(tmp_path / "a.jsonl")]
    merged = files_of(str(tmp_path), str(tmp_path / "out.json"))
    assert {os.path.basename(path) for path in merged} == {"a.jsonl"}


def test_pipes_and_broken_links_in_a_folder_are_named_in_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    for name in ("pipe", "link"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "pipe/p.jsonl")
    (tmp_path / "link/l.jsonl").symlink_to(tmp_path / "nothing")
    for name in ("pipe/p", "link/l"):
        with pytest.warns(UserWarning, match=f"{tmp_path}/{name}.jsonl"):
            assert fields(read((tmp_path / name).parent)) == TEXTS
        files = list(files_of(str((tmp_path / name).parent), "out.json"))
        assert [os.path.basename(file) for file in files] == ["b.jsonl"]


def test_file_that_would_be_read_twice_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    sub = tmp_path / "sub"
    file.write_bytes(jsonl())
    sub.mkdir()
    (sub / "link.jsonl").symlink_to("../a.jsonl")
    os.link(file, sub / "hard.jsonl")
    other = str(tmp_path / "sub/../a.jsonl")
    for path in (str(file), other, str(sub / "link.jsonl"), str(sub / "hard.jsonl")):
        (problem,) = InputSpec((str(file), path)).problems()
        assert codes([problem]) == ["input-file-twice"]
        assert path in str(problem)
    assert codes(InputSpec((str(tmp_path),)).problems()) == ["input-file-twice"] * 2


def test_the_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError("Illegal seek")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(jsonl())))
    items = read("-")
    assert fields(items) == TEXTS
    assert items[6][:2] == ("<stdin>", 7)
    assert InputSpec(("-",)).total_bytes() is None


def test_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    keeper = os.open(pipe, os.O_RDWR)  # so that neither end waits
    os.write(keeper, jsonl())
    items: Iterator[RawDocument] = iter(DocumentReader(InputSpec((str(pipe),)), ("text",)))
    assert fields([next(items) for _ in TEXTS]) == TEXTS
    os.close(keeper)
    assert list(items) == []


def test_addresses() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/corpus/b.jsonl", jsonl())
    system.pipe("/corpus/a.jsonl.gz", gzip.compress(jsonl()))
    items = read("memory://corpus/*", "memory://corpus/b.jsonl")
    assert fields(items) == TEXTS * 3
    names = ["memory:///corpus/a.jsonl.gz", "memory:///corpus/b.jsonl"]
    assert list(dict.fromkeys(item.file for item in items)) == names
    assert fields(read("memory://corpus")) == TEXTS * 2
    with raises_problem("no-input-file", "paths", contains="memory://none/*"):
        read("memory://none/*")
    with pytest.raises((ValueError, OSError), match=r"none/x\.jsonl"):
        read("memory://none/x.jsonl")
    with raises_problem("input-not-accessible", "paths", contains="no-such-protocol://x"):
        read("no-such-protocol://x")


def test_hugging_face_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    splits = datasets.DatasetDict({"train": table, "valid": table.select([1])})
    splits.save_to_disk(tmp_path / "two")
    (tmp_path / "three").mkdir()
    write_parquet(tmp_path / "three" / "train.parquet")
    for name in ("one", "two", "three"):
        items = check_continuation(InputSpec(hf_dataset=str(tmp_path / name)))
        assert fields(items) == TEXTS
        assert [item.line for item in items] == list(range(1, 8))
        assert set(items[0].value) == {"text"}
    assert fields(read(hf_dataset=str(tmp_path / "two"), hf_split="valid")) == TEXTS[1:2]
    with raises_problem("no-such-split", "hf_split", contains="train"):
        read(hf_dataset=str(tmp_path / "two"), hf_split="test")
    with raises_problem("no-such-split", "hf_split"):
        read(hf_dataset=str(tmp_path / "one"), hf_split="test")
    with raises_problem("dataset-not-readable", "hf_dataset", contains=str(tmp_path / "none")):
        read(hf_dataset=str(tmp_path / "none"))
    with raises_problem("column-missing", "json_keys"):
        read(hf_dataset=str(tmp_path / "one"), keys=("txt",))


def test_files_of_a_saved_dataset_are_no_input(tmp_path: Path) -> None:
    """Claim (data): Arrow files of a folder that `datasets` saved are refused as an input, since
    old shards and caches may lie next to the dataset's own"""
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("data-00000-of-00001.arrow", "data-00000-of-00002.arrow", "cache-1.arrow"):
        write_arrow(folder / name)
    read(folder / "cache-1.arrow")  # without state.json these are Arrow files as any
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))
    link = tmp_path / "link.arrow"
    link.symlink_to(folder / "cache-1.arrow")
    for path in (folder, tmp_path, folder / "*.arrow", folder / "cache-1.arrow", link):
        (problem,) = InputSpec((str(path),)).problems()
        assert codes([problem]) == ["input-is-saved-dataset"]
        assert str(folder) in str(problem)


@pytest.mark.parametrize("case", CASES)
def test_files_of_other_programs_are_no_input(case: str, tmp_path: Path) -> None:
    """Claim (data): `--input` refuses files and folders of 18 formats of other programs by their
    formats, with what reads them"""
    for path in (*CASES[case].write(tmp_path), tmp_path, tmp_path / "*"):
        # In a folder, names of this package's output are skipped.
        (problem, *_) = InputSpec((str(path),)).problems()
        assert codes([problem]) == [input_code(case)], path
        assert CASES[case].program in str(problem)


def test_token_files_of_megatron_are_no_input(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2]])
    for path in (f"{prefix}.bin", f"{prefix}.idx", prefix, str(tmp_path)):
        (problem,) = InputSpec((path,)).problems()
        assert codes([problem]) == ["input-is-token-file"]
        assert f"give {prefix} to --data-path" in str(problem)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("name", ["input_ids", "tokens", "token_ids"])
def test_columns_of_token_ids_are_refused(name: str, suffix: str, tmp_path: Path) -> None:
    """Claim (data): columns of token ids in JSON lines, parquet and Arrow are refused by name, with
    the columns that hold text"""
    rows = [{name: [1, 2], "body": "a"}, {name: [3], "body": "b"}]
    path = tmp_path / f"a.{suffix}"

    def write(kept: list[str]) -> None:
        table = pa.Table.from_pylist([{key: row[key] for key in kept} for row in rows])
        if suffix == "jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        elif suffix == "parquet":
            parquet.write_table(table, path)
        else:
            write_arrow(path, table)

    write([name, "body"])
    with raises_problem("column-of-ids", "json_keys", contains="'body'"):
        read(path, keys=(name,))
    assert fields(read(path, keys=("body",)), "body") == ["a", "b"]
    write([name])
    for key in (name, "text"):
        with raises_problem("column-of-ids", "json_keys", contains=f"'{name}'"):
            read(path, keys=(key,))


@pytest.mark.parametrize(
    "type",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.uint16()),
        pa.list_(pa.int32(), 2),
        pa.list_(pa.list_(pa.int8())),
    ],
)
def test_lists_of_integers_are_token_ids(type: pa.DataType, tmp_path: Path) -> None:
    nested = pa.types.is_list(type) and pa.types.is_list(type.value_type)
    ids = pa.array([[[1, 2]] if nested else [1, 2]], type)
    meta = pa.array([{"ids": [1], "text": "a"}])
    parquet.write_table(pa.table({"x": ids, "meta": meta}), tmp_path / "a.parquet")
    for key in ("x", "meta.ids"):
        with raises_problem("column-of-ids", "json_keys", contains=repr(key)):
            read(tmp_path / "a.parquet", keys=(key,))
    assert read(tmp_path / "a.parquet", keys=("meta.text",))


def test_lists_of_integers_next_to_text_are_no_error(tmp_path: Path) -> None:
    """The first line may lack its text."""
    lines = ['{"text": null, "spans": [1, 2]}', '{"spans": [1, 2]}', '{"text": "a", "spans": []}']
    for count in (3, 2):
        (tmp_path / "a.jsonl").write_text("\n".join(lines[-count:]))
        assert len(read(tmp_path / "a.jsonl")) == count


def test_a_dataset_of_token_ids_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    rows.save_to_disk(str(tmp_path / "set"))
    with raises_problem("column-of-ids", "json_keys", contains="'input_ids'"):
        read(hf_dataset=str(tmp_path / "set"))


def test_reading_is_incremental(tmp_path: Path) -> None:
    """One row group, one batch, one line: never the whole file."""
    rows = [{"text": "x" * 1000}] * 20_000
    parquet.write_table(
        pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=100, compression="none"
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.parquet", "a.jsonl"):
        reader = DocumentReader(InputSpec((str(tmp_path / name),)), ("text",))
        items = iter(reader)
        for _ in range(2000):
            next(items)
        assert 0 < reader.bytes_read < (tmp_path / name).stat().st_size / 5


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.parquet", "a.arrow", "a.jsonl.zst"):
        WRITERS[name](tmp_path / name)
        for module in ("pyarrow", "pyarrow.parquet"):
            monkeypatch.setitem(sys.modules, module, None)
        with raises_problem("library-missing", contains="pip install pyarrow"):
            read(tmp_path / name)
        monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with raises_problem("library-missing", contains="fsspec"):
        read("s3://bucket/x.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises_problem("library-missing", contains="datasets"):
        read(hf_dataset="x")


def test_arrow_offsets_out_of_range_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    whole = write_arrow(path, pa.table({"text": ["a" * 7, "b" * 7]}))
    for second in (-5, 1 << 30):
        content = whole.replace(struct.pack("<3i", 0, 7, 14), struct.pack("<3i", 0, second, 14))
        assert content != whole
        path.write_bytes(content)
        with raises_problem("input-file-unreadable", contains=str(path)):
            read(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv"])
def test_ambiguous_column_is_an_error(tmp_path: Path, name: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    if name == "a.csv":
        (tmp_path / name).write_text("text,text\na,b\n")
    elif name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        write_arrow(tmp_path / name, table)
    with raises_problem("column-not-unique", "json_keys", contains="'text'"):
        read(tmp_path / name)


def test_standard_input_is_read_from_its_current_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"a header\n" + jsonl())
    with (tmp_path / "x").open() as file:
        file.buffer.readline()
        monkeypatch.setattr(sys, "stdin", file)
        assert fields(read("-")) == TEXTS


def test_symbolic_link_to_a_folder_is_named_in_a_warning(tmp_path: Path) -> None:
    for name in ("in/a.jsonl", "other/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(jsonl())
    (tmp_path / "in/link").symlink_to(tmp_path / "other")
    with pytest.warns(UserWarning, match=f"{tmp_path}/in/link"):
        assert fields(read(tmp_path / "in")) == TEXTS


def test_lines_of_a_web_server(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert fields(read(f"http://127.0.0.1:{server.server_port}/a.jsonl")) == TEXTS
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_hidden_folders_above_a_remote_folder_are_ignored(tmp_path: Path) -> None:
    for name in (".cache/d/a.jsonl", ".cache/d/_b.jsonl", ".cache/d/.c/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jsonl())
    assert fields(read(f"file://{tmp_path}/.cache/d")) == TEXTS
    assert fields(read(f"file://{tmp_path}/.cache/d/")) == TEXTS


def test_errors_of_remote_systems_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    class NoCredentials(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentials("who are you")

    fsspec.filesystem("memory").pipe("/mine/a.jsonl", jsonl())
    for method in ("isdir", "_open"):
        with monkeypatch.context() as patch:
            patch.setattr(fsspec.get_filesystem_class("memory"), method, refuse)
            with pytest.raises(ValueError, match=r"mine/a\.jsonl: .*NoCredentials: who are you"):
                read("memory://mine/a.jsonl")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    (tmp_path / f"{tmp_path.name}.py").write_text("")  # a script, which datasets runs no more
    with raises_problem("dataset-not-readable", contains=str(tmp_path)):
        read(hf_dataset=str(tmp_path))


def test_options_of_a_dataset_have_no_effect_on_files() -> None:
    options = InputSpec(("-",), hf_config="x", hf_split="test")
    assert codes(options.problems()) == []
    (warning,) = ineffective(options, {"hf_config", "hf_split", "paths"})
    assert (warning.code, warning.fields) == ("no-effect", ("hf_config", "hf_split"))


def test_long_line_of_a_csv_is_not_kept_in_memory(tmp_path: Path) -> None:
    size = 1 << 25
    (tmp_path / "a.csv").write_text(f'text,n\na,1\n{"x" * size}\nb,2\n"c\nd",3\n')
    tracemalloc.start()
    try:
        items = read(tmp_path / "a.csv", max_document_bytes=100_000)
        assert tracemalloc.get_traced_memory()[1] < size // 2
    finally:
        tracemalloc.stop()
    long = items.pop(1)
    assert isinstance(long.value, UnreadableDocument)
    assert "100000" in long.value.message
    found = [(item.line, *item.value.values()) for item in items]
    assert found == [(2, "a", "1"), (4, "b", "2"), (5, "c\nd", "3")]
    assert long.line == 3


def test_invalid_utf8_does_not_hide_arrow_indices_out_of_range(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    texts = pa.array(["a" * 7, "b" * 7]).dictionary_encode()
    whole = write_arrow(path, pa.table({"text": texts}))
    assert fields(read(path)) == ["a" * 7, "b" * 7]
    content = whole.replace(b"a" * 7, b"\xff" * 7).replace(
        struct.pack("<2i", 0, 1) + bytes(56), struct.pack("<2i", 0, 1 << 30) + bytes(56)
    )
    path.write_bytes(content)
    with raises_problem("input-file-unreadable", contains=str(path)):
        read(path)


def test_mixed_inputs_continue_from_any_position(tmp_path: Path) -> None:
    import fsspec

    WRITERS["a.parquet"](tmp_path / "b.parquet")
    WRITERS["a.jsonl"](tmp_path / "c.jsonl")
    for name in ("a", "d", "z"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n")  # without a document
    (tmp_path / "e.jsonl").write_bytes(
        b'{"text": "1"}\n\n["' + b"x" * 9000 + b'"]\n\n{"text": "2"}'
    )
    (tmp_path / "f.txt").write_text("1\n2\n\n\n3\n\n4")
    (tmp_path / "g.csv").write_text('text\n"1\n2"\n\n3,4\n5\n')
    fsspec.filesystem("memory").pipe("/more/a.jsonl", jsonl())
    values: dict[str, Any] = {"text_document_unit": "paragraph", "max_document_bytes": 8000}
    check_continuation(InputSpec((str(tmp_path), "memory://more/a.jsonl"), **values))


def test_nothing_before_the_position_is_read(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        path.write_bytes(jsonl())
    inputs = InputSpec((str(tmp_path),))
    reader = DocumentReader(inputs, ("text",))
    place = [reader.position(one.line) for one, _ in zip(reader, range(10), strict=False)][-1]
    paths[0].write_bytes(bytes(len(jsonl())))
    paths[1].write_bytes(bytes(place.offset) + jsonl()[place.offset :])
    assert fields(list(DocumentReader(inputs, ("text",), place))) == TEXTS[3:]


def test_pipes_cannot_be_resumed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    paths = (str(tmp_path), str(tmp_path / "pipe"), "-", str(tmp_path / "file"), "s3://x/y")
    pipe, stdin = InputSpec(paths).resume_problems()
    assert codes([pipe, stdin]) == ["resume-of-unseekable-input"] * 2
    assert str(tmp_path / "pipe") in str(pipe)


WARC = b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n"
LZ4 = functools.partial(zstd, codec="lz4")
CONTRADICTIONS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a.jsonl": ("gzip", lambda: gzip.compress(jsonl())),
    "a.unknown": ("gzip", lambda: gzip.compress(jsonl())),
    "b.jsonl": ("zstd", lambda: zstd(jsonl())),
    "pzstd.jsonl": ("zstd", lambda: b"\x50\x2a\x4d\x18\x04\0\0\0\0\x10\0\0" + zstd(jsonl())),
    "c.json": ("xz", lambda: lzma.compress(jsonl())),
    "d.txt": ("bzip2", lambda: bz2.compress(jsonl())),
    "empty.txt": ("bzip2", lambda: bz2.compress(b"")),
    "e.csv": ("lz4", lambda: LZ4(jsonl())),
    "f.jsonl.gz": ("zstd", lambda: zstd(jsonl())),
    "g.jsonl.zst": ("lz4", lambda: LZ4(jsonl())),
    "twice.jsonl.gz": ("gzip", lambda: gzip.compress(gzip.compress(jsonl()))),
    "h.parquet": ("gzip", lambda: gzip.compress(jsonl())),
    "i.warc.gz": ("WARC", lambda: gzip.compress(WARC)),
    "j.warc": ("WARC", lambda: WARC),
    "k.txt": ("WARC", lambda: WARC),
    "l.jsonl.lz4": ("a JSON array", lambda: LZ4(b"[" + jsonl().replace(b"\n", b",\n"))),
    "m.json": ("a JSON array", lambda: json.dumps(ROWS).encode()),
    "n.json": ("a JSON array", lambda: b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode()),
    "o.json": ("a JSON array", lambda: json.dumps(TEXTS, indent=2).encode()),
    "p.json": ("a JSON object of several lines", lambda: json.dumps(ROWS[0], indent=2).encode()),
    "q.json": ("a JSON object of several lines", lambda: json.dumps(ROWS[0], indent=0).encode()),
    "page.jsonl": ("an HTML page", lambda: b"<!DOCTYPE html>\n<html><body></body></html>"),
    "r.jsonl": ("UTF-16 or UTF-32", lambda: jsonl().decode().encode("utf-16")),
    "s.jsonl": ("zip", lambda: b"PK\x03\x04" + bytes(30)),
    "t.tar.gz": ("tar", lambda: gzip.compress(b"a.jsonl".ljust(257, b"\0") + b"ustar\x0000")),
    "u.jsonl": ("parquet", lambda: parquet_bytes()),
    "v.csv": ("parquet", lambda: parquet_bytes()),
    "w.arrow": ("parquet", lambda: parquet_bytes()),
    "x.parquet": ("arrow", lambda: arrow_bytes(pa.ipc.new_file)),
    "y.jsonl": ("arrow", lambda: arrow_bytes(pa.ipc.new_stream)),
}
"""The format that the first bytes show, by a name that says another one."""


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def arrow_bytes(open_writer: Callable[..., Any]) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_first_bytes_that_contradict_the_name_are_an_error(name: str, tmp_path: Path) -> None:
    """Claim (data): an input whose first bytes are of another format than its name says is an
    error, in 30 cases"""
    found, content = CONTRADICTIONS[name]
    path = tmp_path / name
    path.write_bytes(content())
    (problem,) = InputSpec((str(path),)).problems()
    assert codes([problem]) == ["input-format-differs"]
    assert f"{path}: begins like {found}," in str(problem)
    for address in (str(path), f"file://{path}"):
        with raises_problem("input-format-differs", contains=f" {found},"):
            list(DocumentReader(InputSpec((address,)), ("text",)))


def test_standard_input_of_another_format_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BufferedReader(io.BytesIO(gzip.compress(jsonl())))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    with raises_problem("input-format-differs", contains="gzip"):
        read("-")


def test_text_in_binary_columns_is_read(tmp_path: Path) -> None:
    """Impala and old versions of Spark do not mark a column as text."""
    content = [text.encode() for text in TEXTS] + [b"\xff"]
    for kind in (pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())):
        column = pa.array(content, pa.binary()).cast(kind)
        parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
        *good, bad = (
            texts_of(item, TextFields(("text",), 1 << 20)) for item in read(tmp_path / "a.parquet")
        )
        assert good == [[text] for text in TEXTS]
        assert isinstance(bad, RejectedDocument)
        assert bad.reason == "invalid UTF-8"
