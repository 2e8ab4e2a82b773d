"""Processes of a host whose first one reads files for all."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.fileio.host_reader import HostReader
from megatron_ds.fileio.memory_map import map_file

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract sockets")


def run_processes(folder: Path, size: int, work: Callable[[HostReader, int], Any]) -> list[Any]:
    """Calls `work` in forked processes of a host; returns what they return."""
    folder.mkdir(exist_ok=True)
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            status = 1
            try:
                signal.alarm(60)
                result = work(HostReader(str(folder), rank, size, "command"), rank)
                (folder / f"{rank}.json").write_text(json.dumps(result))
                while rank == 0 and len([*folder.glob("*.json")]) < size:
                    time.sleep(0.01)  # until the other ones have what it hands over
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert not any(statuses)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def read_sum(path: Path, made: list[int]) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        made.append(os.getpid())
        with path.open("rb") as file:
            values = map_file(file).view("<i4")
        return {"all": values, "part": values[100:200].reshape(10, 10), "text": "x"}

    return make


def test_the_first_process_maps_a_file_for_all(tmp_path: Path) -> None:
    path = tmp_path / "values"
    np.arange(1000, dtype="<i4").tofile(path)
    others = [tmp_path / f"other{number}" for number in range(450)]
    for number, other in enumerate(others):
        np.array([number], "<i4").tofile(other)

    def work(host: HostReader, rank: int) -> list[Any]:
        made: list[int] = []
        seen = host.read(read_sum(path, made))
        if rank:
            path.unlink(missing_ok=True)  # nothing is opened by its name
        else:
            path.exists()
        many = host.read(lambda: [map_file(other.open("rb")) for other in others])
        numbers = [int(each.view("<i4")[0]) for each in many]
        return [len(made), seen["all"].tolist(), seen["part"].tolist(), numbers]

    values = list(range(1000))
    for rank, (made, all_, part, numbers) in enumerate(run_processes(tmp_path / "run", 3, work)):
        assert made == (rank == 0)
        assert all_ == values
        assert np.ravel(part).tolist() == values[100:200]
        assert numbers == list(range(450))


def test_processes_read_themselves_where_nothing_is_handed_over(tmp_path: Path) -> None:
    """An error of the first process, and values that cannot be sent."""

    def fail() -> int:
        raise ValueError("unreadable")

    def work(host: HostReader, rank: int) -> list[Any]:
        error = ""
        try:
            host.read(fail)
        except ValueError as raised:
            error = str(raised)
        function = host.read(lambda: lambda: os.getpid())
        kept = host.read(lambda: rank, may_send=lambda value: False)
        return [error, function() == os.getpid(), kept, host.read(lambda: rank)]

    results = run_processes(tmp_path / "run", 3, work)
    assert results == [["unreadable", True, rank, 0] for rank in range(3)]


def test_a_process_with_another_command_or_without_a_first_one_reads_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ds.fileio.host_reader.MEET_S", 0.2)

    def work(host: HostReader, rank: int) -> int:
        other = HostReader(str(tmp_path / "run"), rank, 2, "another") if rank else host
        return other.read(lambda: rank)

    assert run_processes(tmp_path / "run", 2, work) == [0, 1]
    assert HostReader(str(tmp_path), 1, 2, "command").read(lambda: "own") == "own"
    assert HostReader().read(lambda: "alone") == "alone"


def test_a_file_that_was_replaced_is_not_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "values"
    np.arange(10, dtype="<i4").tofile(path)

    def work(host: HostReader, rank: int) -> list[int]:
        def make() -> Any:
            with path.open("rb") as file:
                values = map_file(file).view("<i4")
            if rank == 0:
                path.unlink()
                np.arange(10, 20, dtype="<i4").tofile(path)
            return values

        values: list[int] = host.read(make).tolist()
        return values

    first, second = run_processes(tmp_path / "run", 2, work)
    assert first == list(range(10))
    assert second == list(range(10, 20))  # its own look at the folder
