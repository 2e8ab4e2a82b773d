"""Token files by URL give the samples of local ones; errors name the URL."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.remote import fetcher
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.token_dataset import TokenDataset
from megatron_ds.data.token_files import inspect_pair as inspect_dataset
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.validation import DataFiles, data_problems
from megatron_ds.fileio import object_store
from tests.object_server import FolderServer
from tests.problems import codes, raises_problem
from tests.token_files import write_pair

BLOCK = 1 << 14
PAGE = 1 << 12
URL = "s3://bucket"
SAMPLES = 400
SEQUENCE = 64
VOCABULARY = 60_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs, of 600 and 100 KB."""
    made = tmp_path_factory.mktemp("files")
    draw = np.random.default_rng(0)
    for name, documents in (("web", 300), ("books", 50)):
        lengths = draw.integers(1, 2000, documents)
        write_pair(made / name, [draw.integers(0, VOCABULARY, length) for length in lengths])
    return made


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderServer]:
    with FolderServer(folder) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


def new_cache(folder: Path, limit: int = 10**9, block_bytes: int = BLOCK) -> TokenCache:
    return TokenCache(str(folder / "cache"), limit / 1e9, block_bytes)


def dataset(place: object, cache: TokenCache | None = None) -> TokenDataset:
    paths = ("0.7", f"{place}/web", "0.3", f"{place}/books")
    files = DataFiles(DataConfig(data_path=paths, split="1"), cache)
    assert list(data_problems(files, (SAMPLES, 0, 0), VOCABULARY)) == []
    train = build_datasets(
        files,
        seq_length=SEQUENCE,
        seed=1,
        num_samples=(SAMPLES, 0, 0),
        tokenizer_fingerprint="",
        vocab_size=VOCABULARY,
    ).train
    assert train is not None
    return train


def samples(train: TokenDataset, workers: int, consumed: int = 0) -> npt.NDArray[np.int32]:
    batches = MicroBatchIterator(
        train, consumed=consumed, micro_batch_size=4, dp_rank=0, dp_size=1, num_workers=workers
    )
    rows = [batch.samples.ids for batch in batches]
    batches.close()
    return np.concatenate([row for row in rows if row is not None])


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_equal_those_of_local_files_and_each_block_comes_once(
    workers: int, server: FolderServer, folder: Path, tmp_path: Path
) -> None:
    """Claim (samples): token files by URL give the samples of local ones, with loader processes or
    without, and each block is downloaded once per node; a resume on another node continues with the
    same samples"""
    local = samples(dataset(folder), workers)
    train = dataset(URL, new_cache(tmp_path))
    assert samples(train, workers).tolist() == local.tolist()
    ranges = Counter(name for name in server.requests if name.endswith(".bin"))
    blocks = {
        name: -(-(folder / name).stat().st_size // BLOCK) for name in ("web.bin", "books.bin")
    }
    assert all(0 < ranges[name] <= count for name, count in blocks.items())
    # A resumed run on another node reads the rest.
    resumed = dataset(URL, TokenCache(str(tmp_path / "other")))
    assert samples(resumed, workers, consumed=200).tolist() == local[200:].tolist()
    before = len(server.requests)
    # The next run on this node looks for the files, and downloads nothing.
    again = dataset(URL, new_cache(tmp_path))
    assert samples(again, workers).tolist() == local.tolist()
    assert {name[:5] for name in server.requests[before:]} == {"HEAD "}


def test_a_cache_that_is_smaller_than_the_data_keeps_its_limit(
    server: FolderServer, folder: Path, tmp_path: Path
) -> None:
    """Claim (samples): the cache of a node keeps its limit, also while loader processes read files
    that are larger"""
    limit = 70 * PAGE
    cache = new_cache(tmp_path, limit, PAGE)
    train = dataset(URL, cache)
    largest = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.002):
            # Otherwise a block that another one replaces meanwhile would be counted besides it.
            with cache.blocks.allocating():
                files = list(cache.blocks.folder.rglob("*"))
                largest = max(largest, sum(path.stat().st_blocks * 512 for path in files))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert samples(train, 2).tolist() == samples(dataset(folder), 0).tolist()
    finally:
        done.set()
        watcher.join()
    # Besides, a block of the file system for each small file.
    assert limit / 2 < largest <= limit + 16 * PAGE


