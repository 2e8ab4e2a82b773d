"""A rank that dies or hangs ends its peers; the message names the rank, the cause and a remedy.

Claim (stopping): a rank that dies or hangs ends the other ranks, which name it and the reason
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.e2e.runs import (
    Launcher,
    Settings,
    assert_two_ranks,
    has_trained,
    losses,
    shared_memory_of,
)
from tests.e2e.test_signals import linux
from tests.faults import FAILURE, HANG_MESSAGE
from tests.problems import printed_codes
from tests.proofs.cases import with_proofs


@linux
@pytest.mark.parametrize(
    ("name", "statuses"),
    # DeepSpeed's launcher polls once a second and returns the first status it finds: usually the
    # victim's, 256 - 9, and on a busy machine its peer's.
    [pytest.param("deepspeed", (247, 4), marks=pytest.mark.proof), ("torchrun", (1,))],
)
def test_killed_rank_of_a_launcher(
    name: str,
    statuses: tuple[int, ...],
    launcher: Launcher,
    endless: Settings,
    endless_losses: list[float],
    tmp_path: Path,
) -> None:
    """In a terminal. Until then the run is that of two ranks without a launcher.

    Claim (command-line): `deepspeed` and `torchrun` start a run, with the losses of the same ranks
    without a launcher

    Claim (logging): log lines have the format of the Megatron-DeepSpeed forks, and a short form on
    a terminal
    """
    settings = {**endless, "num_workers": 1}
    run, port = launcher.launch(name, settings, terminal=True)
    run.wait_until(has_trained(tmp_path))
    victim = launcher.process_of_rank(1)
    os.kill(victim, signal.SIGKILL)
    result = run.wait()
    launcher.wait_until_all_ended()
    assert result.codes[0] in statuses
    reports = [
        line for line in result.output.splitlines() if "rank 0: stopping because rank 1" in line
    ]
    assert len(reports) == 1, result.output
    assert f"(process {victim})" in reports[0]
    assert "signal 9" in reports[0]
    assert "out of host memory" in reports[0]
    assert "--num-workers" in reports[0]
    assert_two_ranks(result.output, settings, short=True)
    assert losses(tmp_path)[: len(endless_losses)] == endless_losses
    # torchrun prints a traceback of its own.
    assert result.output.count("Traceback") == (name == "torchrun")
    assert shared_memory_of(port) == []


@pytest.mark.parametrize("victim", with_proofs([0, 1], [1]))
def test_killed_rank_without_a_launcher(
    victim: int, launcher: Launcher, endless: Settings, tmp_path: Path
) -> None:
    """Rank 0 hosts the store through which the ranks communicate."""
    run = launcher.start(endless, ranks=2)
    run.wait_until(has_trained(tmp_path))
    os.kill(run.pids[victim], signal.SIGKILL)
    result = run.wait()
    assert result.codes == ((-9, 4) if victim == 0 else (4, -9))
    pid = run.pids[victim]
    assert f"rank {1 - victim}: stopping because rank {victim} (process {pid})" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("culprit", with_proofs([0, 1], [0]))
def test_exception_in_one_rank_is_reported_once_and_ends_all(
    culprit: int, launcher: Launcher, endless: Settings
) -> None:
    result = launcher.start(endless, ranks=2, fault="iteration:3:fail", fault_rank=culprit).wait()
    assert result.codes == ((1, 4) if culprit == 0 else (4, 1))
    assert result.output.count("Traceback") == 1
    cause = f"failed: ZeroDivisionError: {FAILURE}"
    assert f"faults.py: rank {culprit}: {cause}\n" in result.output
    other = f"faults.py: rank {1 - culprit}: stopping because rank {culprit} {cause} [peer-lost]\n"
    assert result.output.count(other) == 1


def test_out_of_memory_names_flags_that_help(launcher: Launcher, base: Settings) -> None:
    settings = {**base, "train_iters": 2}
    result = launcher.start(settings, fault="iteration:2:out-of-memory").wait()
    assert result.codes == (1,)
    last = result.output[result.output.index("out of device memory") :]
    on_a_resume, in_a_new_run = last.split("In a new run only:")
    for flag in ("--micro-batch-size", "--recompute-granularity", "--cpu-optimizer"):
        assert flag in on_a_resume
    for flag in ("--zero-stage", "--tensor-model-parallel-size"):
        assert flag in in_a_new_run


def test_peer_ends_a_rank_that_hangs_in_python(launcher: Launcher, endless: Settings) -> None:
    """None of its own collectives would ever fail."""
    run = launcher.start(endless, ranks=2, fault="iteration:2:hang", fault_rank=0)
    run.wait_until(lambda: HANG_MESSAGE in run.output)
    os.kill(run.pids[1], signal.SIGKILL)
    result = run.wait()
    assert result.codes == (4, -9)
    assert "rank 0: stopping because rank 1 " in result.output


def test_rank_whose_port_belongs_to_another_program_ends(
    launcher: Launcher, base: Settings
) -> None:
    """The other program accepts connections, and says nothing.

    Claim (stopping): a rank whose port belongs to another program says where it waits, and ends
    after `--distributed-timeout-minutes`
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        rank = {f"OMPI_COMM_WORLD_{name}": n for name, n in zip(names, "1202", strict=True)}
        rank["MASTER_PORT"] = str(server.getsockname()[1])
        settings = {**base, "train_iters": 1, "distributed_timeout_minutes": 0.05}
        result = launcher.start(settings, per_rank=[rank]).wait()
    assert result.codes == (1,)
    assert "waiting for the 2 processes of the run" in result.output
    assert printed_codes(result.output) == ["rendezvous-failed"]
    assert result.output.count(f"127.0.0.1:{rank['MASTER_PORT']}") == 2
    assert "Traceback" not in result.output


