"""A run that is asked to end, whoever is asked and whenever, ends in order: in words, with the
documented status, with its state saved, without a process, a port or shared memory left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import (
    DEADLINE,
    PRETRAIN,
    Launcher,
    Run,
    Settings,
    evaluations,
    free_port,
    losses,
    shared_memory_of,
    steps,
    to_flags,
)
from tests.faults import HANG_MESSAGE

PROGRAMS = Path(sys.executable).parent
ENDLESS = 100_000

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds ranks in /proc")


def launched(launcher: Launcher, name: str, settings: Settings) -> tuple[Run, int]:
    """A run of two ranks by a launcher, and its port."""
    port = free_port()
    number = {"deepspeed": "--num_gpus", "torchrun": "--nproc_per_node"}[name]
    words = [PROGRAMS / name, number, 2, "--master_port", port, PRETRAIN, *to_flags(settings)]
    return launcher.command([str(word) for word in words]), port


def trained(run: Path, iterations: int = 2) -> Callable[[], bool]:
    def reached() -> bool:
        file = run / "metrics.jsonl"
        return file.exists() and file.read_text().count("\n") >= iterations

    return reached


def goes_on(launcher: Launcher, settings: Settings, save: Path, *, ranks: int = 2) -> None:
    """The run left one checkpoint, of the step it ended with, and another one continues it."""
    last = len(losses(save))
    assert sorted(path.name for path in save.glob("global_step*")) == [f"global_step{last}"]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(last)
    more = {**settings, "load": save, "exit_interval": last + 1}
    launcher.start(more, ranks=ranks).succeed()
    assert [step["iteration"] for step in steps(save)] == list(range(1, last + 2))


@linux
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        # The wrapper dies of the signal and passes nothing on; its ranks notice.
        ("deepspeed", -signal.SIGTERM, "exiting program since its launcher is gone."),
        ("torchrun", 1, "exiting program after receiving SIGTERM."),
    ],
)
def test_sigterm_to_the_launcher(
    name: str, status: int, words: str, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "num_workers": 1, "train_iters": ENDLESS, "save": tmp_path}
    run, port = launched(launcher, name, settings)
    run.wait_until(trained(tmp_path))
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.wait().codes == (status,)
    launcher.wait_until_all_ended()
    assert run.output.count(words) == 1, run.output
    assert shared_memory_of(port) == []
    goes_on(launcher, settings, tmp_path)


def test_sigint_to_all_processes(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    """As the terminal does it: the loaders get it too."""
    settings = {**base, "num_workers": 1, "train_iters": ENDLESS, "save": tmp_path}
    run = launcher.start(settings, ranks=2)
    run.wait_until(trained(tmp_path))
    os.killpg(run.pids[0], signal.SIGINT)
    result = run.wait()
    assert result.codes == (130, 130)
    assert "exiting program after receiving SIGINT." in result.output
    assert "Traceback" not in result.output
    goes_on(launcher, {**settings, "num_workers": 0}, tmp_path)


def test_a_further_sigint_ends_a_run_that_hangs(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The other rank waits in a collective, which no signal gets it out of."""
    settings = {**base, "train_iters": ENDLESS, "save": tmp_path}
    run = launcher.start(settings, ranks=2, fault="iteration:2:hang", fault_rank=0)
    run.wait_until(lambda: HANG_MESSAGE in run.output)

    end = time.monotonic() + DEADLINE
    while "was ended by a second SIGINT" not in run.output and time.monotonic() < end:
        os.killpg(run.pids[0], signal.SIGINT)
        time.sleep(0.2)
    result = run.wait()
    assert result.codes == (130, 130)
    assert "received SIGINT: saving the state" in result.output


def test_a_signal_before_the_imports(launcher: Launcher, base: Settings) -> None:
    """As soon as the process listens at all."""
    flags = to_flags({**base, "train_iters": 1})
    run = launcher.command([sys.executable, str(PRETRAIN), *flags])
    run.wait_until(lambda: catches(run.pids[0], signal.SIGTERM))
    os.kill(run.pids[0], signal.SIGTERM)
    result = run.wait()
    assert result.codes == (143,)
    said = "pretrain_gpt.py: was stopped by SIGTERM before the training began"
    assert result.output.startswith(said)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("looks up handlers in /proc")
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_rank_at_the_start_ends_all(
    signalled: int, launcher: Launcher, base: Settings
) -> None:
    """Rank 0 hangs in Python, rank 1 in a collective that waits for it."""
    settings = {**base, "train_iters": 1}
    run = launcher.start(settings, ranks=2, fault="build-engine:1:hang", fault_rank=0)
    run.wait_until(lambda: HANG_MESSAGE in run.output)
    os.kill(run.pids[signalled], signal.SIGTERM)
    result = run.wait()
    assert result.codes == (143, 143)
    said = f"rank {signalled}: was stopped by SIGTERM before the training began"
    assert result.output.count(said) == 1
    other = f"rank {1 - signalled}: ends, because rank {signalled} was stopped by SIGTERM"
    assert result.output.count(other) == 1
    assert "Traceback" not in result.output


def test_a_save_is_finished_and_no_step_follows(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "train_iters": ENDLESS, "save_interval": 2, "save": tmp_path}
    run = launcher.start(settings, ranks=2, fault="after-engine-save:2:terminate", fault_rank=1)
    result = run.wait()
    assert result.codes == (143, 143)
    assert len(losses(tmp_path)) == 2
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert result.output.count("saving checkpoint") == 1


@pytest.mark.parametrize(
    ("micro_batch", "unread", "last"), [(2, 5, 2), (14, 17, 4)], ids=["on the way", "at the end"]
)
def test_an_evaluation_is_broken_off_and_the_state_saved(
    micro_batch: int,
    unread: int,
    last: int,
    launcher: Launcher,
    base: Settings,
    tmp_path: Path,
) -> None:
    """Evaluations of six micro-batches on each rank, in calls of four, after iteration 2, 4 and at
    the end."""
    settings = {**base, "train_iters": 4, "eval_interval": 2, "eval_iters": 6, "save": tmp_path}
    fault = f"evaluation:{micro_batch}:terminate"
    run = launcher.start(settings, ranks=2, fault=fault, fault_rank=1)
    result = run.wait()
    assert result.codes == (143, 143)
    assert len(losses(tmp_path)) == last
    assert (tmp_path / "latest").read_text() == f"global_step{last}"
    assert len(evaluations(tmp_path)) == micro_batch // 6
    assert result.output.count(f"evaluation micro-batch {micro_batch}\n") == 2
    assert f"evaluation micro-batch {unread}\n" not in result.output


def test_a_kill_switch_that_is_there_already_lets_nothing_begin(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    switch = tmp_path / "switch"
    switch.touch()
    settings = {**base, "train_iters": 3, "save": tmp_path, "kill_switch_path": switch}
    output = launcher.start(settings).succeed()
    assert output.endswith(f"\nDetected kill switch at {switch}. Exiting, iteration=0\n")
    assert " iteration " not in output
