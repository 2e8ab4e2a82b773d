"""Damaged or unfit files of other trainers: each gets an error with its place, and leaves nothing.

Claim (data): truncated files, mixed types, ids outside of the vocabulary, missing shards, links
that lead out of a folder and wrong hashes of other trainers' tokens are errors with the file and
the place, all at once; nothing half-written is left, and an existing pair is kept
"""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_ds.data.foreign_tokens import import_program
from tests import foreign_tokens as foreign
from tests.foreign_tokens import DOCUMENTS, END, TOKENS
from tests.problems import printed_codes
from tests.token_files import write_pair
from tests.unit.conftest import Run

TOOL = import_program
BY_TOKEN = ("--end-token", END)


def truncate(path: Path, size: int) -> None:
    """Truncates a file to a size, or by a negative one."""
    with path.open("r+b") as file:
        file.truncate(size if size >= 0 else path.stat().st_size + size)


def change(path: Path, **values: Any) -> None:
    """Changes the first entry of an index."""
    content = json.loads(path.read_text())
    entry = content.get("shards", content.get("chunks"))[0]
    entry.update(values)
    path.write_text(json.dumps(content))


def odd_nanogpt(folder: Path) -> None:
    truncate(foreign.nanogpt(folder), -1)


def truncated_nanogpt(folder: Path) -> None:
    truncate(foreign.nanogpt(folder), -2)


def wide_nanogpt(folder: Path) -> None:
    foreign.write(folder / "train.bin", foreign.numbers(TOKENS, "uint32"))


def mixed_splits(folder: Path) -> None:
    foreign.nanogpt(folder)
    foreign.write(folder / "val.bin", foreign.numbers(TOKENS))


def truncated_llm_c(folder: Path) -> None:
    truncate(foreign.llm_c(folder), -2)


def header_of_llm_c(folder: Path) -> None:
    truncate(foreign.llm_c(folder), 1000)


def version_of_llm_c(folder: Path) -> None:
    foreign.write(folder / "a.bin", struct.pack("<3i", 20240520, 3, 9).ljust(1042, b"\1"))


def mixed_llm_c(folder: Path) -> None:
    foreign.llm_c(folder)
    foreign.llm_c_wide(folder)


def truncated_olmo(folder: Path) -> None:
    truncate(foreign.olmo(folder) / "part-0.npy", -2)


def gap_of_olmo(folder: Path) -> None:
    foreign.olmo(folder)
    foreign.write(folder / "part-0.csv.gz", gzip.compress(b"0,4\n5,16\n"))


def csv_of_olmo(folder: Path) -> None:
    truncate(foreign.olmo(folder) / "part-0.csv.gz", -12)


def truncated_ds(folder: Path) -> None:
    truncate(foreign.datatrove(folder) / "00000_unshuffled.ds", -4)


def ds_without_index(folder: Path) -> None:
    (foreign.datatrove(folder) / "00000_unshuffled.ds.index").unlink()


def index_of_ds(folder: Path) -> None:
    path = foreign.datatrove(folder) / "00000_unshuffled.ds.index"
    path.write_bytes(struct.pack("<4Q", 4, 3, 12, 16))


def mixed_ds(folder: Path) -> None:
    foreign.datatrove(folder)
    foreign.datatrove(folder, "00001_unshuffled.ds", "uint32")


def repeated_ds(folder: Path) -> None:
    foreign.datatrove(folder)
    foreign.datatrove(folder, "00000_00000_doc_shuffled.ds")


def missing_shard(folder: Path) -> None:
    (foreign.mds(folder) / "shard.00001.mds").unlink()


def two_missing_shards(folder: Path) -> None:
    missing_shard(folder)
    (folder / "shard.00000.mds").unlink()


def truncated_shard(folder: Path) -> None:
    truncate(foreign.mds(folder) / "shard.00001.mds", -2)


def packed_shard(folder: Path) -> None:
    path = foreign.mds(folder, compression="zstd") / "shard.00001.mds.zstd"
    content = bytearray(path.read_bytes())
    content[-9] ^= 255
    path.write_bytes(content)


