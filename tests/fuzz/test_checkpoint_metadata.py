"""Arbitrary JSON in run.json, the manifest and the pointers is rejected with a problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.checkpoint import compatibility, metadata
from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.selection import list_folder
from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from tests.fuzz.fuzz_helpers import (
    FUZZ_SETTINGS,
    JSON,
    MISSING,
    REJECTED,
    paths_in,
    read_or_error,
    replaced,
)
from tests.unit.checkpoint.test_resume import FLAGS


@pytest.fixture(scope="module")
def config() -> Config:
    return arguments.build_config(FLAGS.split(), world_size=1, warn=lambda line: None)[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("save") / "global_step7"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def run(config: Config) -> dict[str, Any]:
    values = metadata.RunRecord(
        state=TrainState(iteration=7),
        config=config.to_dict(),
        layout=metadata.ParallelLayout.of(config, 1),
        data_order=metadata.DataOrder.of(config, 1),
        shards={"x": metadata.ShardRecord(0, (1,))},
        branch=Lineage((("name", 0),)),
    ).to_dict()
    return json.loads(json.dumps(values))


def write(path: Path, content: bytes, files: object = None) -> None:
    """Writes a run.json of any content and a manifest that matches it."""
    (path / metadata.RUN).write_bytes(content)
    listed = (
        {metadata.RUN: {"bytes": len(content), "xxh3_128": "0" * 32}} if files is None else files
    )
    (path / metadata.MANIFEST).write_text(metadata.checksum_manifest(listed))


def check(path: Path, config: Config) -> bool:
    """Whether the checkpoint is accepted; then its contents can be compared with a run."""
    problem = metadata.check_names(path)
    if problem is not None:
        assert problem
        return False
    found = metadata.read_run(path)
    assert found.iteration == 7
    problems = read_or_error(lambda: compatibility.resume_conflicts(found, config, 1), str(path))
    return problems is not REJECTED


def test_a_valid_checkpoint_is_accepted(path: Path, config: Config, run: dict[str, Any]) -> None:
    write(path, json.dumps(run).encode())
    assert metadata.check_names(path) is None
    assert compatibility.resume_conflicts(metadata.read_run(path), config, 1) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff", b"\0\0", b"[" * 100_000, b'{"format_version": 3}'],
)
@pytest.mark.parametrize("name", [metadata.RUN, metadata.MANIFEST])
def test_files_that_are_not_a_run_record_are_rejected(
    path: Path, config: Config, run: dict[str, Any], name: str, content: bytes
) -> None:
    write(path, content if name == metadata.RUN else json.dumps(run).encode())
    (path / name).write_bytes(content) if name == metadata.MANIFEST else None
    problem = metadata.check_names(path)
    assert problem is not None
    assert name in str(problem)


@given(data=st.data(), value=JSON | st.just(MISSING))
@FUZZ_SETTINGS
def test_any_value_anywhere_in_the_run(
    path: Path, config: Config, run: dict[str, Any], data: st.DataObject, value: object
) -> None:
    places = [place for place in paths_in(run) if place or value is not MISSING]
    changed = replaced(run, data.draw(st.sampled_from(places)), value)
    write(path, json.dumps(changed).encode())
    check(path, config)


@given(
    files=st.dictionaries(st.sampled_from([metadata.RUN, "x", "", ".", "\0", "a" * 5000]), JSON)
    | st.dictionaries(
        st.sampled_from([metadata.RUN, "x"]),
        st.fixed_dictionaries({"bytes": JSON, "xxh3_128": JSON}),
    )
)
@FUZZ_SETTINGS
def test_any_list_of_files(
    path: Path, config: Config, run: dict[str, Any], files: dict[str, object]
) -> None:
    write(path, json.dumps(run).encode(), files)
    check(path, config)


@given(content=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
@FUZZ_SETTINGS
def test_any_manifest(path: Path, config: Config, run: dict[str, Any], content: bytes) -> None:
    write(path, json.dumps(run).encode())
    (path / metadata.MANIFEST).write_bytes(content)
    assert not check(path, config)


@given(content=st.binary(max_size=30), name=st.sampled_from(metadata.POINTERS))
@FUZZ_SETTINGS
def test_any_pointer(path: Path, content: bytes, name: str) -> None:
    (path.parent / name).write_bytes(content)
    listing = list_folder(path.parent)
    assert {*listing.preferred} <= {path}
    assert all(str(path.parent) in problem for problem in listing.stale)
    (path.parent / name).unlink()


@given(state=JSON | st.dictionaries(st.sampled_from(list(TrainState().to_dict())), JSON))
@FUZZ_SETTINGS
def test_any_state(path: Path, config: Config, run: dict[str, Any], state: object) -> None:
    full = {**TrainState(iteration=7).to_dict(), **state} if isinstance(state, dict) else state
    write(path, json.dumps({**run, "state": full}).encode())
    check(path, config)
