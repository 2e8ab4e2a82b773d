"""torchrun is ended when its attempts fail equally, and only then."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from megatron_ds.config.problems import Problem
from megatron_ds.launch import attempts
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.process import rank_end
from megatron_ds.launch.process.error_report import make_report
from megatron_ds.launch.process.rank_end import (
    ExitVerdict,
    RankEnd,
    verdict_of_error,
    verdict_of_hang,
)
from megatron_ds.launch.ranks.roll_call import RollCall
from megatron_ds.launch.watch.hang_watch import HangWatch
from megatron_ds.launch.watch.liveness import ProcessHandle

AGENT = ProcessHandle(12345, "678")
SHAPES = "0: the shapes differ"
DISK = "20: the disk is full"


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that torchrun's agent would have got; other processes still get theirs.

    Threads of earlier tests may end processes meanwhile.
    """
    sent: list[int] = []
    kill = os.kill

    def record(process_id: int, number: int) -> None:
        if process_id == AGENT.pid:
            sent.append(number)
        else:
            kill(process_id, number)

    monkeypatch.setattr(os, "kill", record)
    return sent


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
    signals: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many ranks of the host have failed in an attempt."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    ended: list[int] = []
    for attempt, failure in enumerate(failures[: restarts + 1]):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        if any(attempts.end_if_futile(failure, AGENT) for _ in range(ranks)):
            ended.append(attempt)
            break
    assert ended == [ended_in][: ended_in is not None]
    assert signals == [signal.SIGTERM][: len(ended)]
    is_open = not ended and len(failures) <= restarts
    assert [*tmp_path.iterdir()] == [] or is_open


DIVERGED = Problem("training-diverged", iteration=23, weight="", resume="Resume from global_step20")


@pytest.mark.parametrize(
    "verdict",
    [
        verdict_of_error(
            make_report(RunAborted(DIVERGED.render(), ExitCode.SKIPPED_STEPS)),
            None,
            None,
            has_board=True,
        ),
        verdict_of_hang("rank 1 waits", None),
        verdict_of_hang("", None),
    ],
    ids=["diverged", "reports a hang", "hangs"],
)
def test_a_run_that_ends_equally_after_each_resume_is_not_restarted_for_ever(
    verdict: ExitVerdict, signals: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as from a checkpoint with which it always diverges, or at a batch at which it hangs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rank_end, "end_process", lambda _: None)
    monkeypatch.setattr(rank_end, "say", lambda *_: None)
    monkeypatch.setattr(rank_end.output, "write_torchelastic_error_file", lambda _: None)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "100")
    for attempt, iteration in enumerate((19, 23, 23, 23)):
        assert signals == []
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        watch = HangWatch()
        watch.progress(iteration)
        RankEnd(RollCall(), [AGENT], watch)._end(verdict)
    assert signals == [signal.SIGTERM]


def test_a_damaged_record_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "9")
    (tmp_path / f"megatron_ds-attempts-{AGENT.pid}-{AGENT.started}").write_text("[1, 2")
    assert not attempts.end_if_futile(SHAPES, AGENT)
