"""Files of a folder in an object store, or in any other file system that fsspec knows, by URL.

Owns the choice of the client library, time limits, retries, and errors that name the object. Files
are uploaded by the client, which splits large ones into parts, and downloaded in ranges, so that no
file is in memory entirely. Knows nothing of file contents.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from megatron_ds.config.problems import user_error
from megatron_ds.fileio.safe_names import is_safe_name

T = TypeVar("T")
OBJECT_SCHEMES = ("s3", "gs", "az")
"""Schemes that obstore serves if fsspec's own package for them is not installed."""
FILE_SCHEMES = ("file", "local")
ATTEMPTS = 4
FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; each further one is twice as long."""
LAST_ATTEMPT_S = 60.0
"""Time after which a small request is not repeated: a store that never answers is then an error."""
NOTICE_S = 5.0
"""Time after which a line names what is waited for."""
RANGE = 2**25
"""Bytes of a file that are downloaded by one request."""
PARALLEL = 4
"""Files, or ranges of a file, that are transferred at once."""
FINAL_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)
"""Errors that another attempt does not change."""
DENIED = (
    "AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|NoCred|"
    "PermissionDeniedError|UnauthenticatedError"
)
"""Names of errors of clients, and what servers write, of missing permissions."""
RETRY_OF_OBSTORE: Any = {"retry_timeout": timedelta(seconds=30)}
"""Time that a request of obstore may take."""
VERSION_KEYS = ("e_tag", "ETag", "etag", "mtime", "last_modified", "LastModified", "created")
"""Keys, by client, of a value that changes with the content of a file, the best first."""


@dataclass(frozen=True)
class FileVersion:
    """The content that a file has now.

    Attributes:
        size: Bytes.
        tag: Entity tag; differs whenever the content differs, as far as the store knows.
    """

    size: int
    tag: str

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> FileVersion:
        """The version in a client's description of a file."""
        tags = (str(info[key]) for key in VERSION_KEYS if info.get(key))
        return cls(int(info["size"]), next(tags, ""))


