"""Facts about a folder that its files reveal without being loaded: names, JSON keys, names of
tensors.

Nothing is unpickled: the texts in a pickle are listed from its opcodes, which builds no objects.
Only the starts of files are read. Imports no torch.
"""

from __future__ import annotations

import io
import itertools
import json
import pickletools
import re
import zipfile
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from megatron_ds.conversion.json_files import read_json

LARGEST_LISTING = 20_000
"""Names of a folder that are compared."""
READ_BYTES = 2**20
"""Bytes of a pickle whose texts are listed: names of tensors are at its start."""
LARGEST_HEADER = 2**26
"""Bytes of the header of a safetensors file."""
ZIP = b"PK\x03\x04"
"""First bytes of a file of torch.save, since version 1.6 of torch."""
PICKLE = b"\x80"
"""First bytes of a file of torch.save, before version 1.6 of torch."""
UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors of a damaged, compressed or encrypted file."""
WEIGHTS = re.compile(r"(model\.safetensors|pytorch_model\.bin)(\.index\.json)?")
"""Files that transformers loads."""


class FolderContents:
    """A folder, or one file of a folder.

    Args:
        path: The folder.
        only: Name of the only file in it that is compared.
    """

    def __init__(self, path: Path, only: str | None = None) -> None:
        self.path = path
        self._only = only

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of files and folders, in the order of the numbers in them."""
        if self._only is not None:
            return (self._only,)
        try:
            listed = [path.name for path in itertools.islice(self.path.iterdir(), LARGEST_LISTING)]
        except OSError:
            return ()
        return tuple(sorted(listed, key=_natural))

    def matching(self, pattern: str) -> list[Path]:
        """The files and folders whose names match a regular expression."""
        return [self.path / name for name in self.names if re.fullmatch(pattern, name)]

    def first(self, pattern: str) -> Path | None:
        """The first of `matching`."""
        return next(iter(self.matching(pattern)), None)

    def has(self, *names: str) -> bool:
        """Whether all of some files or folders exist, at paths below the folder."""
        return self._only is None and all((self.path / name).exists() for name in names)

    def first_of(self, *names: str) -> Path | None:
        """The first that exists of some files or folders, at paths below the folder."""
        return next((self.path / name for name in names if self.has(name)), None)

    def values(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; empty if the file has none or is missing."""
        if self._only is not None:
            return {}
        try:
            values = read_json(self.path / name)
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    @cached_property
    def is_model_of_transformers(self) -> bool:
        """Whether the folder has the weights and the configuration that transformers loads."""
        values = self.values("config.json")
        has_config = "model_type" in values and not is_quantized_by_mlx(values)
        return has_config and self.first(WEIGHTS.pattern) is not None

    @cached_property
    def distributed_names(self) -> frozenset[str]:
        """Texts in the index of a checkpoint of torch.distributed: the names of its entries."""
        return frozenset() if self._only is not None else pickled_texts(self.path / ".metadata")


def is_quantized_by_mlx(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes weights that transformers does not load."""
    quantization = config.get("quantization")
    return isinstance(quantization, dict) and "group_size" in quantization


def pickled_texts(path: Path) -> frozenset[str]:
    """The texts at the start of a pickle or of a file of torch.save: keys, names, classes.

    Empty for other files.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(ZIP))
            file.seek(0)
            if start == ZIP:
                with zipfile.ZipFile(file) as archive:
                    names = (name for name in archive.namelist() if name.endswith("data.pkl"))
                    with archive.open(next(names, "")) as entry:
                        return _texts(entry)
            return _texts(file) if start.startswith(PICKLE) else frozenset()
    except (*UNREADABLE, KeyError):
        return frozenset()


def _texts(file: IO[bytes]) -> frozenset[str]:
    content = io.BytesIO(file.read(READ_BYTES))
    texts: set[str] = set()
    try:
        while content.tell() < len(content.getbuffer()):  # files before torch 1.6 have several
            texts.update(arg for _, arg, _ in pickletools.genops(content) if isinstance(arg, str))
    except (ValueError, IndexError):
        pass  # the end of what was read
    return frozenset(texts)


def tensor_names(path: Path) -> frozenset[str]:
    """The names of the tensors in a safetensors file, or in a file of torch.save, and other texts.

    Empty for other files.
    """
    if path.suffix != ".safetensors":
        return pickled_texts(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= LARGEST_HEADER else {}
    except (*UNREADABLE, RecursionError):
        return frozenset()
    return frozenset(header if isinstance(header, dict) else ())


def is_torch_file(path: Path) -> bool:
    """Whether torch.save wrote a file."""
    return path.is_file() and bool(pickled_texts(path))


def starts_with(path: Path, magic: bytes) -> bool:
    """Whether a file starts with some bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts step-9 before step-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
