"""A start looks up and opens the shared files once per host, however many ranks it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.simulated_ranks import count_start_calls, write_shared_files

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract sockets")


def test_calls_of_the_file_system_are_per_host(tmp_path: Path) -> None:
    flags = write_shared_files(tmp_path, sources=3)
    count_start_calls(flags, tmp_path, ranks=1, world_size=8)  # builds the indexes
    totals, samples = {}, {}
    for ranks in (1, 2, 8):
        calls = count_start_calls(flags, tmp_path, ranks, world_size=8)
        samples[ranks] = [each.pop("sample") for each in calls]
        totals[ranks] = sum(each.total() for each in calls)
        assert not any(each.total() for each in calls[1:]), calls[1]
    assert 0 < totals[1] < totals[2] == totals[8]  # a file is opened again to be handed over
    assert samples[8][:2] == samples[2]
    assert len({*samples[8]}) > 1
