"""Tensors in the safetensors format: one file, or several with an index as transformers writes.

A file is the length of its header in 8 bytes, a JSON header with type, shape and place of each
tensor, and the tensors' bytes. It is written one tensor at a time, while the next one is read.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.config.problems import ignore, user_error
from megatron_ds.conversion.model_settings import read_json_object
from megatron_ds.engine.states.state_reader import Columns, TensorReader, TensorReaders, part_of
from megatron_ds.fileio.atomic import FileRecord, name_in_errors, new_checksum
from megatron_ds.fileio.direct_file import DirectFile

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 10**9
"""Size of a file at which the next one is started, as in transformers."""
READ_AHEAD_BYTES = 2**25
"""Bytes of tensors that are read before they are written, unless the next one is larger."""


def read_index(path: Path) -> dict[str, Path]:
    """The file of each tensor that an index names, next to it.

    Raises:
        UserError: If the index is damaged, or names a file elsewhere.
    """
    places = read_json_object(path).get("weight_map")
    names = [*places.values()] if isinstance(places, dict) else [None]
    if any(not isinstance(name, str) or not name or Path(name).name != name for name in names):
        error = "its weight_map is not a map of tensors to files beside it"
        raise user_error("foreign-file-unreadable", path=path, error=error)
    return {str(tensor): path.with_name(str(name)) for tensor, name in (places or {}).items()}


def open_safetensors(path: Path) -> dict[str, TensorReader]:
    """The tensors of a file.

    Raises:
        UserError: If it is damaged.
    """
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                entry = file.get_slice(name)
                shape = tuple(entry.get_shape())
                dtype = entry.get_dtype()
                if dtype not in DTYPES:
                    raise SafetensorError(f"{name} has type {dtype}")
                read = functools.partial(_read_rows, path, name)
                tensors[name] = TensorReader(shape, DTYPES[dtype], read)
    except SafetensorError as error:
        raise user_error("foreign-file-unreadable", path=path, error=error) from error
    return tensors


def write_sharded(
    folder: Path,
    tensors: TensorReaders,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: OnTensor = ignore,
) -> dict[str, FileRecord]:
    """Writes tensors in their order: one file, or several with an index.

    Args:
        folder: Existing folder.
        tensors: Tensors to write, by name.
        shard_bytes: Size of a file, except for one with a single larger tensor.
        on_tensor: Reports progress.

    Returns:
        The files by name.
    """
    shards: list[dict[str, TensorReader]] = [{}]
    for name, tensor in tensors.items():
        size = sum(item.nbytes for item in shards[-1].values())
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        return {SINGLE: _write_file(folder / SINGLE, shards[0], on_tensor)}
    records: dict[str, FileRecord] = {}
    places: dict[str, str] = {}
    for shard_number, shard in enumerate(shards, 1):
        file = f"model-{shard_number:05d}-of-{len(shards):05d}.safetensors"
        records[file] = _write_file(folder / file, shard, on_tensor)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    content = (json.dumps(index, indent=2) + "\n").encode()
    (folder / INDEX).write_bytes(content)
    return {**records, INDEX: FileRecord.of(content)}


def _write_file(path: Path, tensors: TensorReaders, on_tensor: OnTensor) -> FileRecord:
    # Larger elements first, so that each tensor's bytes are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start = end
        end += tensor.nbytes
        dtype = NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = new_checksum()
    with name_in_errors(path), DirectFile(path) as file, ThreadPoolExecutor(1) as pool:
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            file.write(part)
        for (name, tensor), data in zip(ordered, read_ahead(pool, ordered), strict=True):
            digest.update(data)
            file.write(data)
            on_tensor(name, tensor.nbytes)
        file.finish()
    return FileRecord(file.size, digest.hexdigest())


def read_ahead(pool: Executor, tensors: Iterable[tuple[str, TensorReader]]) -> Iterator[Any]:
    """The bytes of the tensors. While one is written the next ones are read: one of any size, or
    several that have `READ_AHEAD_BYTES` together."""
    pending: deque[tuple[int, Future[Any]]] = deque()
    ahead = 0
    for _, tensor in tensors:
        pending.append((tensor.nbytes, pool.submit(_bytes_of, tensor)))
        ahead += tensor.nbytes
        while len(pending) > 1 and (ahead - pending[0][0] >= READ_AHEAD_BYTES):
            size, data = pending.popleft()
            yield data.result()
            ahead -= size
    for _, data in pending:
        yield data.result()


def _bytes_of(tensor: TensorReader) -> Any:
    value = tensor.read()
    assert tuple(value.shape) == tensor.shape, (tuple(value.shape), tensor.shape)
    assert value.dtype == tensor.dtype, (value.dtype, tensor.dtype)
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_rows(path: Path, name: str, rows: range, columns: Columns | None) -> Tensor:
    """Reads rows of a tensor from the disk, and no others."""
    try:
        with safe_open(path, framework="pt") as file:
            entry = file.get_slice(name)
            size = entry.get_shape()
            if not size or len(rows) == size[0]:
                value: Tensor = file.get_tensor(name)
            else:
                value = entry[rows.start : rows.stop]
    except SafetensorError as error:
        raise user_error("foreign-file-unreadable", path=path, error=error) from error
    return part_of(value, range(len(rows)), columns)
