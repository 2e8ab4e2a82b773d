"""Messages of the errors that end a run."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.launch.exit_codes import ExitCode, RunAborted, SettingsRejected
from megatron_ds.launch.process.error_report import is_collective_error, make_report
from tests.problems import printed_codes


@pytest.fixture(autouse=True)
def _rank_2_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["folder/pretrain_gpt.py"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (UserError(Problem.of("a-code", "a message")), ExitCode.ERROR, "a message [a-code]"),
        (RunAborted("full disk", ExitCode.SAVE_FAILED), ExitCode.SAVE_FAILED, "full disk"),
        (SystemExit(7), ExitCode.ERROR, "ended with status 7"),
    ],
)
def test_expected_end_is_reported_without_traceback(
    error: BaseException, code: ExitCode, shown: str
) -> None:
    report = make_report(raised(error))
    assert report.code == code
    assert report.full_text() == f"pretrain_gpt.py: rank 2: {shown}"


def test_problems_are_told_to_other_hosts_one_by_one() -> None:
    several = UserError(Problem.of("a", "one\nof two lines"), Problem.of("b", "two"))
    assert make_report(raised(several)).problems == ["one\nof two lines [a]", "two [b]"]
    rejected = make_report(raised(SettingsRejected("a title: x", ["x"])))
    assert (rejected.problems, rejected.code) == (["x"], ExitCode.BAD_SETTINGS)


def test_a_run_on_several_hosts_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    text = make_report(raised(UserError(Problem.of("a-code", "text")))).full_text()
    assert text == "pretrain_gpt.py: rank 2 on node7: text [a-code]"


def test_unexpected_error_keeps_its_traceback() -> None:
    report = make_report(raised(KeyError("a key")))
    assert report.code == ExitCode.ERROR
    assert report.full_text().startswith("Traceback (most recent call last):\n")
    assert report.full_text().endswith("\npretrain_gpt.py: rank 2: failed: KeyError: 'a key'")
    assert report.summary == "failed: KeyError: 'a key'"


def test_summary_is_the_first_line_of_the_message() -> None:
    assert make_report(raised(RuntimeError("one\ntwo"))).summary == "failed: RuntimeError: one"


def test_single_process_prints_only_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make_report(raised(KeyError("a key"))).full_text().endswith("\nKeyError: 'a key'")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), "out-of-device-memory"),
        (MemoryError(), "out-of-host-memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "out-of-host-memory",
        ),
        (RuntimeError("data loader process (pid 5) was killed by signal 9"), "loader-process-lost"),
        (
            RuntimeError(f"data loader process (pid 5) was killed by signal {int(signal.SIGBUS)}"),
            "token-file-changed",
        ),
        (
            dist.DistBackendError("Duplicate GPU detected : rank 1 and rank 0 both on device 50"),
            "device-of-several-processes",
        ),
    ],
    ids=["device", "python", "torch", "loader", "truncated file: loader", "shared device"],
)
def test_error_comes_with_a_hint(error: BaseException, code: str) -> None:
    report = make_report(raised(error))
    assert printed_codes(report.full_text()) == [code]
    helps = ("--micro-batch-size", "--recompute-granularity", "--zero-stage", "expandable_segments")
    assert all(each in report.text for each in helps) is (code == "out-of-device-memory")
    # Where the main process waited for its loader is of no interest.
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
def test_collective_errors_are_recognized(error: BaseException, expected: bool) -> None:
    wrapped = KeyError("while handling")
    wrapped.__cause__ = error
    assert is_collective_error(error) is expected
    assert is_collective_error(wrapped) is expected


def test_collective_timeout_is_reported_with_its_location() -> None:
    report = make_report(raised(RuntimeError("gloo: Timed out waiting 1000ms for recv")))
    assert printed_codes(report.full_text()) == ["collective-timed-out"]
    assert "[" not in report.summary  # which the other ranks show with a code of their own
    assert "Traceback" not in report.full_text()


@pytest.mark.parametrize(
    "error",
    [
        dist.DistStoreError("Timed out after 3 seconds waiting for clients. 1/2 clients joined."),
        dist.DistNetworkError("The client socket has timed out after 2000ms while trying to ..."),
        dist.DistNetworkError("The client socket has failed to connect to any network address"),
        dist.DistNetworkError(
            "The server socket has failed to listen on any local network address"
        ),
    ],
)
def test_processes_that_do_not_meet_are_reported_with_the_address(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "2345")
    text = make_report(raised(error)).full_text()
    assert printed_codes(text) == ["rendezvous-failed"]
    assert "node1:2345" in text
    assert str(error).rstrip(".") in text
    assert "Traceback" not in text
