"""An S3 server of moto on a free port of this machine, for the tests of stores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fork_server import DEADLINE, REPOSITORY, free_port

SERVER = REPOSITORY / "build" / "s3"
"""Where `make` puts moto and s3fs."""
BUCKET = "bucket"


@contextmanager
def s3_server(log: Path) -> Iterator[Mapping[str, str]]:
    """Runs the server, with one empty bucket.

    Args:
        log: File for its output.

    Yields:
        Environment variables by which clients find it.
    """
    if not (SERVER / "moto").is_dir():
        pytest.skip("needs build/s3, which `make test`, `make quick` and `make unit` install")
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
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def _create_bucket(address: str) -> bool:
    request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
    with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(request):
        return True
    return False
