"""The process that downloads: it shares the work with those of other readers."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from megatron_ds.data.remote.block_cache import USED, BlockCache, BlockFile
from megatron_ds.data.remote.fetcher import _Server
from megatron_ds.fileio.object_store import FileVersion, ObjectStore

BLOCK = 4096


def test_of_two_processes_that_need_a_block_one_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their locks are those of open files, which two servers have in one process, too."""
    (tmp_path / "tokens.bin").write_bytes(os.urandom(3 * BLOCK))
    BlockFile.create(tmp_path, 3 * BLOCK, BLOCK)
    read: list[tuple[int, int]] = []

    def read_slowly(store: ObjectStore, name: str, *span: int) -> tuple[bytes, FileVersion]:
        read.append(span)
        time.sleep(0.1)
        return (tmp_path / name).read_bytes()[slice(*span)], FileVersion(3 * BLOCK, "first")

    monkeypatch.setattr(ObjectStore, "read_range", read_slowly)
    replies, end = os.pipe()
    servers = [_Server(BlockCache(tmp_path, 99 * BLOCK, BLOCK), end) for _ in range(2)]
    for server in servers:
        server.add(f"file://{tmp_path}/tokens.bin", 3 * BLOCK, "first", tmp_path)
    threads = [threading.Thread(target=server.bring, args=(0, 1)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [(BLOCK, 2 * BLOCK)]
    answers = [json.loads(line) for line in os.read(replies, 1000).splitlines()]
    assert answers == [{"file": 0, "block": 1, "error": None}] * 2
    assert BlockFile(tmp_path, 3 * BLOCK, BLOCK).marks.tolist() == [0, USED, 0, 0]