class ObjectStore:
    """The files below a URL. Methods may be called from several threads.

    Args:
        url: Any URL of fsspec, such as `s3://bucket/folder`.

    Raises:
        UserError: If no installed package serves the scheme.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._scheme = url.partition("://")[0]
        self._fs = _open_filesystem(self.url, self._scheme)
        self._root = str(self._fs._strip_protocol(self.url)).rstrip("/")

    def __str__(self) -> str:
        return self.url

    def client(self) -> tuple[Any, str]:
        """The fsspec file system, and the path of the URL in it."""
        return self._fs, self._root

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of every file below a folder, which need not exist, by name.

        Objects whose names are not paths inside the folder, such as `a//b` or `../c`, are left out.

        Raises:
            OSError: If the store does not answer, or has no such bucket.
        """

        def look() -> dict[str, int]:
            self._fs.invalidate_cache()
            files = self._fs.find(self._path(folder).rstrip("/"), detail=True)
            return {
                name: int(info["size"])
                for path, info in files.items()
                if info["type"] == "file" and is_safe_name(name := self._name(path))
            }

        with suppress(FileNotFoundError):
            return self._attempt(folder, look)
        return {}

    def read(self, name: str) -> bytes:
        """The content of a small file.

        Raises:
            FileNotFoundError: If there is none.
            OSError: If the store does not answer.
        """
        return self._attempt(name, lambda: bytes(self._fs.cat_file(self._path(name))))

    def version(self, name: str) -> FileVersion | None:
        """The version of a file; None if the file does not exist.

        Raises:
            OSError: If the store does not answer.
        """

        with suppress(FileNotFoundError):
            return self._attempt(name, lambda: self._look(name))
        return None

    def read_range(self, name: str, start: int, end: int) -> tuple[bytes, FileVersion]:
        """The bytes from `start` to before `end` of a file, and the version that has them.

        Prints no line if it takes long: many ranges may be read at once.

        Raises:
            FileNotFoundError: If there is no file.
            OSError: If it ends before, or the store does not answer.
        """

        def read() -> tuple[bytes, FileVersion]:
            if self._is_obstore:
                return self._read_by_obstore(name, start, end)
            content = bytes(self._fs.cat_file(self._path(name), start=start, end=end))
            return content, self._look(name)

        content, version = self._attempt(name, read, is_announced=False)
        if len(content) != end - start:
            raise OSError(f"{self.url}/{name} ends at byte {start + len(content)}")
        return content, version

    def write(self, name: str, content: bytes) -> None:
        """Creates or replaces a small file, which appears complete in an object store."""
        self._attempt(name, lambda: self._fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Creates a small file unless there is one; returns whether it did.

        Atomic in object stores with conditional writes, such as S3. In other stores the result may
        be true for two callers: the one whose content is read afterwards has created the file.
        """
        path = self._path(name)
        try:
            with _as_os_error(f"{self.url}/{name}"):
                if self._is_obstore:
                    self._create_by_obstore(name, content)
                else:
                    self._fs.invalidate_cache()
                    self._fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            return False
        return True

    def upload(self, path: Path, name: str) -> None:
        """Copies a local file into the store, and compares its size there.

        Raises:
            OSError: If the store fails repeatedly, or the file cannot be read.
        """

        def copy() -> None:
            self._fs.put_file(str(path), self._path(name))
            self._fs.invalidate_cache()
            expected = path.stat().st_size
            actual = self._fs.info(self._path(name))["size"]
            if actual != expected:
                raise OSError(f"has {actual} bytes after the upload of {expected}")

        self._attempt(name, copy, is_transfer=True)

    def download(self, name: str, path: Path, size: int) -> None:
        """Copies a file of known size from the store.

        Raises:
            FileNotFoundError: If there is none.
            OSError: If it has fewer bytes, the store fails repeatedly, or the disk does.
        """
        with open(path, "wb") as file, ThreadPoolExecutor(PARALLEL) as pool:
            descriptor = file.fileno()

            def copy(start: int) -> None:
                end = min(start + RANGE, size)
                content = self._attempt(
                    name,
                    lambda: self._fs.cat_file(self._path(name), start=start, end=end),
                    is_transfer=True,
                )
                if len(content) != end - start:
                    raise OSError(f"{self.url}/{name} ends at byte {start + len(content)}")
                os.pwrite(descriptor, content, start)

            list(pool.map(copy, range(0, size, RANGE)))

    def remove(self, name: str) -> None:
        """Deletes a file, if there is one; in a file system also folders that are empty then."""
        path = self._path(name)

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)
            if self._scheme in FILE_SCHEMES:
                with suppress(OSError):  # not empty, or removed by another process
                    for folder in Path(path).parents[: name.count("/")]:
                        folder.rmdir()

        self._attempt(name, delete)

    @property
    def _is_obstore(self) -> bool:
        return type(self._fs).__module__.startswith("obstore")

    @functools.cached_property
    def _obstore_client(self) -> Any:
        from obstore.store import from_url

        return from_url(self.url, retry_config=RETRY_OF_OBSTORE)

    def _look(self, name: str) -> FileVersion:
        """The version of a file, by one request that needs no permission to list the folder."""
        if self._is_obstore:
            import obstore

            return FileVersion.of(obstore.head(self._obstore_client, name))
        self._fs.invalidate_cache()
        return FileVersion.of(self._fs.info(self._path(name)))

    def _read_by_obstore(self, name: str, start: int, end: int) -> tuple[bytes, FileVersion]:
        """A range with its version in one request, which fsspec has no method for."""
        import obstore

        done = obstore.get(self._obstore_client, name, options={"range": (start, end)})
        return bytes(done.bytes()), FileVersion.of(done.meta)

    def _create_by_obstore(self, name: str, content: bytes) -> None:
        """Creates an object by a conditional write, which fsspec has no method for."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(self._obstore_client, name, content, mode="create")
        except AlreadyExistsError as error:
            raise FileExistsError(name) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _name(self, path: str) -> str:
        return path[len(self._root) + 1 :]

    def _attempt(
        self,
        name: str,
        work: Callable[[], T],
        *,
        is_transfer: bool = False,
        is_announced: bool = True,
    ) -> T:
        """Calls a function until it succeeds, `ATTEMPTS` times at most.

        Args:
            name: The file.
            work: The function.
            is_transfer: Whether it may take long. Otherwise a line is printed if it does, and the
                last attempt begins within `LAST_ATTEMPT_S`.
            is_announced: Whether that line is printed.
        """
        shown = f"{self.url}/{name}"
        pauses = [FIRST_PAUSE_S * 2**attempt for attempt in range(ATTEMPTS - 1)]
        end = time.monotonic() + (math.inf if is_transfer else LAST_ATTEMPT_S)
        notice = threading.Timer(NOTICE_S, lambda: print(f"waiting for {shown}", file=sys.stderr))
        if is_announced and not is_transfer:
            notice.start()
        while True:
            try:
                with _as_os_error(shown):
                    return work()
            except _Transient:
                if not pauses or time.monotonic() > end:
                    raise
            finally:
                notice.cancel()
            time.sleep(pauses.pop(0))


class _Transient(OSError):
    """An error after which another attempt is worthwhile."""


@contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    """Turns errors of client libraries into OSErrors of one line, with the object's URL."""
    try:
        yield
    except Exception as error:
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        error_type = next((cls for cls in FINAL_ERRORS if isinstance(error, cls)), _Transient)
        if "NoSuchBucket" in str(error):
            text = "there is no such bucket"
            error_type = PermissionError
        elif re.search(DENIED, f"{type(error).__name__} {error}"):
            error_type = PermissionError
        elif type(error).__name__ == "InvalidPathError":
            text = f"{text}. Rename or delete this object, or install s3fs, by which it is left out"
            error_type = IsADirectoryError  # final
        raise error_type(f"{name}: {text}") from error


def register_client(scheme: str) -> None:
    """Lets fsspec serve a scheme by obstore if its own package for it is not installed.

    Raises:
        ImportError: If obstore is not installed, either.
    """
    import fsspec

    if scheme not in OBJECT_SCHEMES:
        return
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        import obstore.fsspec

        obstore.fsspec.register(scheme)


def _open_filesystem(url: str, scheme: str) -> Any:
    """The client of a URL: fsspec's own package for the scheme if installed, otherwise obstore.

    Its cache of listings is not used: other hosts write to the store.
    """
    import fsspec

    options: dict[str, Any] = {"auto_mkdir": True} if scheme in FILE_SCHEMES else {}
    try:
        register_client(scheme)
        cls = fsspec.get_filesystem_class(scheme)
        if cls.__module__.startswith("obstore"):
            options["retry_config"] = RETRY_OF_OBSTORE
        options |= cls._get_kwargs_from_urls(url)
        filesystem = cls(skip_instance_cache=True, **options)
    except ImportError as error:
        raise user_error("store-package-missing", url=url, error=error) from error
    except Exception as error:  # of any client library, such as settings in its environment
        raise user_error("store-unusable", url=url, error=error) from error
    if hasattr(filesystem, "dircache"):
        filesystem.dircache.use_listings_cache = False  # not a setting of every client
    if type(filesystem).__module__.startswith("s3fs"):
        filesystem.retries = 1  # next to botocore's retries and ours
    return filesystem
