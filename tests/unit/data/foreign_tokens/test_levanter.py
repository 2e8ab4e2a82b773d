"""Levanter's caches, where tensorstore is installed, and the message where it is not."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ds.data.foreign_tokens import import_program
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from tests import foreign_tokens as foreign
from tests.foreign_tokens import ENDS, TOKENS
from tests.problems import printed_codes
from tests.unit.conftest import Run

TOOL = import_program
HAS_TENSORSTORE = importlib.util.find_spec("tensorstore") is not None
needs_tensorstore = pytest.mark.skipif(not HAS_TENSORSTORE, reason="tensorstore is not installed")


@needs_tensorstore
@pytest.mark.parametrize("shards", [("",), ("a", "b")])
def test_a_cache_gives_its_rows(shards: Sequence[str], tmp_path: Path, run: Run) -> None:
    cache = foreign.levanter(tmp_path / "in", shards)
    run("--input", cache, "--output-prefix", tmp_path / "o")
    pair = IndexedDataset(str(tmp_path / "o"))
    assert pair.tokens[:].tolist() == TOKENS
    assert pair.lengths.cumsum().tolist() == ENDS


@needs_tensorstore
@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ("input_ids/data/c/1", "foreign-shard-missing"),
        ("input_ids/data/zarr.json", "token-file-missing"),
        ("input_ids/offsets/zarr.json", "foreign-column-not-unique"),
    ],
)
def test_a_missing_part_of_a_cache_is_named(
    missing: str, code: str, tmp_path: Path, run: Run
) -> None:
    """A missing chunk would be read as zeros."""
    cache = foreign.levanter(tmp_path / "in")
    (cache / missing).unlink()
    assert printed_codes(run("--input", cache, "--output-prefix", "o", status=1).err) == [code]


@needs_tensorstore
def test_a_missing_shard_of_a_cache_is_named(tmp_path: Path, run: Run) -> None:
    cache = foreign.levanter(tmp_path / "in", ("a", "b"))
    shutil.rmtree(cache / "b")
    error = run("--input", cache, "--output-prefix", "o", status=1).err
    assert printed_codes(error) == ["foreign-shard-missing"]


@pytest.mark.skipif(HAS_TENSORSTORE, reason="tensorstore is installed")
def test_the_package_that_reads_a_cache_is_named(tmp_path: Path, run: Run) -> None:
    foreign.write(tmp_path / "shard_ledger.json", b'{"is_finished": true}')
    error = run("--input", tmp_path, "--output-prefix", tmp_path / "o", status=1).err
    assert printed_codes(error) == ["library-missing"]
    assert "tensorstore" in error
