"""Input selection: which files a run reads, in which order, and how a changed file is recognized.

Owns the meaning of paths, patterns, folders, addresses and data set names. Knows no file format
beyond the names of the formats. fsspec is imported only for addresses.
"""

from __future__ import annotations

import bz2
import datetime
import functools
import glob
import gzip
import hashlib
import io
import lzma
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

from megatron_ds.config.checks import import_library
from megatron_ds.config.data_files import read_table
from megatron_ds.config.fields import ANY_VALUE, field_problems, option_field, when
from megatron_ds.config.problems import (
    Problem,
    UserError,
    option,
    raise_if_any,
    user_error,
    warn_of,
)
from megatron_ds.data.index_cache import CACHE_FOLDER
from megatron_ds.data.token_files.indexed_dataset import TOKENIZER_SUFFIX
from megatron_ds.data.token_files.probed_files import StoreFiles
from megatron_ds.fileio.object_store import register_client
from megatron_ds.fileio.resumable import COMPLETED_SUFFIX, WORK_SUFFIX
from megatron_ds.preprocess.documents.foreign_inputs import folder_problems, foreign_problems
from megatron_ds.preprocess.documents.signatures import contradictions

STDIN = "-"
FORMATS: dict[str, list[str]] = read_table(__file__)
"""Suffixes by format."""
SUFFIXES = {suffix: format for format, suffixes in FORMATS.items() for suffix in suffixes}
DECOMPRESSORS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
CODECS = {".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
"""Names of other compressions in pyarrow."""
COMPRESSIONS = (*DECOMPRESSORS, *CODECS)
QUARANTINE = ".quarantine"
"""Suffix of the list of rejected documents."""
OUTPUT_SUFFIXES = (
    ".bin",
    ".idx",
    TOKENIZER_SUFFIX,
    QUARANTINE,
    COMPLETED_SUFFIX,
    ".npy",
    ".lock",
    ".partial",
)
"""Suffixes of files that this package writes; such files in a folder are not inputs."""
MAX_PROBED = 64
"""Most files of a folder without files of known suffixes whose formats are looked for."""
HF_DATASET = when(hf_dataset=ANY_VALUE)


class InputFile(NamedTuple):
    """An input file that is not opened yet.

    Attributes:
        name: Path or address.
        size: Bytes at the time of the run; 0 if unknown.
        version: Changes with the content as far as the file system reports it: a modification time
            or a hash of the metadata. Empty if unknown.
        open: Opens the file.
    """

    name: str
    size: int
    version: str
    open: Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class InputSpec:
    """Documents to read."""

    paths: tuple[str, ...] = option_field((), flag="input", nargs="*", metavar="PATH")
    """Files, glob patterns, folders, URLs (s3://, hf://, ...) or - for standard input; JSON lines,
    parquet, arrow, csv, tsv or plain text by suffix, optionally compressed (.gz .xz .zst .bz2
    .lz4)."""
    format: str = option_field("auto", flag="input-format", choices=("auto", *FORMATS))
    """Format of all files; auto selects it by suffix, with jsonl as the default."""
    text_document_unit: str = option_field("file", choices=("file", "paragraph"))
    """Unit of a document in plain text: the file, or a paragraph separated by blank lines."""
    hf_dataset: str | None = option_field(None, metavar="NAME")
    """Hugging Face dataset: name, path or saved folder."""
    hf_config: str | None = option_field(None, metavar="NAME", only_with=HF_DATASET)
    """Configuration of --hf-dataset."""
    hf_split: str = option_field("train", metavar="NAME", only_with=HF_DATASET)
    """Split of --hf-dataset."""
    max_document_bytes: int = option_field(1 << 27, minimum=1, maximum=(1 << 31) - 1)
    """Maximum size of a document; larger ones are rejected."""

    @property
    def name(self) -> str:
        """The option and its value, for messages."""
        if self.hf_dataset is not None:
            return f"{option('hf_dataset')} {self.hf_dataset}"
        return f"{option('paths')} {' '.join(self.paths)}"

    def problems(self) -> Iterator[Problem]:
        """Problems of options and names, and of the first bytes of local files. Addresses are not
        accessed."""
        yield from field_problems(self)
        if bool(self.paths) == (self.hf_dataset is not None):
            yield Problem("input-not-unique")
        seen: dict[object, str] = {}
        for path in filter(lambda path: not _is_address(path), self.paths):
            try:
                files = _local_files(path, self.format)
            except UserError as error:
                yield from error.problems
                continue
            for file in files:
                if file != STDIN and not os.access(file, os.R_OK):
                    yield Problem("input-not-accessible", path=file, reason="permission denied")
                elif os.path.isfile(file):
                    # Reading reports damaged files, by exceptions of any type.
                    with suppress(Exception), open(file, "rb") as raw:
                        format, compression = format_of(file, self.format)
                        yield from contradictions(file, raw, compression or format)
                        if compression:
                            yield from contradictions(file, decompress(raw, compression), format)
                identity = _identity(file)
                if identity in seen:
                    yield Problem("input-file-twice", file=file, other=seen[identity])
                seen.setdefault(identity, file)

    def local_files(self) -> Iterator[str]:
        """Files of this machine that are read; not standard input, pipes, or missing files."""
        for path in self.paths:
            if not (path == STDIN or _is_address(path) or _is_pipe(path)):
                with suppress(UserError):
                    yield from _local_files(path, self.format)

    def resume_problems(self) -> Iterator[Problem]:
        """Problems of paths that cannot be read a second time."""
        for path in self.unseekable_paths():
            yield Problem("resume-of-unseekable-input", path=path)

    def unseekable_paths(self) -> Iterator[str]:
        """Standard input and named pipes, which can be read once and from the start."""
        return (path for path in self.paths if path == STDIN or _is_pipe(path))

    def files(self) -> Iterator[InputFile]:
        """The files, in reading order. Each path is resolved when its turn comes.

        Raises:
            UserError: For a path without files, or an address that cannot be accessed.
        """
        for path in self.paths:
            if path == STDIN:
                yield InputFile("<stdin>", 0, "", lambda: nullcontext(sys.stdin.buffer))
            elif _is_address(path):
                yield from _remote_files(path, self.format)
            else:
                for name in _local_files(path, self.format):
                    status = os.stat(name)
                    size = status.st_size
                    version = _format_time(status.st_mtime_ns)
                    yield InputFile(name, size, version, functools.partial(_open, name))

    def describe_files(self) -> dict[str, str]:
        """Name and version of every file, as settings that a resumed run must share.

        Paths are absolute, so that a run can be resumed from another working directory.
        """
        if self.hf_dataset is not None:
            stamps = [(self.hf_dataset, 0, _dataset_version(self.hf_dataset, self.hf_split))]
        else:
            stamps = [file[:3] for file in self.files()]
        return {
            f"input {os.path.abspath(name) if os.path.exists(name) else name}": (
                f"{size} bytes, version {version or 'unknown'}"
            )
            for name, size, version in stamps
        }

    def total_bytes(self) -> int | None:
        """Stored size of all files; None if unknown before reading."""
        if self.hf_dataset is not None or any(p == STDIN or _is_address(p) for p in self.paths):
            return None
        return sum(map(os.path.getsize, self.local_files()))


def format_of(name: str, format: str) -> tuple[str, str]:
    """Format and compression suffix of a file; JSON lines if the name does not show it."""
    suffix, compression = _suffixes(name)
    return (SUFFIXES.get(suffix, "jsonl") if format == "auto" else format), compression


def decompress(raw: BinaryIO, compression: str) -> BinaryIO:
    """The content of a file.

    Args:
        raw: The file.
        compression: One of `COMPRESSIONS`, or empty.
    """
    if not compression:
        return raw
    if compression in DECOMPRESSORS:
        return cast(BinaryIO, DECOMPRESSORS[compression](raw))
    pyarrow = import_library("pyarrow", f"a {compression} file")
    source = pyarrow.PythonFile(raw, mode="r")
    stream = pyarrow.CompressedInputStream(source, CODECS[compression])
    return cast(BinaryIO, io.BufferedReader(stream, 1 << 20))


def _suffixes(name: str) -> tuple[str, str]:
    """Suffix of the format and of the compression: ".jsonl" and ".gz"."""
    stem, suffix = os.path.splitext(name.lower().partition("?")[0] if _is_address(name) else name)
    suffix = suffix.lower()
    if suffix in COMPRESSIONS:
        return os.path.splitext(stem)[1].lower(), suffix
    return suffix, ""


def _identity(file: str) -> object:
    """Equal for all spellings of a file and for links to it."""
    if file == STDIN:
        return file
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _open(name: str) -> BinaryIO:
    return open(name, "rb")


def _is_pipe(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _is_address(path: str) -> bool:
    return "://" in path


def _local_files(path: str, format: str) -> list[str]:
    """The files that a path selects.

    Raises:
        UserError: If there are none, or for the first one that belongs to another program.
    """
    files = _selected_files(path, format)
    for file in files:
        raise_if_any(foreign_problems(file, by_name=_suffixes(file)[0] in SUFFIXES))
    return files


def _selected_files(path: str, format: str) -> list[str]:
    if path == STDIN or os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        files = _walk(path)
        regular = set(filter(os.path.isfile, files))  # not pipes, and not links to nothing
        if format == "auto" and not any(_suffixes(file)[0] in SUFFIXES for file in regular):
            # Token files in a folder are skipped, unless there is nothing else.
            raise_if_any(folder_problems(sorted(regular)[:MAX_PROBED]))
        return _select_in_folder(path, files, format, len(path.rstrip("/")), regular)
    # A named pipe, such as the shell's <(command).
    if os.path.exists(path):
        return [path]
    matching = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    files = [file for file in matching if os.path.isfile(file)]
    if not files:
        raise_if_any(folder_problems(sorted(glob.glob(f"{glob.escape(path)}.*"))[:MAX_PROBED]))
        raise user_error("no-input-file", path=path)
    return files


def _walk(path: str) -> list[str]:
    """All files below a folder. Warns of skipped folders."""
    paths: list[str] = []
    skipped: list[str] = []
    walk = os.walk(path, onerror=lambda error: skipped.append(str(error.filename)))
    for folder, folders, names in walk:
        folders[:] = [name for name in folders if not is_skipped_name(name)]
        paths += (os.path.join(folder, name) for name in names)
        inner = (os.path.join(folder, name) for name in folders)
        skipped += filter(os.path.islink, inner)  # symbolic links may form cycles
    if skipped:
        warn_of(Problem("input-folders-skipped", path=path, skipped=min(skipped)))
    return paths


def is_skipped_name(name: str) -> bool:
    """Whether a file or folder in an input folder is metadata, a cache, or the work of a run."""
    return name.startswith((".", "_")) or name.endswith(WORK_SUFFIX) or name == CACHE_FOLDER


def _select_in_folder(
    folder: str,
    files: Iterable[str],
    format: str,
    prefix: int,
    regular: Container[str] | None = None,
) -> list[str]:
    """The files of a folder that are read, sorted by name. Warns of others.

    Args:
        folder: Path or address of the folder.
        files: All files in it.
        format: Format of all files, or "auto".
        prefix: Length of the folder's own name in the files' names.
        regular: The files that can be read; None for all.
    """
    visible = [
        file
        for file in sorted(files)
        if not any(map(is_skipped_name, file[prefix:].split("/")))
        and not file.endswith(OUTPUT_SUFFIXES)
    ]
    selected = [
        file
        for file in visible
        if (regular is None or file in regular)
        and (format != "auto" or _suffixes(file)[0] in SUFFIXES)
    ]
    others = sorted(set(visible) - set(selected))
    if not selected:
        raise user_error("no-input-file-in-folder", folder=folder, suffixes=" ".join(SUFFIXES))
    if others:
        values = {"folder": folder, "num_others": len(others), "others": others[0]}
        warn_of(Problem("input-files-skipped", **values))
    return selected


def _remote_files(address: str, format: str) -> Iterator[InputFile]:
    fsspec = import_library("fsspec", address)
    prefix = 0
    try:
        register_client(address.partition("://")[0])
        system, path = fsspec.core.url_to_fs(address)
        web = address.startswith(("http://", "https://"))  # no folders, and ? is no pattern
        if not web and glob.has_magic(path):
            paths = sorted(system.glob(path))
        elif not web and system.isdir(path):
            paths = system.find(path)
            prefix = len(path)
        else:
            paths = [path]
    except OSError:
        raise
    except Exception as error:  # file systems raise their own types: no credentials, no access
        reason = describe_error(error)
        raise user_error("input-not-accessible", path=address, reason=reason) from error
    files = StoreFiles(system)
    if prefix:
        if format == "auto" and not any(_suffixes(path)[0] in SUFFIXES for path in paths):
            raise_if_any(folder_problems(sorted(paths)[:MAX_PROBED], files))
        paths = _select_in_folder(address, paths, format, prefix)
    if not paths:
        raise user_error("no-input-file", path=address)
    for path in paths:
        is_known = _suffixes(system.unstrip_protocol(path))[0] in SUFFIXES
        raise_if_any(foreign_problems(path, files, by_name=is_known))
    for path in paths:
        size = 0
        version = ""
        with suppress(Exception):  # an error of any type; opening the file reports it
            info = system.info(path)
            size = int(info.get("size") or 0)
            version = hashlib.sha256(repr(info).encode()).hexdigest()[:16]
        opener = functools.partial(_open_remote, system, path)
        yield InputFile(system.unstrip_protocol(path), size, version, opener)


@contextmanager
def _open_remote(system: Any, path: str) -> Iterator[BinaryIO]:
    with system.open(path, "rb") as file:
        # Files of some systems, such as http and s3, cannot read lines up to a limit.
        buffered: Any = file if isinstance(file, io.BufferedIOBase) else io.BufferedReader(file)
        yield buffered


def _dataset_version(name: str, split: str) -> str:
    """Version of a data set that is a saved folder; empty for others."""
    states = (os.path.join(name, part, "state.json") for part in ("", split))
    saved = next(filter(os.path.isfile, states), None)
    return "" if saved is None else _format_time(os.stat(saved).st_mtime_ns)


def _format_time(nanoseconds: int) -> str:
    seconds, fraction = divmod(nanoseconds, 10**9)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{fraction:09}Z"


def describe_error(error: Exception) -> str:
    """Message of an error, with the type where the message alone would be unclear."""
    if isinstance(error, (ValueError, OSError, ImportError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