def bomb_in_shard(folder: Path) -> None:
    """A shard whose content is larger than stated."""
    packed = foreign.pack(bytes(1 << 20), "gz")
    foreign.mds(folder, compression="gz")
    foreign.write(folder / "shard.00000.mds.gz", packed)
    entry = {"basename": "shard.00000.mds.gz", "bytes": len(packed), "hashes": {}}
    change(folder / "index.json", zip_data=entry)


def hash_of_shard(folder: Path) -> None:
    path = foreign.mds(folder) / "shard.00000.mds"
    hashes = {"sha1": "0" * 40, "of tomorrow": "1"}
    entry = {"basename": path.name, "bytes": path.stat().st_size, "hashes": hashes}
    change(folder / "index.json", raw_data=entry)


def type_of_shard(folder: Path) -> None:
    """The samples are of one type, the index says another."""
    foreign.mds(folder)
    change(folder / "index.json", column_encodings=["str", "int", "ndarray:int32"])


def mixed_shards(folder: Path) -> None:
    foreign.mds(folder, "ndarray:int32")
    shard = foreign.mds_shard(DOCUMENTS[:3], "ndarray:uint16")
    foreign.write(folder / "shard.00000.mds", shard)
    raw = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}
    encodings = ["str", "int", "ndarray:uint16"]
    change(folder / "index.json", column_encodings=encodings, raw_data=raw)


def name_leads_out(folder: Path) -> None:
    foreign.mds(folder)
    foreign.write(folder.parent / "shard.00000.mds", b"")
    entry = {"basename": "../shard.00000.mds", "bytes": 0, "hashes": {}}
    change(folder / "index.json", raw_data=entry)


def link_of_shard(folder: Path) -> None:
    path = foreign.mds(folder) / "shard.00000.mds"
    path.rename(folder.parent / "elsewhere.mds")
    path.symlink_to("../elsewhere.mds")


def link_of_flat(folder: Path) -> None:
    foreign.nanogpt(folder).rename(folder.parent / "elsewhere.bin")
    (folder / "train.bin").symlink_to(folder.parent / "elsewhere.bin")


def broken_index(folder: Path) -> None:
    foreign.mds(folder)
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text[:-5])


def missing_chunk(folder: Path) -> None:
    (foreign.litdata(folder) / "chunk-0-1.bin").unlink()


def truncated_chunk(folder: Path) -> None:
    truncate(foreign.litdata(folder) / "chunk-0-1.bin", -4)


def mixed_chunks(folder: Path) -> None:
    """litdata writes later items of another type under the type of the first."""
    foreign.litdata(folder, dtype="uint16", code=16)


def offsets_of_chunk(folder: Path) -> None:
    path = foreign.litdata(folder) / "chunk-0-1.bin"
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<I", 26)
    path.write_bytes(content)


def other_litdata(folder: Path) -> None:
    foreign.litdata(folder)
    content = json.loads((folder / "index.json").read_text())
    content["config"]["data_format"] = ["str", "jpeg"]
    (folder / "index.json").write_text(json.dumps(content))


def truncated_parquet(folder: Path) -> None:
    truncate(foreign.parquet_file(folder), -20)


def null_in_parquet(folder: Path) -> None:
    folder.mkdir()
    ids = pa.array([[1, 2], [3, None]], pa.list_(pa.int32()))
    parquet.write_table(pa.table({"input_ids": ids}), folder / "a.parquet")


def null_row(folder: Path) -> None:
    folder.mkdir()
    ids = pa.array([[1, 2], None], pa.list_(pa.int32()))
    foreign.arrow_stream(folder / "a.arrow", pa.table({"input_ids": ids}))


def padded_parquet(folder: Path) -> None:
    folder.mkdir()
    table = foreign.table()
    masks = pa.array([[1, 1, 1, 1], [1, 0], [1] * 7, [1] * 3], pa.list_(pa.int8()))
    parquet.write_table(table.set_column(0, "attention_mask", masks), folder / "a.parquet")


def mixed_parquet(folder: Path) -> None:
    foreign.parquet_file(folder)
    parquet.write_table(foreign.table(type=pa.int64()), folder / "b.parquet")


