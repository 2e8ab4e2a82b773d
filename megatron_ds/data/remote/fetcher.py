"""A process that downloads blocks of token files into the cache of its node.

Every process that reads has one of its own: clients of stores have threads, which do not survive
the fork of a loader process, and downloads must not take the time of the training loop. It is
started when the first block is missing, and ends with the process that it serves.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.data.child_process import die_with_parent
from megatron_ds.data.remote.block_cache import BlockCache, BlockFile
from megatron_ds.fileio.file_lock import byte_locked
from megatron_ds.fileio.object_store import NOTICE_S, FileVersion, ObjectStore

PARALLEL = 32
"""Requests at once."""
AHEAD = 4 * PARALLEL
"""Blocks that are requested before a reader waits for one."""
PIPE_READ = 1 << 16
DOWNLOADS = "downloads.lock"
"""File whose byte N a process locks while it downloads block N."""
CHANGED = "changed"
"""Instead of an error's text: the file has another content than at the start."""
PROGRAM = "import sys; sys.path[:0] = [sys.argv[1]]; from {module} import serve; serve(sys.argv[2])"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store, and its copy.

    Attributes:
        url: URL of the file.
        version: The content that this run reads.
        copy: Its blocks on this node.
    """

    url: str
    version: FileVersion
    copy: BlockFile


class Fetcher:
    """Requests blocks from the process, which is started for the first one.

    Args:
        cache: Where it puts them.
    """

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Fetcher] | None = None
        self._owner = 0
        self._files: dict[str, int] = {}
        self._pending: dict[tuple[int, int], RemoteFile] = {}
        self._unread = b""

    def is_busy(self) -> bool:
        """Whether enough requests are outstanding.

        Raises:
            UserError: If one of them cannot be had.
        """
        while len(self._pending) >= AHEAD and self._owner == os.getpid():
            if not self._has_reply(0.0):
                return True
            self.wait()
        return False

    def request(self, file: RemoteFile, block: int) -> None:
        """Asks for a block, which another process may download as well."""
        if self._owner != os.getpid():  # not started, or the forking process's
            self._start()
        index = self._files.get(file.url)
        if index is None:
            index = len(self._files)
            self._files[file.url] = index
            version = file.version
            folder = str(file.copy.folder)
            self._send(url=file.url, size=version.size, tag=version.tag, folder=folder)
        if (index, block) not in self._pending:
            self._pending[index, block] = file
            self._send(file=index, block=block)

    def wait(self) -> None:
        """Waits until a block has come.

        Raises:
            UserError: If one cannot be had.
        """
        *lines, self._unread = self._received().split(b"\n")
        for line in lines:
            done = json.loads(line)
            file = self._pending.pop((done["file"], done["block"]))
            start, end = file.copy.span(done["block"])
            if done["error"] == CHANGED:
                raise user_error("token-object-changed", url=file.url)
            if done["error"] is not None:
                error = done["error"]
                raise user_error(
                    "token-block-unreadable", url=file.url, start=start, end=end, error=error
                )

    def stop(self) -> None:
        """Ends the process."""
        if self._end is not None:
            self._end()
            self._owner = 0

    def _received(self) -> bytes:
        """Reads until at least one line has been received; returns all bytes received."""
        assert self._process is not None
        assert self._process.stdout is not None
        content = self._unread
        while b"\n" not in content:
            if not self._has_reply(NOTICE_S):
                print(f"waiting for {next(iter(self._pending.values())).url}", file=sys.stderr)
            part = os.read(self._process.stdout.fileno(), PIPE_READ)
            if not part:
                raise RuntimeError("the process that downloads token files has ended")
            content += part
        return content

    def _has_reply(self, timeout: float) -> bool:
        """Whether a reply arrives within `timeout` seconds."""
        assert self._process is not None
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], timeout)[0])

    def _start(self) -> None:
        cache = {
            "folder": str(self._cache.folder),
            "limit": self._cache.limit,
            "block_bytes": self._cache.block_bytes,
        }
        program = PROGRAM.format(module=__name__)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(ROOT), json.dumps(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the group of this process are not for it
        )
        self._owner = os.getpid()
        self._files = {}
        self._pending = {}
        self._unread = b""
        self._end = weakref.finalize(self, _end, self._process, self._owner)

    def _send(self, **message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends a process that this one has started itself, and not inherited."""
    if owner == os.getpid():
        process.kill()
        with process:  # closes the pipes and waits
            pass


class _Server:
    """The work of the process."""

    def __init__(self, cache: BlockCache, replies: int) -> None:
        self._cache = cache
        self._replies = replies
        self._open_store = functools.cache(ObjectStore)
        self._files: list[tuple[RemoteFile, int]] = []
        self._writing = threading.Lock()

    def add(self, url: str, size: int, tag: str, folder: Path) -> None:
        """Registers a file under the number of files before it."""
        copy = BlockFile(folder, size, self._cache.block_bytes)
        downloads = os.open(folder / DOWNLOADS, os.O_RDWR | os.O_CREAT, 0o666)
        self._files.append((RemoteFile(url, FileVersion(size, tag), copy), downloads))

    def bring(self, index: int, block: int) -> None:
        """Replies when a block is in the cache."""
        file, downloads = self._files[index]
        error = None
        try:
            with byte_locked(downloads, block):  # against other processes
                if not self._cache.has(file.copy, block):
                    error = self._download(file, block)
        except Exception as caught:
            error = str(caught) or type(caught).__name__
        reply = json.dumps({"file": index, "block": block, "error": error})
        with self._writing:
            os.write(self._replies, reply.encode() + b"\n")

    def _download(self, file: RemoteFile, block: int) -> str | None:
        folder, _, name = file.url.rpartition("/")
        content, version = self._open_store(folder).read_range(name, *file.copy.span(block))
        if version != file.version:
            return CHANGED
        self._cache.store(file.copy, block, content)
        return None


def serve(cache: str) -> None:
    """Serves the requests of the standard input, one per line."""
    die_with_parent()
    options = json.loads(cache)
    server = _Server(
        BlockCache(Path(options["folder"]), options["limit"], options["block_bytes"]),
        os.dup(sys.stdout.fileno()),
    )
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a client library prints is no reply
    with ThreadPoolExecutor(PARALLEL) as pool:
        for line in sys.stdin:
            message = json.loads(line)
            if "url" in message:
                server.add(**{**message, "folder": Path(message["folder"])})
            else:
                pool.submit(server.bring, message["file"], message["block"])
        os._exit(0)  # nobody waits for the rest
