"""Token files of other trainers, byte by byte as their formats are described.

Written without the package, so that its readers are compared with something else.
"""

from __future__ import annotations

import bz2
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

END = 99
DOCUMENTS = [[5, 6, 7, END], [8, END], [300, 2, 3, 4, 5, 6, END], [1, 0, END]]
"""Documents, each with its end token."""
TOKENS = [token for document in DOCUMENTS for token in document]
ENDS = [sum(map(len, DOCUMENTS[: count + 1])) for count in range(len(DOCUMENTS))]
LETTERS = {"uint8": "B", "uint16": "H", "uint32": "I", "int32": "i", "int64": "q"}
MDS_CODES = {"uint16": 16, "uint32": 32, "int32": 33, "int64": 65}
Write = Callable[[Path], Path]
"""Writes files to a folder, and returns the path to import."""


def numbers(values: Sequence[int], dtype: str = "uint16") -> bytes:
    return struct.pack(f"<{len(values)}{LETTERS[dtype]}", *values)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def nanogpt(folder: Path) -> Path:
    return write(folder / "train.bin", numbers(TOKENS))


def before(documents: Sequence[Sequence[int]] = DOCUMENTS) -> list[int]:
    """The tokens with the end token in front of each document, as llm.c writes them."""
    return [token for document in documents for token in (END, *document[:-1])]


def llm_c(folder: Path, name: str = "shard.bin", tokens: Sequence[int] | None = None) -> Path:
    ids = before() if tokens is None else tokens
    head = struct.pack("<3i", 20240520, 1, len(ids)).ljust(1024, b"\0")
    return write(folder / name, head + numbers(ids))


def llm_c_wide(folder: Path) -> Path:
    head = struct.pack("<3i", 20240801, 7, len(TOKENS)).ljust(1024, b"\0")
    return write(folder / "llama3.bin", head + numbers(before(), "uint32"))


def olmo(folder: Path, dtype: str = "uint16", more: str = "") -> Path:
    rows = "".join(
        f"{end - len(document)},{end}{more}\n"
        for document, end in zip(DOCUMENTS, ENDS, strict=True)
    )
    write(folder / "part-0.csv.gz", gzip.compress(rows.encode()))
    write(folder / "part-0.npy", numbers(TOKENS, dtype))
    return folder


def dolma(folder: Path) -> Path:
    return olmo(folder, "uint32", ",d19,in.jsonl.gz,20")


def datatrove(folder: Path, name: str = "00000_unshuffled.ds", dtype: str = "uint16") -> Path:
    width = 2 if dtype == "uint16" else 4
    write(folder / f"{name}.index", struct.pack(f"<{len(ENDS)}Q", *ENDS))
    write(folder / f"{name}.metadata", f"tok.json|{width}\n{len(TOKENS)}\n16 T".encode())
    write(folder / name, numbers(TOKENS, dtype))
    return folder


def mds_sample(document: Sequence[int], encoding: str) -> bytes:
    """The column of ids of a sample."""
    name, _, dtype = encoding.partition(":")
    if name == "bytes":
        return numbers(document, "int64")
    dtype, _, shape = dtype.partition(":")
    head = b""
    if not dtype:
        dtype = "uint16"
        head = bytes([MDS_CODES[dtype]])
    if not shape:
        wide = len(document) > 255
        head += struct.pack("<BH" if wide else "<BB", 1 << 2 | wide, len(document))
    return head + numbers(document, dtype)


def mds_shard(documents: Sequence[Sequence[int]], encoding: str, id_first: bool = False) -> bytes:
    """A shard with the columns `a_text`, of varying size, `number` and `tokens`."""
    size = None
    if encoding.count(":") == 2:
        size = len(mds_sample(documents[0], encoding))
    description = json.dumps(mds_columns(encoding, size)).encode()
    samples = []
    for document in documents:
        text = ("x" * len(document)).encode()
        ids = mds_sample(document, encoding)
        sizes = [len(text)] + ([len(ids)] if size is None else [])
        samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + text + bytes(8) + ids)
    begin = 4 * (len(samples) + 2) + len(description)
    offsets = [begin + sum(map(len, samples[:count])) for count in range(len(samples) + 1)]
    head = struct.pack(f"<{len(samples) + 2}I", len(samples), *offsets)
    return head + description + b"".join(samples)


def mds_columns(encoding: str, size: int | None = None) -> dict[str, Any]:
    return {
        "column_encodings": ["str", "int", encoding],
        "column_names": ["a_text", "number", "tokens"],
        "column_sizes": [None, 8, size],
        "format": "mds",
    }


def mds(
    folder: Path,
    encoding: str = "ndarray:uint16",
    compression: str | None = None,
    shards: Sequence[Sequence[Sequence[int]]] = (DOCUMENTS[:3], DOCUMENTS[3:]),
) -> Path:
    """A folder with two shards."""
    entries = []
    for at, documents in enumerate(shards):
        content = mds_shard(documents, encoding)
        name = f"shard.{at:05}.mds"
        entry = mds_columns(encoding)
        if encoding.count(":") == 2:
            entry["column_sizes"] = [None, 8, len(mds_sample(documents[0], encoding))]
        entry |= {
            "compression": compression,
            "samples": len(documents),
            "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
            "zip_data": None,
        }
        if compression:
            packed = pack(content, compression.partition(":")[0])
            name = f"{name}.{compression.partition(':')[0]}"
            entry["zip_data"] = {"basename": name, "bytes": len(packed), "hashes": {}}
            content = packed
        write(folder / name, content)
        entries.append(entry)
    write(folder / "index.json", json.dumps({"version": 2, "shards": entries}).encode())
    return folder


