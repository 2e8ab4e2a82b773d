"""A signal to any process of a run, at any time, stops the run cleanly.

It prints a message, exits with the documented status, saves its state, and leaves no process, port
or shared memory behind.

Claim (stopping): a stop request, by a signal or launcher loss, at any moment, ends the run in order
with its state saved
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import (
    DEADLINE,
    ENDLESS,
    PRETRAIN,
    Launcher,
    Settings,
    assert_two_ranks,
    evaluations,
    has_trained,
    losses,
    shared_memory_of,
    steps,
    to_flags,
)
from tests.faults import HANG_MESSAGE
from tests.proofs.cases import with_proofs

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds ranks in /proc")


def assert_resumes(launcher: Launcher, settings: Settings, save: Path, *, ranks: int = 2) -> None:
    """The run saved one checkpoint, of its last step, and another run resumes from it."""
    last = len(losses(save))
    assert sorted(path.name for path in save.glob("global_step*")) == [f"global_step{last}"]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(last)
    continued = {**settings, "load": save, "exit_interval": last + 1}
    launcher.start(continued, ranks=ranks).succeed()
    assert [step["iteration"] for step in steps(save)] == list(range(1, last + 2))


@linux
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        # The wrapper is killed by the signal without forwarding it; its ranks notice.
        ("deepspeed", -signal.SIGTERM, "exiting program since its launcher is gone."),
        pytest.param(
            "torchrun", 1, "exiting program after receiving SIGTERM.", marks=pytest.mark.proof
        ),
    ],
)
def test_sigterm_to_the_launcher(
    name: str,
    status: int,
    words: str,
    launcher: Launcher,
    endless: Settings,
    endless_losses: list[float],
    tmp_path: Path,
) -> None:
    """Until then the run is that of two ranks without a launcher.

    Claim (command-line): `deepspeed` and `torchrun` start a run, with the losses of the same ranks
    without a launcher

    Claim (logging): log lines have the format of the Megatron-DeepSpeed forks, and a short form on
    a terminal
    """
    settings = {**endless, "num_workers": 1}
    run, port = launcher.launch(name, settings)
    run.wait_until(has_trained(tmp_path))
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.wait().codes == (status,)
    launcher.wait_until_all_ended()
    assert run.output.count(words) == 1, run.output
    assert shared_memory_of(port) == []
    assert_two_ranks(run.output, settings, short=False)
    assert losses(tmp_path)[: len(endless_losses)] == endless_losses
    assert_resumes(launcher, settings, tmp_path)


@pytest.mark.parametrize("rank", with_proofs([None, 0, 1], [0]))
def test_signal_to_a_rank_or_all_stops_all_with_a_save(
    rank: int | None, launcher: Launcher, endless: Settings, tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to all processes, including the data loaders."""
    settings = {**endless, "num_workers": 1}
    run = launcher.start(settings, ranks=2)
    run.wait_until(has_trained(tmp_path))
    if rank is None:
        os.killpg(run.pids[0], signal.SIGINT)
    else:
        os.kill(run.pids[rank], signal.SIGTERM)
    result = run.wait()
    assert result.codes == ((130, 130) if rank is None else (143, 143))
    assert ("received Ctrl-C: saving a checkpoint" in result.output) == (rank is None)
    name = "SIGINT" if rank is None else "SIGTERM"
    assert f"exiting program after receiving {name}." in result.output
    assert "Traceback" not in result.output
    assert_resumes(launcher, {**settings, "num_workers": 0}, tmp_path)


def test_second_sigint_ends_a_run_that_hangs(launcher: Launcher, base: Settings) -> None:
    """The peer rank waits in a collective, which no signal interrupts."""
    settings = {**base, "train_iters": ENDLESS}
    run = launcher.start(settings, ranks=2, fault="iteration:2:hang", fault_rank=0)
    run.wait_until(lambda: HANG_MESSAGE in run.output)

    end = time.monotonic() + DEADLINE
    while "was ended by a second Ctrl-C" not in run.output and time.monotonic() < end:
        os.killpg(run.pids[0], signal.SIGINT)
        time.sleep(0.2)
    result = run.wait()
    assert result.codes == (130, 130)
    assert "received Ctrl-C: exiting after this step" in result.output