def two_columns(folder: Path) -> None:
    folder.mkdir()
    ids = pa.array(DOCUMENTS, pa.list_(pa.int32()))
    parquet.write_table(pa.table({"a": ids, "b": ids}), folder / "a.parquet")


def missing_arrow(folder: Path) -> None:
    (foreign.saved(folder) / "data-00001-of-00002.arrow").unlink()


def truncated_arrow(folder: Path) -> None:
    truncate(foreign.arrow(folder), -40)


def stream_without_end(folder: Path) -> None:
    truncate(foreign.arrow(folder), -8)


def missing_part(folder: Path) -> None:
    foreign.parquet_file(folder).rename(folder / "train-00001-of-00003.parquet")


def hash_of_content(folder: Path) -> None:
    foreign.mds(folder, compression="gz")
    index = json.loads((folder / "index.json").read_text())
    raw = index["shards"][0]["raw_data"] | {"hashes": {"xxh64": "0" * 16}}
    change(folder / "index.json", raw_data=raw)


def link_of_document_ends(folder: Path) -> None:
    path = foreign.datatrove(folder) / "00000_unshuffled.ds.index"
    path.rename(folder.parent / "elsewhere.index")
    path.symlink_to(folder.parent / "elsewhere.index")


def longer_numpy(folder: Path) -> None:
    folder.mkdir()
    np.save(folder / "a.npy", np.array(TOKENS, np.uint16))
    with (folder / "a.npy").open("ab") as file:
        file.write(b"\0\0")


