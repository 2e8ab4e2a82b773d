"""Reads files that other programs have pickled, without running code or importing their classes.

Owns the list of classes that such files may name. torch's tensors are read as tensors; an object of
a listed class becomes a `StandIn`, which keeps what was pickled and does nothing. A file that names
anything else is rejected with that name.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from megatron_ds.config.data_files import read_table
from megatron_ds.config.problems import UserError, user_error
from megatron_ds.engine.deepspeed.tensor_files import read_tensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata


class StandIn:
    """An object of a class that is not imported.

    Attributes:
        arguments: Arguments of the call of the class or function.
        state: State from which its attributes were set: a dict unless the class decided otherwise.
    """

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> StandIn:
        self = super().__new__(cls)
        self.arguments = arguments
        self.state = {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_ins(table: str) -> dict[tuple[str, str], type]:
    """A class for each one in a table of foreign_classes.toml, by module and name."""
    modules = read_table(__file__, "foreign_classes.toml")[table]
    return {
        (module, name): type(f"{module}.{name}", (StandIn,), {})
        for module, names in modules.items()
        for name in names.split()
    }


STAND_INS = [(cls, cls.__name__) for cls in _stand_ins("files").values()]
METADATA_CLASSES = {**_stand_ins("metadata"), ("torch", "Size"): torch.Size}
"""Classes are stand-ins, because unpickling can change what is found here."""


def read_foreign(file: Path | bytes, name: str = "", *, mmap: bool = True) -> Any:
    """Reads a file that another program wrote with torch.save.

    Args:
        file: The file, or its contents.
        name: Name for messages, of contents.
        mmap: Read the bytes of a tensor when it is used, if the file allows it.

    Raises:
        UserError: If the file is damaged or names a class that is not listed.
    """
    source: Any = io.BytesIO(file) if isinstance(file, bytes) else file
    name = name or str(file)
    mapped = mmap and isinstance(file, Path) and is_mappable(file)
    try:
        return read_tensors(source, mmap=mapped, classes=STAND_INS, name=name)
    except UserError as error:
        rejected = re.search(r"GLOBAL (\S+)", str(error))
        if rejected is None:
            raise
        raise user_error("foreign-class-rejected", path=name, name=rejected[1]) from error


def read_dcp_metadata(path: Path) -> metadata.Metadata:
    """Reads the `.metadata` of a distributed checkpoint.

    Raises:
        UserError: If the file is missing or damaged, or names a class that is not listed.
    """
    try:
        with open(path, "rb") as file:
            described = _metadata_of(_MetadataUnpickler(file, path).load())
        stored = sum(item.stat().st_size for item in path.parent.iterdir())
        for name, entry in described.state_dict_metadata.items():
            size = getattr(entry, "size", ())
            if math.prod(max(1, dim) for dim in size) > stored:
                raise ValueError(f"{name} of shape {list(size)} is larger than the files")
    except UserError:
        raise
    except FileNotFoundError as error:
        raise user_error("dcp-metadata-missing", path=path) from error
    except Exception as error:  # a damaged pickle raises whatever its opcodes lead to
        raise user_error("tensor-file-unreadable", path=path, error=error) from error
    return described


def _metadata_of(loaded: Any) -> metadata.Metadata:
    """The metadata that stand-ins describe; raises anything if they describe none."""
    # It takes a second to import, and few formats have it.
    from torch.distributed.checkpoint import filesystem, metadata

    storage = {}
    for index, stored in loaded.state["storage_data"].items():
        info = filesystem._StorageInfo(**stored.state)
        _size((info.offset, info.length))
        if not info.relative_path or Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"it names the file {info.relative_path}")
        storage[metadata.MetadataIndex(**index.state)] = info
    if not storage:
        raise ValueError("it names no files")
    entries = loaded.state["state_dict_metadata"].items()
    return metadata.Metadata({str(key): _entry_of(entry) for key, entry in entries}, None, storage)


def _entry_of(entry: Any) -> metadata.TensorStorageMetadata | metadata.BytesStorageMetadata:
    from torch.distributed.checkpoint import metadata

    if type(entry).__name__.endswith(f".{metadata.BytesStorageMetadata.__name__}"):
        return metadata.BytesStorageMetadata()
    chunks = [
        metadata.ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        for chunk in entry.state["chunks"]
    ]
    dtype = entry.state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a type is {dtype!r}")
    properties = metadata.TensorProperties(dtype)
    return metadata.TensorStorageMetadata(properties, _size(entry.state["size"]), chunks)


def _size(values: Any) -> torch.Size:
    size = torch.Size(values)
    if min(size, default=0) < 0:
        raise ValueError(f"a size is {list(size)}")
    return size


class _MetadataUnpickler(pickle.Unpickler):
    """Finds only `METADATA_CLASSES` and torch's data types."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and global_name.isidentifier():
            dtype = getattr(torch, global_name, None)
            if isinstance(dtype, torch.dtype | torch.layout | torch.memory_format):
                return dtype
        cls = METADATA_CLASSES.get((module_name, global_name))
        if cls is None:
            name = f"{module_name}.{global_name}"
            raise user_error("foreign-class-rejected", path=self._path, name=name)
        return cls


def is_mappable(path: Path) -> bool:
    """Whether torch can memory-map the file. An archive that another program has compressed would
    be mapped to the compressed bytes, and files of torch before 1.6 are not archives."""
    try:
        with zipfile.ZipFile(path) as archive:
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False