def test_a_failing_store_is_tried_again_then_named(
    server: FolderServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (samples): a token file that is replaced in its store during a run, or a store that
    fails for long, is an error with the URL"""
    data = IndexedDataset(f"{URL}/web", new_cache(tmp_path))
    server.failing = 503
    threading.Timer(0.5, lambda: setattr(server, "failing", None)).start()
    assert data.get(0).size == data.lengths[0]
    server.failing = 403  # which is final
    with raises_problem("token-block-unreadable", contains=f"{URL}/web.bin: the bytes "):
        data.tokens[:]


def test_a_file_that_is_replaced_during_a_run_is_an_error(
    server: FolderServer, folder: Path, tmp_path: Path
) -> None:
    """Claim (samples): a token file that is replaced in its store during a run, or a store that
    fails for long, is an error with the URL"""
    cache = new_cache(tmp_path)
    data = IndexedDataset(f"{URL}/web", cache)
    first = data.get(0)
    os.utime(folder / "web.bin", (1, 1))
    assert data.get(0).tolist() == first.tolist()
    with raises_problem("token-object-changed", contains=f"{URL}/web.bin"):
        data.tokens[:]
    # The next run reads the new file.
    again = IndexedDataset(f"{URL}/web", new_cache(tmp_path))
    assert again.tokens[:].tolist() == IndexedDataset(folder / "web").tokens.tolist()
    os.utime(folder / "web.idx", (1, 1))
    with raises_problem("token-object-changed", contains=f"{URL}/web.idx"):
        cache._download_index(f"{URL}/web", tmp_path)


def test_a_damaged_copy_is_downloaded_again(
    server: FolderServer, folder: Path, tmp_path: Path
) -> None:
    """Claim (samples): a killed process leaves no wrong block in it; damage is recognized by the
    next run and downloaded again"""
    prefix = f"{URL}/web"
    expected = IndexedDataset(folder / "web").tokens.tolist()
    data = IndexedDataset(prefix, new_cache(tmp_path))
    data.warm_up()
    server.failing = 403
    assert data.tokens[:].tolist() == expected
    server.failing = None
    # A copy that is in use is not verified again. Python 3.12 frees it with its cycles.
    del data
    gc.collect()
    (copy,) = (tmp_path / "cache").rglob("content")
    for path in (copy, copy.with_name("index")):
        with path.open("r+b") as file:
            file.write(b"damaged")
    server.requests.clear()
    assert IndexedDataset(prefix, new_cache(tmp_path)).tokens[:].tolist() == expected
    assert server.requests.count("web.bin") == 1
    os.truncate(copy, 100)
    assert IndexedDataset(prefix, new_cache(tmp_path)).tokens[:].tolist() == expected


def problems(cache: TokenCache, *paths: str) -> list[str]:
    files = DataFiles(DataConfig(data_path=paths, split="1"), cache)
    return codes(data_problems(files, (1, 0, 0), VOCABULARY))


def test_errors_of_the_start_come_together(server: FolderServer, tmp_path: Path) -> None:
    missing = ["data-file-missing"] * 2
    assert problems(new_cache(tmp_path), f"{URL}/web", f"{URL}/a", "b") == [*missing, *missing]
    assert problems(new_cache(tmp_path, BLOCK), f"{URL}/web") == ["token-cache-too-small"]
    huge = TokenCache(str(tmp_path / "huge"), 1e9)
    huge._versions[f"{URL}/web.bin"] = object_store.FileVersion(10**18, "")
    assert codes(huge.space_problems([f"{URL}/web"])) == ["token-cache-disk-too-small"]
    (tmp_path / "file").touch()
    (other,) = problems(TokenCache(str(tmp_path / "file")), f"{URL}/web")
    assert other == "token-cache-unusable"
    server.failing = 403
    assert problems(TokenCache(str(tmp_path / "new")), f"{URL}/web") == ["store-unusable"]


def test_inspecting_a_url_shows_what_inspecting_the_files_shows(
    server: FolderServer, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = []
    for prefix in (str(folder / "web"), f"{URL}/web"):
        flags = ["--check", "--documents", "7", "--samples", "3", "--seq-length", "16", "--json"]
        if "://" in prefix:
            flags += ["--object-storage-cache-path", str(tmp_path)]
        assert inspect_dataset.main([prefix, *flags]) == 0
        shown.append(json.loads(capsys.readouterr().out.replace(prefix, "PREFIX")))
    assert shown[0] == shown[1]


def test_a_reader_that_waits_for_long_names_the_url(
    server: FolderServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fetcher, "NOTICE_S", 0.05)
    data = IndexedDataset(f"{URL}/web", new_cache(tmp_path))
    server.latency = 0.2
    data.get(0)
    assert f"waiting for {URL}/web.bin\n" in capfd.readouterr().err