def test_signal_before_the_imports(launcher: Launcher, base: Settings) -> None:
    """The handler is installed before anything heavy is imported."""
    flags = to_flags({**base, "train_iters": 1})
    run = launcher.command([sys.executable, PRETRAIN, *flags])
    run.wait_until(lambda: has_handler(run.pids[0], signal.SIGTERM))
    os.kill(run.pids[0], signal.SIGTERM)
    result = run.wait()
    assert result.codes == (143,)
    said = "pretrain_gpt.py: was stopped by SIGTERM before training started"
    assert result.output.startswith(said)


WRAPPING = """
import os
import signal
from megatron_ds.launch.process.lifecycle import process_lifecycle

class Attribute:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

with process_lifecycle():
    class Owner:
        attribute = Attribute()
"""
"""A program that gets a signal where Python 3.11 turns every exception into a RuntimeError."""


def test_signal_inside_of_an_import_that_wraps_exceptions(launcher: Launcher) -> None:
    result = launcher.command([sys.executable, "-c", WRAPPING]).wait()
    assert result.codes == (143,)
    assert "was stopped by SIGTERM before training started" in result.output


def has_handler(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed a handler for a signal."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("reads handlers from /proc")
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("signalled", with_proofs([0, 1], [1]))
def test_signal_to_one_rank_during_startup_ends_all(
    signalled: int, launcher: Launcher, base: Settings
) -> None:
    """Rank 0 hangs in Python, rank 1 waits for it in a collective."""
    settings = {**base, "train_iters": 1}
    run = launcher.start(settings, ranks=2, fault="build-engine:1:hang", fault_rank=0)
    run.wait_until(lambda: HANG_MESSAGE in run.output)
    os.kill(run.pids[signalled], signal.SIGTERM)
    result = run.wait()
    assert result.codes == (143, 143)
    said = f"rank {signalled}: was stopped by SIGTERM before training started"
    assert result.output.count(said) == 1
    other = f"rank {1 - signalled}: stopping because rank {signalled} was stopped by SIGTERM"
    assert result.output.count(other) == 1
    assert "Traceback" not in result.output


def test_signal_during_a_save_finishes_the_save(
    launcher: Launcher, endless: Settings, tmp_path: Path
) -> None:
    settings = {**endless, "save_interval": 2}
    run = launcher.start(settings, ranks=2, fault="after-engine-save:2:terminate", fault_rank=1)
    result = run.wait()
    assert result.codes == (143, 143)
    assert len(losses(tmp_path)) == 2
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert result.output.count("saving checkpoint") == 1


@pytest.mark.parametrize(
    ("micro_batch", "unread", "last"),
    with_proofs([(2, 5, 2), (14, 17, 4)], [(14, 17, 4)]),
    ids=["during training", "at the end"],
)
def test_signal_interrupts_an_evaluation_and_saves(
    micro_batch: int, unread: int, last: int, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Evaluations have six micro-batches per rank, in calls of four, after iteration 2, 4 and at
    the end."""
    settings = {**base, "train_iters": 4, "eval_interval": 2, "eval_iters": 6, "save": tmp_path}
    fault = f"evaluation:{micro_batch}:terminate"
    result = launcher.start(settings, ranks=2, fault=fault, fault_rank=1).wait()
    assert result.codes == (143, 143)
    assert len(losses(tmp_path)) == last
    assert (tmp_path / "latest").read_text() == f"global_step{last}"
    assert len(evaluations(tmp_path)) == micro_batch // 6
    assert result.output.count(f"evaluation micro-batch {micro_batch}\n") == 2
    assert f"evaluation micro-batch {unread}\n" not in result.output
