"""torchrun is ended when its attempts fail equally, and only then."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from megatron_ds.launch import attempts
from megatron_ds.launch.watch.liveness import ProcessHandle

AGENT = ProcessHandle(12345, "678")
SHAPES, DISK = "0: the shapes differ", "20: the disk is full"


@pytest.mark.parametrize(
    ("failures", "restarts", "ended_in"),
    [
        ([SHAPES] * 5, 100, 2),
        ([DISK, SHAPES, SHAPES, SHAPES], 100, 3),
        ([SHAPES, SHAPES, DISK, SHAPES, SHAPES], 100, None),
        ([f"{iteration}: CUDA error" for iteration in range(9)], 100, None),
        ([SHAPES] * 3, 2, None),  # the last one: torchrun ends by itself
        ([SHAPES], 0, None),  # without torchrun
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_equal_failures_end_torchrun(
    ranks: int,
    failures: list[str],
    restarts: int,
    ended_in: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many ranks of the host have failed in an attempt."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    ended: list[int] = []
    for attempt, failure in enumerate(failures[: restarts + 1]):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        if any(attempts.end_if_futile(failure, AGENT) for _ in range(ranks)):
            ended.append(attempt)
            break
    assert ended == [ended_in][: ended_in is not None]
    assert signals == [(AGENT.pid, signal.SIGTERM)][: len(ended)]
    is_open = not ended and len(failures) <= restarts
    assert [*tmp_path.iterdir()] == [] or is_open


def test_a_damaged_record_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "9")
    (tmp_path / f"megatron_ds-attempts-{AGENT.pid}-{AGENT.started}").write_text("[1, 2")
    assert not attempts.end_if_futile(SHAPES, AGENT)
