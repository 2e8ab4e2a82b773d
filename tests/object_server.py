"""S3 servers on a free port of this machine: moto for the tests of stores, and one of a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.fork_server import DEADLINE, REPOSITORY, free_port

SERVER = REPOSITORY / "build" / "s3"
"""Where `make` puts moto and s3fs."""
COMPILED = SERVER / f"_cffi_backend{sysconfig.get_config_var('EXT_SUFFIX')}"
"""A module of theirs that is compiled for the version of Python that installed them."""
BUCKET = "bucket"


@contextmanager
def s3_server(log: Path) -> Iterator[Mapping[str, str]]:
    """Runs the server, with one empty bucket.

    Args:
        log: File for its output.

    Yields:
        Environment variables by which clients find it.
    """
    if not COMPILED.is_file():
        pytest.skip("needs build/s3 of this Python, which `make unit`, `quick` and `test` install")
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(SERVER)}, stdout=output, stderr=output
        )
    try:
        end = time.monotonic() + DEADLINE
        while not _create_bucket(address):
            if server.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the server does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield client_variables(address)
    finally:
        server.kill()
        server.wait()


def client_variables(address: str) -> dict[str, str]:
    """Environment variables by which clients find a server."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


class FolderServer(ThreadingHTTPServer):
    """Serves the files of a folder, read-only, as the objects of any bucket, in threads.

    Args:
        folder: The files.
        latency: Seconds before each answer.
        address: Where it listens.

    Attributes:
        requests: Names of the files that were read, or `HEAD NAME`, in order.
        failing: While set, the status of every answer that has content.
    """

    daemon_threads = True

    def __init__(self, folder: Path, latency: float = 0.0, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), _FolderRequest)
        self.folder = folder
        self.latency = latency
        self.requests: list[str] = []
        self.failing: int | None = None
        self.variables = client_variables(f"http://{address}:{self.server_port}")
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients end in the middle of an answer when their run ends."""


class _FolderRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FolderServer

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    def _answer(self, *, with_content: bool) -> None:
        time.sleep(self.server.latency)
        if "list-type=2" in self.path:
            self._list_nothing()
            return
        name = self.path.split("/", 2)[2]
        self.server.requests.append(name if with_content else f"HEAD {name}")
        path = self.server.folder / name
        if not path.is_file() or (with_content and self.server.failing):
            self.send_response(self.server.failing or 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = path.stat()
        first = 0
        end = status.st_size
        if given := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first = int(given[1])
            end = min(int(given[2]) + 1, status.st_size)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{status.st_size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - first))
        self.send_header("ETag", f'"{status.st_mtime_ns}"')
        self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
        self.end_headers()
        if with_content:
            with path.open("rb") as file:
                self.wfile.write(os.pread(file.fileno(), end - first, first))

    def _list_nothing(self) -> None:
        """A listing without objects. Clients repeat one without an answer for many seconds."""
        content = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _create_bucket(address: str) -> bool:
    request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
    with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(request):
        return True
    return False