def lines(*texts: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        foreign.write(folder / "a.jsonl", "\n".join(texts).encode())

    return write


def negative(folder: Path) -> None:
    ids = pa.array([[1, 2], [3, -100, -100]], pa.list_(pa.int64()))
    folder.mkdir()
    parquet.write_table(pa.table({"input_ids": ids}), folder / "a.parquet")


def wrong_bytes(folder: Path) -> None:
    """A column of bytes that holds int32, and is read as int64."""
    shard = foreign.mds(folder, "bytes", shards=(DOCUMENTS[:1],)) / "shard.00000.mds"
    content = shard.read_bytes()
    head = content[: -8 * len(DOCUMENTS[0])]
    shard.write_bytes(head + foreign.numbers(DOCUMENTS[0] * 2, "int32"))


def end_of_olmo(folder: Path) -> None:
    foreign.olmo(folder)
    foreign.write(folder / "part-0.csv.gz", gzip.compress(b"0,99999999999999999999\n"))


def olmo_without_tokens(folder: Path) -> None:
    foreign.olmo(folder)
    (folder / "part-0.npy").rename(folder / "part-1.npy")
    (folder / "part-1.csv.gz").write_bytes((folder / "part-0.csv.gz").read_bytes())


def ds_without_tokens(folder: Path) -> None:
    foreign.datatrove(folder)
    foreign.datatrove(folder, "00001_unshuffled.ds")
    (folder / "00001_unshuffled.ds").unlink()


def digits_of_ds(folder: Path) -> None:
    path = foreign.datatrove(folder) / "00000_unshuffled.ds.metadata"
    path.write_text("gpt2|2\n" + "9" * 5000)


def sizes_of_columns(folder: Path) -> None:
    foreign.mds(folder)
    change(folder / "index.json", column_sizes=["8", 8, None])


def memory_of_chunk(folder: Path) -> None:
    foreign.litdata(folder)
    content = json.loads((folder / "index.json").read_text())
    content["config"]["compression"] = "snappy"
    content["chunks"][0] |= {"chunk_bytes": 10**15, "dim": None}
    (folder / "index.json").write_text(json.dumps(content))


def header_of_numpy(shape: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        longer_numpy(folder)
        header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}".ljust(117) + "\n"
        content = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode()
        foreign.write(folder / "a.npy", content + bytes(40))

    return write


def empty_shard(folder: Path) -> None:
    foreign.parquet_file(folder)
    foreign.write(folder / "b.parquet", b"")


def broken_link(folder: Path) -> None:
    foreign.parquet_file(folder)
    (folder / "b.parquet").symlink_to("nowhere.parquet")


def state_of_saved(folder: Path) -> None:
    foreign.write(foreign.saved(folder) / "state.json", b"{")


CASES: dict[str, tuple[Callable[[Path], Any], tuple[Any, ...], list[str], str]] = {
    "olmo: huge end": (end_of_olmo, (), ["foreign-index-damaged"], "line 1"),
    "olmo: ends alone": (olmo_without_tokens, (), ["foreign-shard-missing"], "part-0.npy"),
    "ds: ends alone": (ds_without_tokens, (), ["foreign-shard-missing"], "00001_unshuffled.ds"),
    "ds: digits": (digits_of_ds, (), ["foreign-index-damaged"], ".ds.metadata"),
    "mds: sizes of columns": (sizes_of_columns, (), ["foreign-index-damaged"], "'8'"),
    "litdata: memory": (memory_of_chunk, (), ["foreign-file-damaged"] * 2, str(10**15)),
    "numpy: shape": (header_of_numpy("(10**3,)}"), (), ["foreign-file-damaged"], "a.npy"),
    "numpy: huge": (header_of_numpy(f"({10**20},)}}"), (), ["foreign-file-damaged"], "a.npy"),
    "numpy: open bracket": (header_of_numpy("("), (), ["foreign-file-damaged"], "a.npy"),
    "folder: empty shard": (empty_shard, (), ["foreign-file-of-other-format"], "b.parquet"),
    "folder: broken link": (broken_link, (), ["foreign-file-of-other-format"], "b.parquet"),
    "saved: state": (state_of_saved, (), ["foreign-file-of-other-format"] * 2, "state.json"),
    "flat: odd": (odd_nanogpt, BY_TOKEN, ["foreign-size-odd"], "31 bytes"),
    "flat: truncated": (
        truncated_nanogpt,
        BY_TOKEN,
        ["foreign-document-truncated"],
        "begins at token 13 (byte 26), has 2 tokens",
    ),
    "flat: wide": (wide_nanogpt, BY_TOKEN, ["foreign-ids-look-wide"], "uint32"),
    "flat: two splits": (mixed_splits, BY_TOKEN, ["foreign-splits-mixed"], "val.bin"),
    "flat: no rule": (foreign.nanogpt, (), ["foreign-without-boundaries"], "--end-token"),
    "flat: other end token": (
        foreign.nanogpt,
        ("--end-token", 98),
        ["foreign-document-truncated"],
        "token 0 (byte 0)",
    ),
    "flat: end token too high": (
        foreign.nanogpt,
        ("--end-token", 70_000),
        ["foreign-end-token-too-high"],
        "65535",
    ),
    "flat: vocabulary": (
        foreign.nanogpt,
        (*BY_TOKEN, "--vocab-size", 300),
        ["foreign-ids-outside"],
        "token 6, byte 12, in document 2, is 300, outside of 0 to 299",
    ),
    "flat: two rules": (
        foreign.nanogpt,
        (*BY_TOKEN, "--document-per-file"),
        ["foreign-boundaries-twice"],
        "",
    ),
    "llm.c: truncated": (truncated_llm_c, BY_TOKEN, ["foreign-size-differs"], "1054 bytes"),
    "llm.c: header": (header_of_llm_c, BY_TOKEN, ["foreign-header-truncated"], "1000 bytes"),
    "llm.c: version": (version_of_llm_c, BY_TOKEN, ["llm-c-version-unknown"], "version 3"),
    "llm.c: mixed": (mixed_llm_c, BY_TOKEN, ["foreign-types-differ"], "uint16"),
    "llm.c: no end token": (
        foreign.llm_c,
        ("--end-token", 98),
        ["foreign-begins-inside", "foreign-end-token-missing"],
        "98",
    ),
    "olmo: truncated": (truncated_olmo, (), ["foreign-size-differs"], "30 bytes"),
    "olmo: gap": (gap_of_olmo, (), ["foreign-index-damaged"], "document 1 begins at 5"),
    "olmo: csv": (csv_of_olmo, (), ["foreign-index-damaged"], "part-0.csv.gz"),
    "ds: truncated": (truncated_ds, (), ["foreign-size-differs"], "28 bytes"),
    "ds: no index": (ds_without_index, (), ["foreign-index-missing"], ".ds.index"),
    "ds: index": (index_of_ds, (), ["foreign-index-damaged"], "document 1 ends after 3"),
    "ds: mixed": (mixed_ds, (), ["foreign-types-differ"], "uint32"),
    "ds: twice": (repeated_ds, (), ["foreign-tokens-twice"], "doc_shuffled"),
    "mds: missing": (missing_shard, (), ["foreign-shard-missing"], "shard.00001.mds"),
    "mds: two missing": (two_missing_shards, (), ["foreign-shard-missing"] * 2, "shard.00000"),
    "mds: truncated": (truncated_shard, (), ["foreign-size-differs"], "shard.00001.mds"),
    "mds: packed": (packed_shard, (), ["foreign-file-damaged"], "shard.00001.mds.zstd"),
    "mds: bomb": (bomb_in_shard, (), ["foreign-file-damaged"], "at least"),
    "mds: hash": (hash_of_shard, (), ["foreign-hash-differs"], "sha1"),
    "mds: hash of the content": (hash_of_content, (), ["foreign-hash-differs"], "xxh64"),
    "ds: link": (link_of_document_ends, (), ["foreign-link-leads-out"], "elsewhere.index"),
    "numpy: longer": (longer_numpy, BY_TOKEN, ["foreign-size-differs"], "162 bytes"),
    "parquet: part": (missing_part, (), ["foreign-part-missing"], "train-00000-of-00003"),
    "arrow: end": (stream_without_end, (), ["foreign-file-damaged"], "truncated"),
    "mds: type": (type_of_shard, (), ["foreign-types-differ"], "int32"),
    "mds: mixed": (mixed_shards, (), ["foreign-types-differ"], "uint16"),
    "mds: name": (name_leads_out, (), ["foreign-name-leads-out"], "../shard.00000.mds"),
    "mds: link": (link_of_shard, (), ["foreign-link-leads-out"], "elsewhere.mds"),
    "mds: index": (broken_index, (), ["foreign-index-damaged"], "index.json"),
    "mds: width": (wrong_bytes, (), ["foreign-ids-outside"], "in document 0"),
    "mds: column": (foreign.mds, ("--column", "text"), ["foreign-column-missing"], "a_text"),
    "flat: link": (link_of_flat, BY_TOKEN, ["foreign-link-leads-out"], "elsewhere.bin"),
    "litdata: missing": (missing_chunk, (), ["foreign-shard-missing"], "chunk-0-1.bin"),
    "litdata: truncated": (truncated_chunk, (), ["foreign-size-differs"], "chunk-0-1.bin"),
    "litdata: mixed": (mixed_chunks, (), ["foreign-size-differs"] * 2, "int32"),
    "litdata: offsets": (offsets_of_chunk, (), ["foreign-file-damaged"], "item 0"),
    "litdata: other": (other_litdata, (), ["litdata-holds-other"], "jpeg"),
    "parquet: truncated": (truncated_parquet, (), ["foreign-file-damaged"], "a.parquet"),
    "parquet: null": (null_in_parquet, (), ["foreign-row-null"], "row 1"),
    "parquet: padded": (padded_parquet, (), ["foreign-row-padded"], "row 1"),
    "parquet: mixed": (mixed_parquet, (), ["foreign-types-differ"], "int64"),
    "parquet: columns": (two_columns, (), ["foreign-column-not-unique"], "a, b"),
    "parquet: negative": (negative, (), ["foreign-ids-outside"], "token 3, in document 1, is -100"),
    "arrow: null": (null_row, (), ["foreign-row-null"], "row 1"),
    "arrow: truncated": (truncated_arrow, (), ["foreign-file-damaged"], "a.arrow"),
    "saved: missing": (missing_arrow, (), ["foreign-shard-missing"], "00001-of-00002"),
    "json: broken": (
        lines('{"input_ids": [1, 2]}', '{"input_ids": [1, ', '{"input_ids": [1.5]}', '{"a": 1}'),
        (),
        ["foreign-line-unusable"] * 3,
        "a.jsonl:3",
    ),
    "json: padded": (
        lines('{"input_ids": [1, 2], "attention_mask": [1, 0]}'),
        (),
        ["foreign-line-unusable"],
        "padding",
    ),
    "nothing": (lambda folder: None, (), ["foreign-input-missing"], "in"),
    "unknown": (
        lambda folder: foreign.write(folder / "a.xyz", b"12"),
        (),
        ["foreign-format-unknown"],
        "nanogpt",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_files_are_refused_by_place_and_leave_nothing(
    name: str, tmp_path: Path, run: Run
) -> None:
    write, flags, codes, place = CASES[name]
    write(tmp_path / "in")
    (tmp_path / "out").mkdir()
    pair = write_pair(tmp_path / "out" / "pair", [[1, 2]])
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for more in ((), ("--overwrite",)):
        prefix = pair if more else tmp_path / "out" / "new"
        arguments = ("--input", tmp_path / "in", "--output-prefix", prefix, *flags, *more)
        status = 2 if codes == ["foreign-boundaries-twice"] else 1
        printed = run(*arguments, status=status).err
        assert printed_codes(printed) == codes
        assert place in printed
        left = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert left == before


def test_problems_of_several_files_are_reported_at_once(tmp_path: Path, run: Run) -> None:
    for at in range(3):
        foreign.write(tmp_path / "in" / f"{at}.bin", foreign.numbers(TOKENS[: 16 - at]))
    flags = ("--input", tmp_path / "in", "--output-prefix", tmp_path / "o", *BY_TOKEN)
    printed = run(*flags, "--vocab-size", 300, status=1).err
    assert printed_codes(printed) == ["foreign-ids-outside"] * 3
    printed = run(*flags, status=1).err
    assert printed_codes(printed) == ["foreign-document-truncated"] * 2
    assert os.listdir(tmp_path) == ["in"]


def test_an_existing_pair_is_replaced_only_on_demand(tmp_path: Path, run: Run) -> None:
    write_pair(tmp_path / "o", [[1, 2]])
    before = (tmp_path / "o.bin").read_bytes()
    flags = ("--input", foreign.olmo(tmp_path / "in"), "--output-prefix", tmp_path / "o")
    assert printed_codes(run(*flags, status=2).err) == ["output-exists"]
    assert (tmp_path / "o.bin").read_bytes() == before
    run(*flags, "--overwrite")
    done = (tmp_path / "o.bin").read_bytes()
    assert done == np.array(TOKENS, "<u2").tobytes()
    assert "nothing left to do" in run(*flags).out


def test_an_empty_file_is_refused(tmp_path: Path, run: Run) -> None:
    path = foreign.write(tmp_path / "a.bin", b"")
    flags = ("--input", path, "--output-prefix", tmp_path / "o", "--format", "nanogpt", *BY_TOKEN)
    assert printed_codes(run(*flags, status=1).err) == ["foreign-file-empty"]


def test_the_output_is_no_input(tmp_path: Path, run: Run) -> None:
    path = foreign.nanogpt(tmp_path)
    flags = ("--input", path, "--output-prefix", tmp_path / "train", *BY_TOKEN, "--overwrite")
    assert printed_codes(run(*flags, status=1).err) == ["output-is-an-input"]
    assert path.read_bytes() == foreign.numbers(TOKENS)


def test_parts_of_data_sets_are_not_taken_for_all_of_them(tmp_path: Path, run: Run) -> None:
    out = ("--output-prefix", tmp_path / "o")
    shard = foreign.mds(tmp_path / "m") / "shard.00000.mds"
    assert printed_codes(run("--input", shard, *out, status=1).err) == [
        "foreign-input-needs-folder"
    ]
    index = foreign.datatrove(tmp_path / "d") / "00000_unshuffled.ds.index"
    assert printed_codes(run("--input", index, *out, status=1).err) == ["foreign-input-describes"]
    url = run("--input", "s3://bucket/train.bin", *out, status=1).err
    assert printed_codes(url) == ["foreign-input-by-url"]
    both = run("--input", tmp_path / "m", tmp_path / "d", *out, status=1).err
    assert printed_codes(both) == ["foreign-formats-differ"]
    twice = run("--input", tmp_path / "d", tmp_path / "d", *out, status=1).err
    assert printed_codes(twice) == ["foreign-file-twice"]
