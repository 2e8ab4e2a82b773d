"""Copies of tensors by several threads."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_ds.engine.states import threaded_copy
from megatron_ds.engine.states.threaded_copy import bytes_of_storage, copy_tensors, in_threads


@pytest.fixture(params=[1, 3])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(threaded_copy, "available_cores", lambda: count)
    monkeypatch.setattr(threaded_copy, "local_world_size", lambda: None)
    return count


def test_all_kinds_of_tensors_are_copied(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_copy, "CHUNK", 16)
    parameter = torch.nn.Parameter(torch.rand(5, 3))
    sources = [torch.rand(33), parameter, torch.rand(4, 6).T, torch.tensor(3), torch.empty(0, 2)]
    targets = [torch.zeros_like(each, requires_grad=each.requires_grad) for each in sources]
    copy_tensors(zip(targets, sources, strict=True))
    for target, source in zip(targets, sources, strict=True):
        torch.testing.assert_close(target, source, rtol=0, atol=0)


def test_the_bytes_of_a_storage_are_those_of_all_of_its_views() -> None:
    values = torch.arange(6, dtype=torch.int16)
    assert bytes_of_storage(values[2:4].untyped_storage()).view(torch.int16).equal(values)


def test_errors_of_the_threads_are_raised(cores: int) -> None:
    seen: list[int] = []
    in_threads(seen.append, range(7))
    assert sorted(seen) == list(range(7))
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda item: 1 // item, range(7))


@pytest.mark.parametrize(("processes", "expected"), [(4, 1), (2, 2)])
def test_processes_of_a_host_share_its_cores(
    processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded_copy, "available_cores", lambda: 4)
    monkeypatch.setattr(threaded_copy, "local_world_size", lambda: processes)
    started = threading.Barrier(expected)
    threads = set()

    def work(item: int) -> None:
        threads.add(threading.get_ident())
        started.wait(timeout=30)

    in_threads(work, range(2 * expected))
    assert len(threads) == expected
