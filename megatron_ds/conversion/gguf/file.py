"""GGUF files: keys and tensors, read on demand and written one tensor at a time.

A file has keys with values, name, type, shape and place of each tensor, and the tensors' bytes,
each at a multiple of 32 bytes. The library `gguf` writes everything but these bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import ignore, user_error
from megatron_ds.conversion.safetensors_files import read_ahead
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.fileio.atomic import READ_BYTES, fsync_path, name_in_errors
from megatron_ds.fileio.direct_file import DirectFile
from megatron_ds.tokenizer.gguf.header import read_header

ALIGNMENT = 32
"""Bytes of which the place of a tensor is a multiple."""
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
QUANTIZED = "Q8_0"
QUANTIZED_BLOCK = 32
"""Elements of a row that have one scale."""
QUANTIZED_BYTES = 34
ROWS_ELEMENTS = 2**18
"""Elements that are quantized at once."""
NEEDED_BY = "--to gguf, and files of llama.cpp (pip install gguf)"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file that is written."""

    shape: tuple[int, ...]
    type_name: str
    """F32, BF16, F16 or Q8_0."""
    data: TensorReader
    """The tensor, or the bytes of its blocks."""


@dataclass(frozen=True)
class GgufFile:
    """The content of a file."""

    keys: Mapping[str, Any]
    """Values by complete key; numbers of 32 bits are the shortest decimal ones."""
    tensors: Mapping[str, TensorReader]
    """Tensors by name; quantized ones are read as fp32."""
    type_names: Mapping[str, str]
    """Types by name of the tensor."""


def open_file(path: Path) -> GgufFile:
    """Reads the keys of a file and where its tensors are.

    Raises:
        UserError: If the file is damaged, or has quantized tensors of another type than Q8_0.
        ValueError, LookupError, TypeError: Also if it is damaged.
    """
    gguf = import_library("gguf", NEEDED_BY)
    size = path.stat().st_size
    header = read_header(path)
    keys = {
        name: _shortened(value) if name in header.single_precision else value
        for name, value in header.keys.items()
    }
    tensors: dict[str, TensorReader] = {}
    type_names: dict[str, str] = {}
    for tensor in header.tensors:
        name = tensor.name
        shape = tensor.shape
        ggml_type = gguf.GGMLQuantizationType(tensor.type_index)
        type_names[name] = ggml_type.name
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        end = tensor.offset + math.prod(shape) // block_elements * block_bytes
        if end > size or 0 in shape:
            raise ValueError(f"the tensor {name} ends at byte {end} of {size}")
        location = (path, tensor.offset, shape)
        if type_names[name] == QUANTIZED:
            tensors[name] = TensorReader.full(shape, torch.float32, _quantized_reader(*location))
        elif (dtype := TYPES.get(type_names[name])) is not None:
            tensors[name] = _plain_reader(*location, dtype)
        else:
            raise user_error("gguf-type-unsupported", path=path, name=name, dtype=type_names[name])
    return GgufFile(keys, tensors, type_names)


def _shortened(value: Any) -> Any:
    """A float of 32 bits, or a list of such, as the shortest decimal numbers."""
    return [_shortest(one) for one in value] if isinstance(value, list) else _shortest(value)


def _shortest(value: float) -> float:
    """The decimal number that a float of 32 bits was written for."""
    return float(str(np.float32(value)))


def _plain_reader(
    path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> TensorReader:
    row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize

    def load(rows: range, columns: Any) -> Tensor:
        from megatron_ds.engine.states.state_reader import part_of

        with open(path, "rb", buffering=0) as file:
            file.seek(offset + rows.start * row)
            data = _read_exactly(file, len(rows) * row, path)
        value = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return part_of(value.reshape(len(rows), *shape[1:]), range(len(rows)), columns)

    return TensorReader(shape, dtype, load)


def _quantized_reader(path: Path, offset: int, shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape, dtype=np.int64)) // QUANTIZED_BLOCK * QUANTIZED_BYTES

    def load() -> Tensor:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            data = _read_exactly(file, size, path)
        blocks = np.frombuffer(data, np.uint8).reshape(-1, QUANTIZED_BYTES)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = blocks[:, 2:].view(np.int8).astype(np.float32)
        return torch.from_numpy(values * scales).reshape(shape)

    return load


def _read_exactly(file: Any, size: int, path: Path) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = file.readinto(view[done : done + READ_BYTES])
        if not count:
            raise user_error("foreign-file-unreadable", path=path, error="it ends within a tensor")
        done += count
    return data


def quantized(tensor: TensorReader) -> TensorReader:
    """The bytes of a tensor in blocks of `QUANTIZED_BLOCK` elements with a scale, as llama.cpp
    quantizes to Q8_0."""
    rows = tensor.numel // QUANTIZED_BLOCK

    def load() -> Tensor:
        from gguf.quants import quantize

        gguf = import_library("gguf", NEEDED_BY)
        flat = tensor.read().detach().reshape(-1)
        result = torch.empty(rows * QUANTIZED_BYTES, dtype=torch.uint8)
        done = 0
        for start in range(0, len(flat), ROWS_ELEMENTS):
            block = flat[start : start + ROWS_ELEMENTS].float().reshape(-1, QUANTIZED_BLOCK)
            data = quantize(block.numpy(), gguf.GGMLQuantizationType.Q8_0)
            result[done : done + data.size] = torch.from_numpy(data.reshape(-1))
            done += data.size
        return result

    return TensorReader.full((rows * QUANTIZED_BYTES,), torch.uint8, load)


def write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    on_tensor: OnTensor,
    confirm: Callable[[], object] = ignore,
) -> None:
    """Writes a new file, complete or not at all: under a temporary name, which is renamed.

    Args:
        path: Must not exist.
        architecture: Value of general.architecture.
        keys: Values by complete key: bool, int, float, text, bytes, or a list of one of them.
        tensors: Tensors by name.
        on_tensor: Reports progress.
        confirm: Called when only the rename is left to do. With its error the file never appears.

    Raises:
        UserError: If the file exists.
        OSError: If the disk fails.
    """
    path = path.resolve()
    if os.path.lexists(path):
        raise user_error("output-file-exists", path=path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with name_in_errors(path):
            _write_header(temporary, architecture, keys, tensors)
            with DirectFile(temporary) as file:
                _write_tensors(file, tensors, on_tensor)
                file.finish()
        confirm()
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def _write_header(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> None:
    gguf = import_library("gguf", NEEDED_BY)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add_key(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor_info(
            name,
            tensor.shape,
            np.dtype(np.float32),
            tensor.data.nbytes,
            gguf.GGMLQuantizationType[tensor.type_name],
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _add_key(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tensors(
    file: DirectFile, tensors: Mapping[str, GgufTensor], on_tensor: OnTensor
) -> None:
    ordered = [(name, tensor.data) for name, tensor in tensors.items()]
    with ThreadPoolExecutor(1) as pool:
        for (name, tensor), data in zip(ordered, read_ahead(pool, ordered), strict=True):
            file.write(bytes(-file.size % ALIGNMENT))
            file.write(data)
            on_tensor(name, tensor.nbytes)
    file.write(bytes(-file.size % ALIGNMENT))
