"""Pairs of token files by URL: their index files in full, and the blocks of tokens that are read.

Owns the cache of a process: which files it has opened, and which blocks it waits for. Knows the
names of the files of a pair, but neither their format nor samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.data.remote.block_cache import BLOCK_BYTES, IDLE, USED, BlockCache, BlockFile
from megatron_ds.data.remote.fetcher import Fetcher, RemoteFile
from megatron_ds.fileio.atomic import write_atomically
from megatron_ds.fileio.file_lock import SharedLock, WaitPolicy, locked
from megatron_ds.fileio.memory_map import map_file
from megatron_ds.fileio.node_folder import create_node_folder, default_node_folder
from megatron_ds.fileio.object_store import FileVersion, ObjectStore

Tokens = npt.NDArray[np.generic]
Item = tuple[Any, ...]
"""A position of a dataset, the row for its tokens and, if they are needed, the one for their marks:
the arguments of `ReadInto`."""
ReadInto = Callable[..., None]
DEFAULT_GB = 50
MIN_BLOCKS = 64
"""Blocks that the cache must have room for besides the index files."""
PARALLEL = 16
"""Requests at once that look for files."""
READ_AT_ONCE = 8
"""Blocks that a reader of consecutive tokens requests at once."""
INDEX = "index"
TOKENIZER = "tokenizer"
COMPLETE = "complete.json"
ENDINGS = (".bin", ".idx", ".tokenizer.json")


def is_url(prefix: str) -> bool:
    return "://" in prefix


class RemotePair(NamedTuple):
    """A pair of token files by URL: its `.idx` and its `.tokenizer.json`, which it may not have, as
    paths on this node, and its `.bin`."""

    index_path: str
    tokenizer_path: str
    content: RemoteContent


class TokenCache:
    """The token files by URL that a process reads, and their copies on its node.

    Args:
        folder: Folder of the node; None for one below the folder for temporary files.
        limit_gb: Gigabytes that the copies may have; None for 50, or half of the disk's free space
            if that is less.
        block_bytes: Bytes of a block.
    """

    def __init__(
        self,
        folder: str | None = None,
        limit_gb: float | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.folder = default_node_folder() / "token-files" if folder is None else Path(folder)
        self._limit_gb = limit_gb
        self._block_bytes = block_bytes
        self._versions: dict[str, FileVersion | UserError | None] = {}
        self._open_store = cache(ObjectStore)
        self._absent: dict[tuple[str, int], RemoteFile] = {}
        self._is_denied = False

    def __reduce__(self) -> tuple[type[TokenCache], tuple[Any, ...], dict[str, Any]]:
        arguments = str(self.folder), self._limit_gb, self._block_bytes
        return TokenCache, arguments, {"_versions": self._versions}

    def find(self, prefixes: Iterable[str]) -> None:
        """Looks for the files of several pairs at once; opening a pair raises what went wrong."""
        urls = [f"{prefix}{end}" for prefix in prefixes if is_url(prefix) for end in ENDINGS]
        with ThreadPoolExecutor(PARALLEL) as pool:
            self._versions |= dict(zip(urls, pool.map(self._look, urls), strict=True))

    def version(self, url: str) -> FileVersion | None:
        """Version of a file at the first request for it; None if the file does not exist.

        Raises:
            UserError: If the store does not answer.
        """
        if url not in self._versions:
            self._versions[url] = self._look(url)
        version = self._versions[url]
        if isinstance(version, UserError):
            raise version
        return version

    def exists(self, url: str) -> bool:
        """Whether there is such a file.

        Raises:
            UserError: If the store does not answer.
        """
        return self.version(url) is not None

    def open(self, prefix: str) -> RemotePair:
        """A pair, whose index is downloaded unless another process of this node has done it.

        Raises:
            UserError: If a file is missing, or the store or the folder cannot be used.
        """
        versions = [self.version(f"{prefix}{end}") for end in ENDINGS]
        for end, version in zip(ENDINGS[:2], versions, strict=False):
            if version is None:
                raise user_error("token-file-missing", path=f"{prefix}{end}")
        content = versions[0]
        assert content is not None
        key = json.dumps([prefix, *map(str, versions)])
        name = re.sub(r"[^A-Za-z0-9.]+", "-", prefix)[-60:].strip("-")
        name += f"-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        try:
            folder = self.blocks.folder / name
            copied = folder, content.size, self._block_bytes
            with locked(self.blocks.folder / f"{name}.lock", WaitPolicy()):
                lock, is_first = self.blocks.use(name)
                if not _is_complete(folder, is_first):
                    self._download_index(prefix, folder)
                with self.blocks.allocating():
                    if not BlockFile.is_sound(*copied):
                        BlockFile.create(*copied)
                    copy = BlockFile(*copied)
                    if is_first:
                        copy.distrust()
            self.blocks.recount()
        except OSError as error:
            if error.errno is None:  # of the store, not of the disk
                raise user_error("store-unusable", url=prefix, error=error) from error
            raise user_error("token-cache-unusable", folder=self.folder, error=error) from error
        file = RemoteContent(self, RemoteFile(f"{prefix}.bin", content, copy), lock)
        return RemotePair(str(folder / INDEX), str(folder / TOKENIZER), file)

    def space_problems(self, prefixes: Sequence[str]) -> Iterator[Problem]:
        """Checks the limit against the files, and the disk against the limit."""
        urls = [f"{prefix}{end}" for prefix in prefixes if is_url(prefix) for end in ENDINGS[:2]]
        known = {url: self._versions.get(url) for url in urls}
        sizes = {url: file.size for url, file in known.items() if isinstance(file, FileVersion)}
        if not sizes:
            return
        try:
            limit = self.blocks.limit
            available = self._available(self.blocks)
        except OSError:
            return  # reported when a pair is opened
        least = MIN_BLOCKS * self._block_bytes
        least += sum(size for url, size in sizes.items() if url.endswith(ENDINGS[1]))
        if limit < least:
            yield Problem("token-cache-too-small", given=limit / 1e9, least=least / 1e9)
        needed = min(limit, sum(sizes.values()))
        if (free := available / 1e9) < needed / 1e9:
            yield Problem(
                "token-cache-disk-too-small", folder=self.folder, needed=needed / 1e9, free=free
            )

    def read(self, items: Sequence[Item], read_into: ReadInto) -> None:
        """Reads rows, after their blocks have been downloaded.

        Args:
            items: Positions and rows.
            read_into: Reads a position into a row. If `RemoteTokens.has` denies it the tokens, the
                row is read again.

        Raises:
            UserError: If blocks cannot be downloaded.
        """
        while items := self.read_present(items, read_into):
            self.fetcher.wait()

    def read_present(self, items: Sequence[Item], read_into: ReadInto) -> list[Item]:
        """Reads the rows whose blocks are here; requests the blocks of the missing ones.

        Returns:
            The missing ones.
        """
        rest = []
        self.blocks.begin_reading()
        try:
            for item in items:
                read_into(*item)
                if self._is_denied:
                    rest.append(item)
                    self._is_denied = False
        finally:
            self.blocks.end_reading()
        if self._absent:
            for (_, block), file in self._absent.items():
                self.fetcher.request(file, block)
            self._absent.clear()
        return rest

    def release(self) -> None:
        """Ends the process that downloads, which the next missing block starts again."""
        if "fetcher" in vars(self):
            self.fetcher.stop()

    def deny(self, file: RemoteFile, block: int) -> None:
        """Notes that a block is needed and not here."""
        self._is_denied = True
        self._absent[file.url, block] = file

    @cached_property
    def fetcher(self) -> Fetcher:
        return Fetcher(self.blocks)

    @cached_property
    def blocks(self) -> BlockCache:
        """The folder of the blocks.

        Raises:
            OSError: If it cannot be used.
        """
        folder = self.folder / f"blocks-{self._block_bytes}"
        if self.folder.parent == default_node_folder():
            create_node_folder(self.folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        blocks = BlockCache(folder, 0, self._block_bytes)
        blocks.limit = int((self._limit_gb or DEFAULT_GB) * 1e9)
        if self._limit_gb is None:
            blocks.limit = min(blocks.limit, self._available(blocks) // 2)
        return blocks

    def _available(self, blocks: BlockCache) -> int:
        """Bytes that blocks may occupy: free space of the disk plus their current size."""
        return shutil.disk_usage(blocks.folder).free + blocks.recount()

    def _store_of(self, prefix: str) -> tuple[ObjectStore, str]:
        """The folder of a URL, and the name in it."""
        folder, _, name = prefix.rpartition("/")
        return self._open_store(folder), name

    def _look(self, url: str) -> FileVersion | UserError | None:
        """Version of a file, or the error of the request; None if the file does not exist."""
        try:
            store, name = self._store_of(url)
            return store.version(name)
        except UserError as error:
            return error
        except OSError as error:
            # In a bucket that may not be listed, S3 denies access to an object that is absent.
            if isinstance(error, PermissionError) and url.endswith(ENDINGS[2]):
                return None
            return UserError(Problem("store-unusable", url=url, error=error))

    def _download_index(self, prefix: str, folder: Path) -> None:
        """Downloads the files of a copy other than its blocks.

        Raises:
            OSError: If the store or the disk fails.
            UserError: If the index has changed since the start.
        """
        (folder / COMPLETE).unlink(missing_ok=True)
        index = self.version(f"{prefix}.idx")
        assert index is not None
        self.blocks.make_room(index.size)
        store, name = self._store_of(prefix)
        partial = folder / f"{INDEX}.partial"
        store.download(f"{name}.idx", partial, index.size)
        if store.version(f"{name}.idx") != index:
            raise user_error("token-object-changed", url=f"{prefix}.idx")
        os.replace(partial, folder / INDEX)
        if self.version(f"{prefix}.tokenizer.json") is not None:
            write_atomically(folder / TOKENIZER, store.read(f"{name}.tokenizer.json"))
        about = {"prefix": prefix, "index_crc32": _crc32(folder / INDEX)}
        write_atomically(folder / COMPLETE, json.dumps(about).encode())


class RemoteContent:
    """The bytes of a `.bin` by URL, with the attributes of an array.

    Args:
        cache: Where the blocks are read and requested.
        file: The file.
        lock: Keeps its folder in the cache.
    """

    def __init__(self, cache: TokenCache, file: RemoteFile, lock: SharedLock) -> None:
        self._cache = cache
        self.file = file
        self._lock = lock
        self.size = file.version.size

    def view(self, dtype: np.dtype[np.generic]) -> RemoteTokens:
        return RemoteTokens(self._cache, self.file, dtype)

    def warm_up(self) -> None:
        """Downloads the file, or of a large one as much as the cache has room for."""
        room = self._cache.blocks.limit - self._cache.blocks.recount()
        every_byte = self.view(np.dtype(np.uint8))
        step = READ_AT_ONCE * self.file.copy.block_bytes
        for start in range(0, min(self.size, room), step):
            every_byte[start : start + step]


class RemoteTokens:
    """The tokens of a file by URL, with the attributes and items of a numpy array.

    Args:
        cache: Where the blocks are read and requested.
        file: The file.
        dtype: Data type of a token.

    Attributes:
        content: [size] all tokens; 0 in blocks that are not here. The mark of token i's block is
            `marks[i >> shift]`.
    """

    def __init__(self, cache: TokenCache, file: RemoteFile, dtype: np.dtype[np.generic]) -> None:
        self.cache = cache
        self.file = file
        self.dtype = dtype
        self.content: Tokens = file.copy.map_content().view(dtype)
        self.size = self.content.size
        self.nbytes = self.content.nbytes
        self.marks = memoryview(file.copy.marks)  # type: ignore[arg-type]
        self._per_block = file.copy.block_bytes // dtype.itemsize
        self.shift = self._per_block.bit_length() - 1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        """A copy of one token, of consecutive ones, or of the tokens at an array of indices."""
        if isinstance(key, slice):
            start, stop, step = key.indices(self.size)
            assert step == 1
            return self._consecutive(start, max(start, stop))
        if np.ndim(key):
            parts = [self._consecutive(index, index + 1) for index in np.asarray(key).tolist()]
            return np.concatenate([np.empty(0, self.dtype), *parts])
        return self._consecutive(int(key), int(key) + 1)[0]

    def has(self, begin: int, size: int) -> bool:
        """Whether tokens are here; if not, they are requested after the reading.

        Only while `TokenCache` reads.
        """
        is_here = True
        first = begin >> self.shift
        last = (begin + size - 1) >> self.shift
        for block in range(first, last + 1) if size else ():
            mark = self.marks[block]
            if mark == IDLE:
                self.marks[block] = USED
            elif mark != USED:
                self.cache.deny(self.file, block)
                is_here = False
        return is_here

    def _consecutive(self, start: int, stop: int) -> Tokens:
        tokens = np.empty(stop - start, self.dtype)

        def read_into(begin: int, part: Tokens) -> None:
            if self.has(begin, len(part)):
                part[:] = self.content[begin : begin + len(part)]

        # Not more at once than the cache may hold.
        step = READ_AT_ONCE * self._per_block
        for begin in range(start, stop, step):
            part = tokens[begin - start : begin - start + step]
            self.cache.read([(begin, part)], read_into)
        return tokens


def _is_complete(folder: Path, is_first: bool) -> bool:
    """Whether a copy lacks nothing but blocks; the first process of a run reads its index."""
    try:
        about = json.loads((folder / COMPLETE).read_bytes())
        if is_first and _crc32(folder / INDEX) != about["index_crc32"]:
            return False
    except (OSError, ValueError, KeyError):
        return False
    return True


def _crc32(path: Path) -> int:
    with open(path, "rb") as file:
        return zlib.crc32(map_file(file).data)