def pack(content: bytes, codec: str) -> bytes:
    if codec == "gz":
        return gzip.compress(content)
    if codec == "bz2":
        return bz2.compress(content)
    name = {"br": "brotli"}.get(codec, codec)
    return bytes(pa.Codec(name).compress(content, asbytes=True))


def mds_rows(folder: Path, encoding: str = "ndarray:int32:4") -> Path:
    """Rows of four tokens across documents, of which the last one is not complete."""
    rows = [TOKENS[at : at + 4] for at in range(0, len(TOKENS) - 3, 4)]
    return mds(folder, encoding, shards=(rows[:2], rows[2:]))


def litdata(
    folder: Path, dtype: str = "int32", code: int = 16, compression: str | None = None
) -> Path:
    """A folder with two chunks."""
    chunks = []
    for at, documents in enumerate((DOCUMENTS[:1], DOCUMENTS[1:])):
        items = [numbers(document, dtype) for document in documents]
        begin = 4 * (len(items) + 2)
        offsets = [begin + sum(map(len, items[:count])) for count in range(len(items) + 1)]
        head = struct.pack(f"<{len(items) + 2}I", len(items), *offsets)
        content = head + b"".join(items)
        name = f"chunk-0-{at}.bin" if compression is None else f"chunk-0-{at}.{compression}.bin"
        write(folder / name, content if compression is None else pack(content, compression))
        chunks.append(
            {
                "chunk_bytes": len(content),
                "chunk_size": len(items),
                "dim": sum(map(len, documents)),
                "filename": name,
            }
        )
    config = {"compression": compression, "data_format": [f"no_header_tensor:{code}"]}
    index = {"chunks": chunks, "config": {**config, "encryption": None, "types": "tensor"}}
    write(folder / "index.json", json.dumps(index).encode())
    return folder


def table(documents: Sequence[Sequence[int]] = DOCUMENTS, type: Any = None) -> pa.Table:
    ids = pa.array(documents, pa.list_(type or pa.int32()))
    masks = pa.array([[1] * len(document) for document in documents], pa.list_(pa.int8()))
    return pa.table({"attention_mask": masks, "input_ids": ids})


def parquet_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table(), folder / "a.parquet", row_group_size=3)
    return folder / "a.parquet"


def arrow_stream(path: Path, content: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, content.schema) as writer:
        for row in range(len(content)):
            writer.write_table(content.slice(row, 1))
    return path


def arrow(folder: Path) -> Path:
    return arrow_stream(folder / "a.arrow", table())


def saved(folder: Path) -> Path:
    """A folder of `save_to_disk` with files of an older save and of a `map`, which do not count."""
    for at, part in enumerate((table().slice(0, 1), table().slice(1))):
        arrow_stream(folder / f"data-{at:05}-of-00002.arrow", part)
    arrow_stream(folder / "data-00000-of-00001.arrow", table())
    arrow_stream(folder / "cache-0123456789abcdef.arrow", table())
    feature = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}
    info = {"features": {"input_ids": feature}}
    names = [{"filename": f"data-{at:05}-of-00002.arrow"} for at in range(2)]
    write(folder / "dataset_info.json", json.dumps(info).encode())
    write(folder / "state.json", json.dumps({"_data_files": names, "_split": None}).encode())
    return folder


def json_lines(folder: Path) -> Path:
    lines = "\n".join(json.dumps({"id": "x", "input_ids": document}) for document in DOCUMENTS)
    return write(folder / "ids.jsonl", lines.encode())


def levanter(folder: Path, shards: Sequence[str] = ("",)) -> Path:
    """A cache, written with tensorstore; with names of shards in folders of their own."""
    import tensorstore

    parts = [DOCUMENTS[:3], DOCUMENTS[3:]] if len(shards) > 1 else [DOCUMENTS]
    for name, documents in zip(shards, parts, strict=True):
        ends = [sum(map(len, documents[: count + 1])) for count in range(len(documents))]
        ids = [token for document in documents for token in document]
        arrays = (("offsets", [len(documents), *ends], "int64"), ("data", ids, "int32"))
        for array, values, dtype in arrays:
            path = folder / name / "input_ids" / array
            grid = {"name": "regular", "configuration": {"chunk_shape": [10]}}
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(path)},
                "metadata": {"data_type": dtype, "shape": [1 << 40], "chunk_grid": grid},
            }
            store = tensorstore.open(spec, create=True).result()
            store[: len(values)].write(values).result()
    rows = {name: len(part) for name, part in zip(shards, parts, strict=True)}
    ledger = {
        "total_num_rows": len(DOCUMENTS),
        "is_finished": True,
        "layout": "sharded" if len(shards) > 1 else "consolidated",
        "shard_rows": rows,
        "finished_shards": list(shards),
    }
    write(folder / "shard_ledger.json", json.dumps(ledger).encode())
    return folder
