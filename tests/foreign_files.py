"""Small files of other programs' formats of tokens and data, as those programs write them."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_ds.data.token_files.file_formats import Holds
from megatron_ds.preprocess.documents import foreign_inputs

TOKENS = np.array([32, 2153, 4994, 802, 0, 300, 4999, 17, 65, 4999], dtype=np.uint16)
BARE = TOKENS.tobytes()
MDS_SHARD = {"column_encodings": ["ndarray:uint16"], "column_names": ["tokens"], "format": "mds"}
ZARR = {"zarr_format": 3, "node_type": "array", "shape": [10]}


def json_bytes(value: object, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()


def offsets(sizes: Sequence[int], gap: int = 0) -> bytes:
    """A count and the ends of the items, from the beginning of the file."""
    begin = 4 * (len(sizes) + 2) + gap
    ends = [begin + sum(sizes[:count]) for count in range(len(sizes) + 1)]
    return struct.pack(f"<{len(sizes) + 2}I", len(sizes), *ends)


def mds_shard() -> bytes:
    description = json_bytes(MDS_SHARD)
    return offsets([20], len(description)) + description + BARE


def packed(name: str) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr(name, BARE)
    return sink.getvalue()


def numpy_file() -> bytes:
    sink = io.BytesIO()
    np.save(sink, TOKENS)
    return sink.getvalue()


def saved_dataset(dtype: str) -> dict[str, bytes]:
    """A folder of `datasets.save_to_disk`, without the content of its Arrow files."""
    feature = {"dtype": dtype, "_type": "Value"}
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    return {
        "data-00000-of-00001.arrow": b"",
        "cache-b3be43cc2fb59fac.arrow": b"",
        "dataset_info.json": json_bytes({"features": {"column": feature}}, indent=2),
        "state.json": json_bytes(state, indent=2),
    }


def fairseq_index(lengths: Sequence[int]) -> bytes:
    """An index of fairseq: that of Megatron without documents."""
    starts = [2 * sum(lengths[:count]) for count in range(len(lengths))]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, len(lengths))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q", *lengths, *starts)


IMPORTED = ("datatrove", "OLMo-core", "NumPy", "nanoGPT", "llm.c", "MDS", "litdata", "Levanter")
"""Beginnings of the cases of which tools/import_tokens.py makes a pair."""


class ForeignFiles(NamedTuple):
    """Files of a format.

    Attributes:
        holds: What the format holds.
        program: A word of its name.
        files: Contents by name.
    """

    holds: Holds
    program: str
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> list[Path]:
        """Writes the files. Returns their paths."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return [folder / name for name in self.files]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