def test_timeout_of_a_collective_names_the_flag(launcher: Launcher, endless: Settings) -> None:
    run = launcher.start(endless, ranks=2, fault="iteration:2:hang-past-timeout", fault_rank=0)
    result = run.wait()
    assert result.codes == (4, 1)
    assert "rank 1: a collective timed out" in result.output
    assert "--distributed-timeout-minutes" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("victim", with_proofs([0, 1], [1]))
def test_stopped_rank_ends_the_run_with_the_stacks_of_all_others(
    victim: int, launcher: Launcher, endless: Settings, tmp_path: Path
) -> None:
    """Rank 0 hosts the store through which the ranks communicate.

    Claim (logging): `--log-dir` has a file of every rank, with why it ended

    Claim (stopping): with `--hang-timeout`, a rank that is stopped (SIGSTOP) ends the run with
    status 6, the stacks and last collectives of the others, and itself; also the one that has the
    store
    """
    settings = {**endless, "hang_timeout": 5, "log_dir": tmp_path / "logs"}
    run = launcher.start(settings, ranks=2, fault="iteration:3:stop", fault_rank=victim)
    result = run.wait()
    other = 1 - victim
    assert result.codes == ((-9, 6) if victim == 0 else (6, -9))
    (line,) = [line for line in result.output.splitlines() if "[run-hung]" in line]
    assert f"rank {other}: no progress within 5 s (--hang-timeout) after iteration 2: " in line
    assert f"rank {victim} (process {run.pids[victim]}) is stopped (SIGSTOP)" in line
    last = rf"the last collective of rank {other} is all\w+ number \d+ of ranks 0, 1, "
    assert re.search(last, line)
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert [line in log for log in logs] == [other == 0, other == 1]
    assert [" iteration        2/" in log for log in logs] == [True, False]
    for rank, log in enumerate(logs):
        assert f" rank {rank} of 2 on {socket.gethostname()}, process {run.pids[rank]}: " in log
    (report,) = (tmp_path / "logs").glob("hang-rank*.txt")
    assert report.name == f"hang-rank{other}.txt"
    text = report.read_text()
    assert "in train_step" in text
    assert "last iteration that was completed: 2\n" in text


@linux
@pytest.mark.proof
def test_a_run_that_was_suspended_as_a_whole_continues(
    launcher: Launcher, endless: Settings, tmp_path: Path
) -> None:
    """As by a batch system, for longer than --hang-timeout."""
    settings = {**endless, "hang_timeout": 6, "exit_interval": 20}
    run = launcher.start(settings, ranks=2, fault="iteration:1+:pause")
    run.wait_until(has_trained(tmp_path))
    os.killpg(run.pids[0], signal.SIGSTOP)
    time.sleep(12)
    os.killpg(run.pids[0], signal.SIGCONT)
    output = run.succeed()
    assert printed_codes(output) == []
    assert len(losses(tmp_path)) == 20
