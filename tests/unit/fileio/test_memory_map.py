"""Memory-mapped files without open descriptors."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.index_cache import ArrayCache
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.fileio.memory_map import map_file
from tests.token_files import write_pair


def count_mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_mapped_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 100)
    with open(path, "rb") as file:
        content = map_file(file)
    part = content[100:200].view(np.uint16)
    assert content.tobytes() == path.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        content[0] = 1
    del content
    assert part.tobytes() == path.read_bytes()[100:200]
    path.write_bytes(b"")
    with open(path, "rb") as file:
        assert map_file(file).size == 0
    with open(os.devnull, "rb") as file:
        assert map_file(file).size == 0
    path.write_bytes(b"content")
    with open(path, "ab") as file, pytest.raises(PermissionError):
        map_file(file)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_mapping_lives_as_long_as_an_array_over_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    with open(path, "rb") as file:
        part = map_file(file)[5:]
    view = memoryview(part)
    del part
    gc.collect()
    assert count_mappings(path) == 1
    assert view[17] == 0
    del view
    gc.collect()
    assert count_mappings(path) == 0


def test_more_files_than_the_descriptor_limit(tmp_path: Path) -> None:
    for number in range(40):
        write_pair(tmp_path / str(number), [[number] * 3])
    cache = ArrayCache([tmp_path])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = int(os.listdir("/proc/self/fd")[-1]) if os.path.isdir("/proc/self/fd") else 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
    try:
        files = [IndexedDataset(tmp_path / str(number)) for number in range(40)]
        arrays = [cache.get_or_build("k", {"n": n}, lambda: {"a": np.arange(5)}) for n in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [int(file.tokens[0]) for file in files] == list(range(40))
    assert all(each["a"].tolist() == [0, 1, 2, 3, 4] for each in arrays)
