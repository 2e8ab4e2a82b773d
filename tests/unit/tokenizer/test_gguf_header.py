"""Headers of files of llama.cpp, compared with the library `gguf`."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from megatron_ds.tokenizer.gguf.header import read_header

SINGLE = {"single", "singles"}


def written(path: Path, order: gguf.GGUFEndian, alignment: int) -> Path:
    """A file with a key of each type, and two tensors."""
    writer = gguf.GGUFWriter(path, "llama", endianess=order)
    for name in ("uint8", "uint16", "uint32", "uint64"):
        getattr(writer, f"add_{name}")(name, 200)
    for name in ("int8", "int16", "int32", "int64"):
        getattr(writer, f"add_{name}")(name, -100)
    writer.add_float32("single", 0.1)
    writer.add_float64("double", 0.1)
    writer.add_bool("flag", True)
    writer.add_string("text", "Wörter ▁")
    writer.add_array("singles", [0.5, -1e-3])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_array("tokens", ["a", "", "▁é"])
    writer.add_key_value(
        "bytes", [0, 255], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT8
    )
    if alignment != gguf.GGUF_DEFAULT_ALIGNMENT:
        writer.add_custom_alignment(alignment)
    writer.add_tensor("first", np.ones((3, 5), np.float32))
    writer.add_tensor("second", np.ones(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("order", gguf.GGUFEndian, ids=lambda order: order.name)
def test_keys_and_tensors_are_those_of_the_library(
    order: gguf.GGUFEndian, alignment: int, tmp_path: Path
) -> None:
    path = written(tmp_path / "model.gguf", order, alignment)
    reader = gguf.GGUFReader(path)
    header = read_header(path)
    expected = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.keys == expected
    types = {name: type(value) for name, value in expected.items()}
    assert {name: type(value) for name, value in header.keys.items()} == types
    assert header.single_precision == SINGLE
    tensors = [
        (tensor.name, (*map(int, reversed(tensor.shape)),), tensor.tensor_type, tensor.data_offset)
        for tensor in reader.tensors
    ]
    found = [(info.name, info.shape, info.type_index, info.offset) for info in header.tensors]
    assert found == tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def content(*keys: bytes, version: int = 3, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    start = struct.pack("<4sIQQ", b"GGUF", version, tensor_count, len(keys))
    return start + b"".join(keys) + tensors


NUMBER = text("a") + struct.pack("<IB", 0, 1)
TENSOR = text("w") + struct.pack("<IQIQ", 1, 4, 0, 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (content(NUMBER, NUMBER), "key a twice"),
        (content(tensors=TENSOR * 2, tensor_count=2), "tensor w twice"),
        (content(version=1), "version is 1"),
        (content(version=4), "version is 4"),
        (b"GGML" + content()[4:], "GGUF"),
        (content(text("a") + struct.pack("<IB", 13, 1)), "type 13"),
        (content(text("a") + struct.pack("<IIQIQ", 9, 9, 1, 0, 0)), "type 9"),
        (content(text("a") + struct.pack("<IIQ", 9, 0, 2**62)), "ends within"),
        (content(text("a") + struct.pack("<IIQ", 9, 8, 2**62)), "ends within"),
        (content(struct.pack("<Q", 2**63)), "ends within"),
        (content(tensors=text("w") + struct.pack("<I", 2**31), tensor_count=1), "ends within"),
        (content(text("general.alignment") + struct.pack("<II", 4, 0)), "alignment"),
        (content(text("general.alignment") + struct.pack("<II", 4, 48)), "alignment"),
        (content(text("general.alignment") + struct.pack("<I", 8) + text("32")), "alignment"),
        (b"", "empty"),
    ],
)
def test_a_damaged_header_is_an_error(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words):
        read_header(path)


def test_a_header_that_ends_anywhere_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", gguf.GGUFEndian.LITTLE, 32)
    data = path.read_bytes()
    size = data.index(b"second") + len("second") + struct.calcsize("<IQIQ")
    for end in range(size):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError):
            read_header(path)
    path.write_bytes(data[:size])
    assert [info.name for info in read_header(path).tensors] == ["first", "second"]


def test_versions_differ_in_their_number_only(tmp_path: Path) -> None:
    """Version 1 had lengths of 32 bits."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content(NUMBER, version=2))
    assert read_header(path).keys == {"a": 1}
