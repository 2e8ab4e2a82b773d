"""The cache of blocks: its limit, whom it serves meanwhile, and what damage it recognizes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.remote import block_cache as module
from megatron_ds.data.remote.block_cache import (
    ABSENT,
    CONTENT,
    IDLE,
    UNVERIFIED,
    USED,
    BlockCache,
    BlockFile,
)

BLOCK = 4096
SIZE = 100 * BLOCK - 7
FORK = multiprocessing.get_context("fork")


def content(block: int, seed: int = 0) -> bytes:
    length = min(BLOCK, SIZE - block * BLOCK)
    return random.Random(f"{seed} {block}").randbytes(length)


def disk_use(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def new_file(cache: BlockCache, name: str) -> BlockFile:
    (cache.folder / name).mkdir()
    (cache.folder / name / "users").touch()
    BlockFile.create(cache.folder / name, SIZE, BLOCK)
    cache.recount()
    return BlockFile(cache.folder / name, SIZE, BLOCK)


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path, 40 * BLOCK, BLOCK)


def held(file: BlockFile) -> list[int]:
    return np.flatnonzero(file.marks[:-1]).tolist()


def test_blocks_stay_within_the_limit_and_have_their_content(cache: BlockCache) -> None:
    """Claim (samples): the cache of a node keeps its limit, also while loader processes read files
    that are larger"""
    files = [new_file(cache, "a"), new_file(cache, "b")]
    for block in range(100):
        for seed, file in enumerate(files):
            cache.store(file, block, content(block, seed))
            assert sum(len(held(each)) for each in files) < 40
            # A block of the file system more for each of the small files.
            assert disk_use(cache.folder) < (40 + 8) * BLOCK
    for seed, file in enumerate(files):
        assert 10 < len(held(file)) < 30
        mapped = file.map_content()
        for block in held(file):
            start, end = file.span(block)
            assert mapped[start:end].tobytes() == content(block, seed)


def test_blocks_that_were_not_used_go_first(cache: BlockCache) -> None:
    file = new_file(cache, "a")
    for block in range(38):
        cache.store(file, block, content(block))
    file.marks[:20] = IDLE
    for block in range(38, 58):
        cache.store(file, block, content(block))
    assert {*range(20, 38)} <= {*held(file)}


def test_a_file_is_complete_until_a_block_of_it_is_removed(cache: BlockCache) -> None:
    cache.limit = 110 * BLOCK
    file = new_file(cache, "a")
    other = new_file(cache, "b")
    for block in range(100):
        assert file.marks[-1] != USED
        cache.store(file, block, content(block))
    assert file.marks[-1] == USED
    for block in range(20):
        cache.store(other, block, content(block))
    assert file.marks[-1] == ABSENT


def test_no_block_is_removed_while_another_process_reads(cache: BlockCache) -> None:
    file = new_file(cache, "a")
    for block in range(38):
        cache.store(file, block, content(block))
    before = file.marks.copy()
    cache.begin_reading()

    def fill() -> None:
        other = BlockCache(cache.folder, cache.limit, BLOCK)
        for block in range(38, 60):
            other.store(BlockFile(file.folder, SIZE, BLOCK), block, content(block))

    writer = FORK.Process(target=fill)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    assert (file.marks[:38] == before[:38]).all()
    cache.end_reading()
    writer.join()
    assert writer.exitcode == 0
    assert (file.marks[:38] == ABSENT).any()


def flip(path: Path) -> None:
    """Changes one bit."""
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, 5 * BLOCK + 100)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), 5 * BLOCK + 100)


def truncate(path: Path) -> None:
    """Loses the end, which reads as zeros after the file has its size again."""
    os.truncate(path, 5 * BLOCK)
    os.truncate(path, SIZE)


@pytest.mark.parametrize("damage", [flip, truncate])
def test_damage_between_two_runs_is_recognized(
    cache: BlockCache, damage: Callable[[Path], None]
) -> None:
    """Claim (samples): a killed process leaves no wrong block in it; damage is recognized by the
    next run and downloaded again"""
    file = new_file(cache, "a")
    for block in (3, 4, 5):
        cache.store(file, block, content(block))
    damage(file.folder / CONTENT)
    file.distrust()
    assert file.marks[3:6].tolist() == [UNVERIFIED] * 3
    assert [cache.has(file, block) for block in (3, 4, 5, 6)] == [True, True, False, False]
    cache.store(file, 5, content(5))
    assert cache.has(file, 5)
    assert file.matches(5)


def test_a_block_is_marked_last(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed when the content is written, and the checksum is not."""
    file = new_file(cache, "a")
    monkeypatch.setattr(module.zlib, "crc32", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    writer = FORK.Process(target=cache.store, args=(file, 5, content(5)))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert file.map_content()[5 * BLOCK : 6 * BLOCK].tobytes() == content(5)
    assert held(file) == []
    file.distrust()
    assert not file.map_content().any()


def test_a_killed_process_leaves_no_wrong_block(cache: BlockCache) -> None:
    """Claim (samples): a killed process leaves no wrong block in it; damage is recognized by the
    next run and downloaded again"""
    file = new_file(cache, "a")

    def fill(seed: int) -> None:
        other = BlockCache(cache.folder, cache.limit, BLOCK)
        draw = random.Random(seed)
        while True:
            block = draw.randrange(100)
            other.store(BlockFile(file.folder, SIZE, BLOCK), block, content(block))

    for seed in range(3):
        writers = [FORK.Process(target=fill, args=(seed + 10 * n,)) for n in range(2)]
        for writer in writers:
            writer.start()
        time.sleep(0.05 + 0.01 * seed)
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
        assert held(file)
        mapped = file.map_content()
        for block in held(file):
            start, end = file.span(block)
            assert mapped[start:end].tobytes() == content(block)
    file.distrust()
    assert disk_use(cache.folder) < (40 + 8) * BLOCK
    cache.store(file, 0, content(0))


def test_a_file_without_blocks_and_users_is_forgotten(cache: BlockCache) -> None:
    old = new_file(cache, "old")
    new = new_file(cache, "new")
    cache.store(old, 0, content(0))
    old.marks[0] = IDLE
    lock, is_first = cache.use("new")
    assert is_first
    assert not cache.use("new")[1]
    for block in range(60):
        cache.store(new, block, content(block))
    assert not old.folder.exists()
    lock.release()


def test_two_machines_do_not_share_a_folder(cache: BlockCache) -> None:
    lock, _ = cache.use("a")
    (cache.folder / "a" / "users").write_text("of another kernel")
    with pytest.raises(OSError, match="another machine"):
        cache.use("a")
    lock.release()
    assert cache.use("a")[1]


def test_a_limit_below_the_indexes_is_an_error(cache: BlockCache) -> None:
    file = new_file(cache, "a")
    for block in range(38):
        cache.store(file, block, content(block))
    cache.make_room(20 * BLOCK)
    assert 10 < len(held(file)) < 20
    with pytest.raises(OSError, match="index files"):
        cache.make_room(41 * BLOCK)
    (file.folder / "index").write_bytes(bytes(41 * BLOCK))
    cache.recount()
    with pytest.raises(OSError, match="index files"):
        cache.store(file, 99, content(99))
