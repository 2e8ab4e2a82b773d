"""When a rank is overdue, and what is reported then.

Claim (stopping): with `--hang-timeout`, a rank that is stopped (SIGSTOP) ends the run with status
6, the stacks and last collectives of the others, and itself; also the one that has the store
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ds.launch.ranks import distributed
from megatron_ds.launch.ranks.distributed import ExitBoard
from megatron_ds.launch.watch import hang_watch
from megatron_ds.launch.watch.hang_watch import HangReport, HangWatch, hang_problem, ranks_text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now[0])
    return now


def overdue_after(seconds: float, watch: HangWatch, clock: list[float]) -> float | None:
    """What the watch says after this time, in which it is asked twice a second."""
    overdue = watch.overdue_s()
    for _ in range(int(2 * seconds)):
        clock[0] += 0.5
        overdue = watch.overdue_s()
    return overdue


def test_a_rank_is_overdue_after_the_timeout_without_progress(clock: list[float]) -> None:
    watch = HangWatch(timeout_s=10.0, patient_s=100.0)
    assert overdue_after(500.0, watch, clock) is None  # the start is not watched
    with watch.running():
        assert overdue_after(9.0, watch, clock) is None
        watch.progress(7)
        assert overdue_after(9.0, watch, clock) is None
        assert overdue_after(2.0, watch, clock) == 11.0
        with watch.patient():
            assert overdue_after(99.0, watch, clock) is None
            assert overdue_after(2.0, watch, clock) == 101.0
        assert overdue_after(0.0, watch, clock) is None
        assert overdue_after(11.0, watch, clock) == 11.0
    assert overdue_after(0.0, watch, clock) is None
    assert watch.iteration == 7


def test_time_in_which_the_process_is_suspended_does_not_count(clock: list[float]) -> None:
    watch = HangWatch(timeout_s=10.0)
    with watch.running():
        assert overdue_after(6.0, watch, clock) is None
        for seconds in (60.0, 3600.0):
            clock[0] += seconds
            assert watch.overdue_s() is None
        assert overdue_after(4.0, watch, clock) is None
        assert overdue_after(1.0, watch, clock) == 11.0
        clock[0] += 60.0
        watch.progress(1)  # by another thread, before the watch is asked again
        assert overdue_after(10.0, watch, clock) is None
        assert overdue_after(1.0, watch, clock) == 11.0


def test_without_a_timeout_no_rank_is_overdue(clock: list[float]) -> None:
    watch = HangWatch()
    with watch.running(), watch.patient():
        watch.progress(1)
        assert overdue_after(1e4, watch, clock) is None


def test_a_report_has_stacks_of_all_threads(tmp_path: Path) -> None:
    end = threading.Event()
    folder = tmp_path / "logs"
    thread = threading.Thread(target=end.wait)
    thread.start()
    watch = HangWatch(1.0, folder=folder)
    watch.iteration = 5
    reports = [watch.write_report(3), watch.write_report(3)]
    end.set()
    thread.join()
    assert [report.file for report in reports] == [str(folder / "hang-rank3.txt")] * 2
    text = (folder / "hang-rank3.txt").read_text()
    assert text.count("last iteration that was completed: 5") == 2  # that of a run before is kept
    assert text.count("test_a_report_has_stacks_of_all_threads") == 2
    assert text.count(" in wait\n") >= 2


def test_a_report_that_cannot_be_written_goes_to_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert HangWatch(1.0, folder=tmp_path / "file").write_report(0).file == ""
    assert "in write_report" in capfd.readouterr().err


def test_collectives_are_described_with_ranks_and_sizes(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {
        "record_id": 1,
        "profiling_name": "nccl:all_reduce",
        "is_p2p": False,
        "collective_seq_id": 12,
        "p2p_seq_id": 0,
        "process_group": [dist.group.WORLD.group_name, "default_pg"],
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 4]],
    }
    sent = {**entry, "record_id": 2, "profiling_name": "nccl:send 0->1", "is_p2p": True}
    sent |= {"p2p_seq_id": 4, "process_group": ["77", "pp"]}
    texts = hang_watch.json.dumps({"entries": [sent, entry]})
    # As torch records a group without this rank.
    monkeypatch.setitem(dist.distributed_c10d._world.pg_group_ranks, -100, {})  # type: ignore[arg-type]
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *_: texts, raising=False)
    assert hang_watch.last_collectives() == [
        "all_reduce number 12 of rank 0, Float [3, 4]",
        "send 0->1 number 4 of group 77, Float [3, 4]",
    ]
    monkeypatch.delattr(c10d, "_dump_fr_trace_json")
    assert hang_watch.last_collectives() == []


def test_one_rank_collects_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    own = threading.local()
    monkeypatch.setattr(dist.HashStore, "clone", lambda self: self)
    monkeypatch.setattr(distributed, "rank", lambda: own.rank)
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(distributed.socket, "gethostname", lambda: f"node{own.rank}")
    boards = []
    found = {}
    for own.rank in range(3):
        boards.append(ExitBoard())

    def report(rank: int, expected: int | None) -> None:
        own.rank = rank
        found[rank] = boards[rank].exchange_reports(f"report {rank}", expected, 5.0)

    threads = [threading.Thread(target=report, args=each) for each in ((0, None), (2, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: ([], [1]), 2: (["report 0", "report 2"], [1])}
    assert boards[2].hosts([1]) == {1: "node1"}


def test_the_message_names_silent_ranks_and_those_that_are_behind() -> None:
    reports = [
        HangReport(rank, "a, process 1", 4 + rank, "barrier" if rank == 3 else "all_reduce", "d/f")
        for rank in (0, 2, 3)
    ]
    text = str(hang_problem(reports, {1: "is stopped"}, 60.0))
    assert "no progress within 60 s (--hang-timeout) after iteration 7: rank 1 is stopped; " in text
    assert "the last collective of rank 3 is barrier; " in text
    assert "the last collective of ranks 0, 2 is all_reduce. " in text
    assert "d/hang-rank*.txt" in text


def test_of_many_ranks_the_first_are_named() -> None:
    assert ranks_text(range(1000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
