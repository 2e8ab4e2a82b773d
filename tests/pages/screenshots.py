"""Writes docs/images/report.png and server.png: the pages of a report and of the text generation
server, as a browser shows them.

`python -m tests.pages.screenshots RUN`, where RUN is the --save folder of a run such as that of
docs/start/tutorial.md. Needs Chromium and playwright, as the tests of the server's page do.
"""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ds.reports import report
from tests.e2e.test_web_page import BROWSERS, SERVER
from tests.pages.support_matrix import REPOSITORY

IMAGES = REPOSITORY / "docs" / "images"
WIDTH = 1280
HEIGHT = 1560
COLORS = 128
MAX_BYTES = 150_000
TIMEOUT = 120_000
"""Milliseconds within which a page is complete."""


def write(page: Any, name: str) -> None:
    """Takes a picture of what a tab shows, with few colors."""
    from PIL import Image

    path = IMAGES / name
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLORS)
    picture.save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, path
    print(f"wrote {path}, {path.stat().st_size:,} bytes")


@contextmanager
def serving(run: str) -> Iterator[str]:
    """The address of a server of a run."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    process = subprocess.Popen([sys.executable, SERVER, "--load", run, "--port", port])
    url = f"http://127.0.0.1:{port}/"
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}health", timeout=5).close()
                break
            except OSError:
                continue
        yield url
    finally:
        process.terminate()
        process.wait()


def main(run: str) -> None:
    from playwright.sync_api import sync_playwright

    path = next(path for path in map(shutil.which, BROWSERS) if path)
    with sync_playwright() as library, library.chromium.launch(executable_path=path) as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(TIMEOUT)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "report.html")
            assert report.main([run, "--output", str(output)]) == 0
            page.goto(output.as_uri())
            write(page, "report.png")
        with serving(run) as url:
            page.set_viewport_size({"width": WIDTH, "height": 760})
            page.goto(url)
            page.fill("#prompt", "def __init__(self, name):\n    self.")
            page.fill("#temperature", "0.7")
            page.fill("#seed", "1")
            page.click("#generate")
            page.locator("article[aria-busy=false]").wait_for()
            page.locator(".token").nth(14).hover()
            page.locator("#details table").first.wait_for()
            write(page, "server.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
