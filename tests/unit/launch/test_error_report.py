"""What is said of the errors that end a run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.launch.error_report import ErrorReport, is_collective_error, make_report
from megatron_ds.launch.exit_codes import ExitCode, RunAborted


@pytest.fixture(autouse=True)
def _rank_2_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["folder/pretrain_gpt.py"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_users_error_is_its_message() -> None:
    with pytest.raises(ValueError, match="there is no file") as caught:
        IndexedDataset("/nowhere/at/all")
    report = make_report(caught.value)
    assert report.code == ExitCode.ERROR
    assert report.full_text() == f"pretrain_gpt.py: rank 2: {caught.value}"


def test_an_end_that_is_known_keeps_its_status() -> None:
    report = make_report(RunAborted("the disk is full", ExitCode.SAVE_FAILED))
    assert report.code == ExitCode.SAVE_FAILED
    assert report.full_text() == "pretrain_gpt.py: rank 2: the disk is full"


def test_a_bug_keeps_its_traceback_and_ends_with_the_rank() -> None:
    report = make_report(raised(KeyError("a key")))
    assert report.code == ExitCode.ERROR
    assert report.full_text().startswith("Traceback (most recent call last):\n")
    assert report.full_text().endswith("\npretrain_gpt.py: rank 2: failed: KeyError: 'a key'")
    assert report.words == "failed: KeyError: 'a key'"


def test_of_a_long_message_the_others_get_the_first_line() -> None:
    assert make_report(raised(RuntimeError("one\ntwo"))).words == "failed: RuntimeError: one"


def test_a_single_process_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make_report(raised(KeyError("a key"))).full_text().endswith("\nKeyError: 'a key'")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), "--recompute-granularity full"),
        (MemoryError(), "out of host memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
            "out of host memory",
        ),
        (RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed."), "--num-workers"),
    ],
    ids=["device", "python", "torch", "loader"],
)
def test_a_full_memory_is_answered_with_what_to_try(error: BaseException, words: str) -> None:
    report = make_report(raised(error))
    last = report.full_text().splitlines()[-1]
    assert words in last
    # Where a reader waited for its loader says nothing.
    assert ("Traceback" in report.full_text()) is ("loader" not in str(error).lower())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("remote process exited"), True),
        (dist.DistNetworkError("reset"), True),
        (RuntimeError("[/pytorch/third_party/gloo/pair.cc:5] Connection closed by peer"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("gloo"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
)
def test_which_errors_say_no_more_than_that_another_rank_did_not_answer(
    error: BaseException, expected: bool
) -> None:
    wrapped = KeyError("while handling")
    wrapped.__cause__ = error
    assert is_collective_error(error) is expected
    assert is_collective_error(wrapped) is expected


def test_a_timeout_names_its_flag_and_the_place() -> None:
    report = make_report(raised(RuntimeError("gloo: Timed out waiting 1000ms for recv")))
    assert "--distributed-timeout-minutes" in report.full_text()
    assert "Traceback" not in report.full_text()
    assert "It waited in" in report.full_text()


def test_a_report_without_a_text_says_the_words() -> None:
    assert ErrorReport("was stopped", ExitCode.TERMINATED).full_text() == (
        "pretrain_gpt.py: rank 2: was stopped"
    )
