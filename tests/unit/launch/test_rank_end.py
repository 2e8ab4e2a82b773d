"""What a rank that ends says, and its status."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process import rank_end
from megatron_ds.launch.process.error_report import ErrorReport
from megatron_ds.launch.process.rank_end import (
    RankEnd,
    verdict_after_peer,
    verdict_of_error,
    verdict_of_hang,
)
from megatron_ds.launch.ranks.host_differences import Verdict
from megatron_ds.launch.ranks.roll_call import RollCall
from megatron_ds.launch.watch.liveness import RankExit

OWN = ErrorReport("failed: own", ExitCode.ERROR, "own text", "Traceback\n")
COMMON = ErrorReport("ended: common", ExitCode.SKIPPED_STEPS, "common text", is_common=True)
STOPPED = ErrorReport("was stopped", ExitCode.TERMINATED, "stopped text", is_common=True)
PEER = RankExit(3, "failed: other", ExitCode.ERROR, host=" on b")
DIFFER = Verdict("hosts differ", ExitCode.HOSTS_DIFFER)
ERROR = ExitCode.ERROR
ABORTED = ExitCode.SKIPPED_STEPS


@pytest.mark.parametrize(
    ("report", "known", "code", "shown", "is_printed", "is_cause", "failure"),
    [
        # Its own error: printed and compared if the ranks know each other, or if it is no other's.
        (OWN, {}, ERROR, "own text", True, True, "failed: own"),
        (OWN, {"has_board": False}, ERROR, "own text", True, True, "failed: own"),
        (COMMON, {}, ABORTED, "common text", True, True, "ended: common"),
        (COMMON, {"has_board": False}, ABORTED, "common text", False, True, ""),
        (
            COMMON,
            {"has_board": False, "local_rank": 0},
            ABORTED,
            "common text",
            True,
            True,
            "ended: common",
        ),
        # Another rank was first: named unless it is the same failure, or this one was requested.
        (OWN, {"first": PEER}, ERROR, "3 on b", True, False, ""),
        (OWN, {"first": RankExit(3, "failed: own", 1)}, ERROR, "", True, False, ""),
        (STOPPED, {"first": PEER}, ExitCode.TERMINATED, "", True, False, ""),
        # The hosts differ: the first rank says so, and one of each host is compared.
        (OWN, {"start": DIFFER}, ExitCode.HOSTS_DIFFER, "hosts differ", False, True, ""),
        (
            OWN,
            {"start": DIFFER, "rank": 0, "local_rank": 0, "has_board": False},
            ExitCode.HOSTS_DIFFER,
            "hosts differ",
            True,
            True,
            "hosts differ",
        ),
        (
            OWN,
            {"start": DIFFER, "rank": 8, "local_rank": 0},
            ExitCode.HOSTS_DIFFER,
            "hosts differ",
            False,
            True,
            "hosts differ",
        ),
    ],
)
def test_an_error_is_reported_once(
    report: ErrorReport,
    known: dict[str, Any],
    code: ExitCode,
    shown: str,
    is_printed: bool,
    is_cause: bool,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts: dict[str, Any] = {"start": None, "first": None, "has_board": True, **known}
    for name in ("rank", "local_rank"):
        monkeypatch.setenv(name.upper(), str(facts.pop(name, 1)))
    verdict = verdict_of_error(report, **facts)
    assert (verdict.code, verdict.failure) == (code, failure)
    assert (verdict.is_printed, verdict.is_cause) == (is_printed, is_cause)
    assert shown in verdict.text
    assert bool(shown) == bool(verdict.text)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (ExitCode.ERROR, ExitCode.PEER_LOST),
        (ExitCode.PEER_LOST, ExitCode.PEER_LOST),
        (ExitCode.INTERRUPTED, ExitCode.INTERRUPTED),
        (ExitCode.TERMINATED, ExitCode.TERMINATED),
    ],
)
def test_the_status_of_a_requested_exit_is_that_of_all(
    status: ExitCode, code: ExitCode, is_first: bool
) -> None:
    verdict = verdict_after_peer(RankExit(2, "was killed", status, host=""), is_first=is_first)
    assert (verdict.code, verdict.is_printed) == (code, is_first)
    assert (verdict.is_cause, verdict.failure) == (False, "")
    assert "rank 2 was killed" in verdict.text


def test_one_rank_reports_where_a_run_hangs() -> None:
    report = verdict_of_hang("all ranks are here", PEER)
    assert report.text.endswith("all ranks are here")
    assert (report.code, report.is_printed, report.is_cause) == (ExitCode.HUNG, True, True)
    other = verdict_of_hang("", PEER)
    assert "3 on b" in other.text
    assert (other.code, other.is_printed, other.is_cause) == (ExitCode.HUNG, False, False)
    assert verdict_of_hang("", None).text == ""
    assert report.failure == other.failure != ""


class Board:
    """An exit board on which another rank has posted its exit, or none."""

    def __init__(self, posted: RankExit | None = None) -> None:
        self.posted = posted

    def post(self, rank_exit: RankExit) -> RankExit:
        self.posted = self.posted or rank_exit
        return self.posted

    def is_first_report(self) -> bool:
        return False


class _Ended(Exception):
    pass


@pytest.mark.parametrize(
    ("posted", "said", "noted"),
    [(None, ["own text"], []), (PEER, ["3 on b"], []), ("lost", [], ["3 on b"])],
)
def test_a_rank_acts_on_its_verdict(
    posted: Any, said: list[str], noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = list[str]()
    logged = list[str]()
    files = list[str]()
    ended = list[int]()

    def end(code: ExitCode) -> None:
        ended.append(code)
        raise _Ended

    monkeypatch.setattr(rank_end, "STORE_S", 0.0)
    monkeypatch.setattr(rank_end, "end_process", end)
    monkeypatch.setattr(rank_end, "say", lambda function, text: function(text))
    monkeypatch.setattr(rank_end.output, "print_error", printed.append)
    monkeypatch.setattr(rank_end.output, "write_torchelastic_error_file", files.append)
    monkeypatch.setattr(rank_end.rank_log, "note", logged.append)
    board: Any = Board(PEER if posted is PEER else None)
    last = RankEnd(RollCall(), (), board=board)
    with pytest.raises(_Ended):
        last.end_after_peer(PEER) if posted == "lost" else last.end_by_error(OWN)
    assert ended == [ExitCode.PEER_LOST if posted == "lost" else ExitCode.ERROR]
    for texts, parts in ((printed, said), (logged, noted)):
        assert [part in text for part, text in zip(parts, texts, strict=True)] == [True] * len(
            parts
        )
    assert len(files) == (1 if posted is None else 0)
