"""The number of threads of a process.

Claim (command-line): the number of threads does not depend on the launcher
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ds.launch.ranks import distributed
from megatron_ds.launch.watch import liveness
from megatron_ds.launch.watch.liveness import HostLocation, ProcessHandle


def location(host: str, *cores: int) -> HostLocation:
    return HostLocation(host, ProcessHandle(1, "1"), frozenset(cores))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([location("a", 0, 1, 2, 3)], 4),
        ([location("a", 0, 1, 2, 3)] * 2, 2),
        ([location("a", 0, 1, 2, 3), location("b", 0, 1, 2, 3)], 4),
        ([location("a", 0, 1), location("a", 2, 3)], 2),  # bound by the scheduler
        ([location("a", 0), location("a", 0)], 1),
    ],
)
def test_cores_are_shared_by_the_ranks_that_may_use_them(
    ranks: list[HostLocation], expected: int
) -> None:
    assert distributed.threads_of(ranks[0], ranks) == expected


def start(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, proc: Path) -> None:
    """Sets the variables of a rank, whose launcher, above a wrapper, has an environment."""
    monkeypatch.setattr(liveness, "PROC", proc)
    monkeypatch.setattr(os, "getppid", lambda: 12)
    wrapper = {**environment, "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    for pid, parent, values in ((12, 11, wrapper), (11, 1, environment)):
        (proc / str(pid)).mkdir()
        text = "".join(f"{name}={value}\0" for name, value in values.items())
        (proc / str(pid) / "environ").write_text(text)
        (proc / str(pid) / "stat").write_text(f"{pid} (name) S {parent} " + "0 " * 40)
    for name, value in wrapper.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("chosen", [{}, {"OMP_NUM_THREADS": "1"}])
def test_variable_that_torchrun_was_started_with_is_the_user_s_choice(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start({"PATH": "/bin", **chosen}, monkeypatch, tmp_path)
    assert distributed.is_default_of_torchrun() == (not chosen)


def test_unknown_launcher_s_variable_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(liveness, "PROC", tmp_path / "nothing")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not distributed.is_default_of_torchrun()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert not distributed.is_default_of_torchrun()


@pytest.mark.parametrize(("given", "torch_threads", "variable"), [(None, [3], "3"), ("2", [], "2")])
def test_threads_of_torch_and_of_later_libraries(
    given: str | None, torch_threads: list[int], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    here = location("a", *range(6))
    distributed.choose_threads(here, [here, here])
    assert chosen == torch_threads
    assert os.environ["OMP_NUM_THREADS"] == variable