METADATA = b"tiny.json|2\n10\n10 T"
TFRECORD = bytes.fromhex("040000000000000042455204") + b"text" + bytes(4)
LLM_C = struct.pack("<3i", 20240520, 1, 10) + bytes(1012) + BARE
LLM_C_WIDE = struct.pack("<3i", 20240801, 7, 10) + bytes(1012) + TOKENS.astype("<u4").tobytes()
TINY_LLAMA = b"LITPKDS" + struct.pack("<QBQ", 1, 8, 10) + BARE
CASES = {
    "datatrove": ForeignFiles(
        Holds.IDS,
        "datatrove",
        {
            "00000_unshuffled.ds": BARE,
            "00000_unshuffled.ds.index": struct.pack("<2Q", 7, 10),
            "00000_unshuffled.ds.metadata": METADATA,
        },
    ),
    "datatrove renamed": ForeignFiles(
        Holds.IDS, "datatrove", {"train": BARE, "train.metadata": METADATA}
    ),
    "OLMo-core": ForeignFiles(Holds.IDS, "OLMo-core", {"a.npy": BARE, "a.csv.gz": b"\x1f\x8b"}),
    "NumPy": ForeignFiles(Holds.IDS, "NumPy", {"a.npy": numpy_file(), "b": numpy_file()}),
    "npz": ForeignFiles(Holds.IDS, "NumPy", {"a.npz": packed("tokens.npy")}),
    "nanoGPT": ForeignFiles(Holds.IDS, "nanoGPT", {"train.bin": BARE}),
    "nanoGPT renamed": ForeignFiles(Holds.IDS, "nanoGPT", {"tokens.u16": BARE, "tokens": BARE}),
    "llm.c": ForeignFiles(Holds.IDS, "llm.c", {"a.bin": LLM_C, "b.bin": LLM_C_WIDE, "c": LLM_C}),
    "TinyLlama": ForeignFiles(Holds.IDS, "TinyLlama", {"a.bin": TINY_LLAMA, "b": TINY_LLAMA}),
    "MDS": ForeignFiles(
        Holds.RECORDS,
        "MDS",
        {
            "index.json": json_bytes({"shards": [MDS_SHARD], "version": 2}),
            "shard.00000.mds": mds_shard(),
        },
    ),
    "MDS compressed": ForeignFiles(
        Holds.RECORDS,
        "MDS",
        {
            "index.json": json_bytes({"version": 2, "shards": []}),
            "shard.00000.mds.zstd": b"\x28\xb5\x2f\xfd",
        },
    ),
    "MDS renamed": ForeignFiles(Holds.RECORDS, "MDS", {"part-0": mds_shard()}),
    "litdata": ForeignFiles(
        Holds.RECORDS,
        "litdata",
        {
            "index.json": json_bytes({"config": {"types": "tensor"}, "chunks": []}),
            "chunk-0-0.bin": offsets([14, 6]) + BARE,
            "chunk-0-1.zstd.bin": b"\x28\xb5\x2f\xfd",
        },
    ),
    "litdata renamed": ForeignFiles(Holds.RECORDS, "litdata", {"c.bin": offsets([14, 6]) + BARE}),
    "Levanter": ForeignFiles(
        Holds.IDS,
        "Levanter",
        {"shard_ledger.json": b"{}", "input_ids/data/zarr.json": json_bytes(ZARR)},
    ),
    "fairseq": ForeignFiles(
        Holds.IDS,
        "fairseq",
        {"train.idx": fairseq_index([7, 3]), "train.bin": BARE, "dict.txt": b"the 9\nof 4\n"},
    ),
    "TNTIDX": ForeignFiles(
        Holds.IDS, "TNTIDX", {"train.idx": b"TNTIDX\0\0" + bytes(40), "train.bin": BARE}
    ),
    "dataset of ids": ForeignFiles(Holds.IDS, "datasets", saved_dataset("int32")),
    "dataset of text": ForeignFiles(Holds.SAVED_DATASET, "datasets", saved_dataset("string")),
    "splits": ForeignFiles(
        Holds.SAVED_DATASET, "datasets", {"dataset_dict.json": b'{"splits": ["train"]}'}
    ),
    "splits of ids": ForeignFiles(
        Holds.IDS,
        "datasets",
        {
            "dataset_dict.json": b'{"splits": ["train"]}',
            **{f"train/{name}": content for name, content in saved_dataset("int64").items()},
        },
    ),
    "dataset cache": ForeignFiles(
        Holds.DATASET_CACHE,
        "datasets",
        {
            "cache-b3be43cc2fb59fac.arrow": b"",
            "dataset_info.json": json_bytes({"builder_name": "json", "features": {}}),
        },
    ),
    "torch": ForeignFiles(Holds.RECORDS, "torch", {"a.pt": packed("archive/data.pkl")}),
    "TFRecord": ForeignFiles(
        Holds.RECORDS, "TFRecord", {"a.tfrecord-00000-of-00001": TFRECORD, "b": TFRECORD}
    ),
    "ArrayRecord": ForeignFiles(Holds.RECORDS, "ArrayRecord", {"a.array_record": bytes(64)}),
    "Git LFS": ForeignFiles(
        Holds.POINTER,
        "LFS",
        dict.fromkeys(("a.jsonl", "b.parquet", "c.bin"), POINTER),
    ),
}
"""Files by a name of the case."""


def is_imported(case: str) -> bool:
    """Whether tools/import_tokens.py makes a pair of the files of a case."""
    return case.startswith(IMPORTED) or case in ("dataset of ids", "splits of ids")


def input_code(case: str) -> str:
    """Code of the problem of preprocessing with the files of a case."""
    if is_imported(case):
        return "input-of-other-trainer"
    return foreign_inputs.CODES[CASES[case].holds]
