"""Asynchronous saves of complete runs: kills at random moments, failing and slow disks.

`LD_PRELOAD` lets the system calls themselves fail or wait, as tests/e2e/faulty_disk.cpp describes.
"""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ds.checkpoint.metadata import find_damage, list_checkpoints, read_manifest, read_run
from megatron_ds.checkpoint.run_lock import LOCK
from megatron_ds.launch.exit_codes import ExitCode
from tests.e2e.runs import ENDLESS, Launcher, Run, Settings, checkpoint_differences, steps
from tests.e2e.test_checkpoint_faults import checkpoints_in
from tests.faults import FAILURE, build_faulty_disk
from tests.fork_server import ForkServer

RANKS = 2
SAVED = "successfully saved checkpoint"
SCHEDULE: Settings = {"global_batch_size": 8, "train_iters": 12, "save_interval": 4}
KILLS = 12
SAVES = 110
"""Saves of the run that is killed."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher whose processes have the faulty disk loaded."""
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(build_faulty_disk(folder)))
        server = ForkServer()
        yield Launcher(folder, server)
        server.close()


@pytest.fixture(scope="module")
def synchronous(
    launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run with synchronous saves, which is not interrupted."""
    run = tmp_path_factory.mktemp("synchronous") / "run"
    launcher.start({**base, **SCHEDULE, "save": run}, ranks=RANKS).succeed()
    return run


def assert_equal_checkpoints(run: Path, synchronous: Path, tags: set[str]) -> None:
    """The files of all ranks are equal byte by byte."""
    for tag in tags:
        files, expected = read_manifest(run / tag), read_manifest(synchronous / tag)
        assert len(expected) > 2
        assert {**files, "run.json": None} == {**expected, "run.json": None}, tag
        assert find_damage(run / tag) is None


def test_a_run_with_asynchronous_saves_is_the_same_and_resumes(
    launcher: Launcher, base: Settings, synchronous: Path, tmp_path: Path
) -> None:
    """It ends once its last checkpoint is complete, and is continued from one of its own."""
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "async_save": True}
    first = launcher.start({**settings, "exit_interval": 8}, ranks=RANKS).succeed()
    assert_equal_checkpoints(run, synchronous, {"global_step4", "global_step8"})
    assert first.count(SAVED) == 2
    assert first.count("written in the background") == 2  # the last save is synchronous
    output = launcher.start(settings, ranks=RANKS).succeed()
    assert f"loading checkpoint from {run} at iteration 8\n" in output
    assert steps(run) == steps(synchronous)
    assert_equal_checkpoints(run, synchronous, {"global_step12"})
    assert (run / "latest").read_text() == "global_step12"
    assert not list(run.glob(".*"))


CASES = {
    "full": ("write", errno.ENOSPC, 5000, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "failing": ("fsync", errno.EIO, 0, "mp_rank_00_model_states.pt"),
}


@pytest.mark.parametrize("on_save_error", ["continue", "exit"])
@pytest.mark.parametrize("case", CASES)
def test_a_failed_save_surfaces_after_a_step_and_costs_one_checkpoint(
    case: str,
    on_save_error: str,
    launcher: Launcher,
    base: Settings,
    synchronous: Path,
    tmp_path: Path,
) -> None:
    call, code, bytes, name = CASES[case]
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "async_save": True}
    settings["on_save_error"] = on_save_error
    part = f"/.incomplete-global_step8/{name}"
    fault = {"DISK_FAULT": f"{call}:{code}:{bytes}:{part}"}
    result = launcher.start(settings, ranks=RANKS, environment=fault).wait()
    rank = int("rank_1" in name)
    reason = f"rank {rank}: [Errno {code}] {os.strerror(code)}: '{run}{part}'"
    assert result.output.count(reason) == 1, result.output[-3000:]
    assert "Traceback" not in result.output
    if on_save_error == "exit":
        assert result.codes == (ExitCode.SAVE_FAILED,) * RANKS
        assert checkpoints_in(run) == {"global_step4"}
        assert (run / "latest").read_text() == "global_step4"
        launcher.start(settings, ranks=RANKS).succeed()
    else:
        assert result.codes == (0, 0)
        assert result.output.count("[save-skipped]") == 1
        assert checkpoints_in(run) == {"global_step4", "global_step12"}
    assert (run / "latest").read_text() == "global_step12"
    assert steps(run) == steps(synchronous)
    assert_equal_checkpoints(run, synchronous, {"global_step4", "global_step12"})


def test_training_continues_while_a_slow_disk_writes_and_a_stopped_run_waits_for_it(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """One rank, which prints everything in its order. Each write takes a fifth of a second."""
    run = tmp_path / "run"
    settings = {**base, "save": run, "async_save": True, "micro_batch_size": 4}
    settings |= {"train_iters": ENDLESS, "global_batch_size": 4, "save_interval": 5}
    slow = {"DISK_FAULT": "write:0:200000:/.incomplete-global_step"}
    started = launcher.start(settings, environment=slow)
    started.wait_until(lambda: "saving checkpoint at iteration      10" in started.output)
    os.kill(started.pids[0], signal.SIGTERM)
    result = started.wait()
    assert result.codes == (ExitCode.TERMINATED,)
    lines = [
        line
        for line in result.output.splitlines()
        if re.search(r"saving checkpoint|stalled|successfully saved|^ .*iteration +\d+/", line)
    ]
    first, stalled = lines.index(f"saving checkpoint at iteration       5 to {run}"), 1
    assert "stalled" in lines[first + stalled]
    assert all("iteration" in line and "/" in line for line in lines[first + 2 : first + 7])
    done = [line for line in lines if SAVED in line or "saving" in line]
    # They alternate: none begins before the one before it is complete.
    assert [SAVED in line for line in done] == [False, True] * (len(done) // 2)
    saved = [
        int(iteration) for iteration in re.findall(rf"{SAVED} at iteration +(\d+)", "".join(lines))
    ]
    assert saved[:2] == [5, 10]
    assert [read_run(path).iteration for path in list_checkpoints(run)] == saved[::-1]
    assert (run / "latest").read_text() == f"global_step{saved[-1]}"
    assert not list(run.glob(".*"))


def test_an_error_of_the_run_ends_a_save_in_progress(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The folder is then free: nothing writes to it, and the checkpoint stays incomplete."""
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "async_save": True}
    slow = {"DISK_FAULT": "write:0:300000:/.incomplete-global_step"}
    result = launcher.start(
        settings, ranks=RANKS, environment=slow, fault="iteration:6:fail"
    ).wait()
    assert result.codes == (1, 1)
    assert result.output.count(FAILURE) > 0
    assert not (run / LOCK).exists()
    assert list_checkpoints(run) == []
    assert not (run / "latest").exists()


def kill_at_random(run: Run, draw: random.Random, saves: int) -> str:
    """Kills a rank or all of them after so many saves have begun; returns what was done."""
    victim = draw.choice([0, 1, None])
    delay = draw.uniform(0.0, 0.05)
    run.wait_until(lambda: run.output.count("saving checkpoint at") >= saves, 0.0005)
    time.sleep(delay)
    if victim is None:
        run.kill()
    else:
        os.kill(run.pids[victim], signal.SIGKILL)
        assert run.wait().codes[victim] == -signal.SIGKILL
    return f"rank {victim}, {delay:.4f} s after the beginning of save {saves}"


def check_after_kill(run: Path, full: Path) -> int:
    """The newest complete checkpoint has the states of the uninterrupted run; its iteration."""
    complete = [path for path in list_checkpoints(run) if find_damage(path) is None]
    # Whatever has this name is complete.
    assert complete == list_checkpoints(run)
    if not complete:
        return 0
    newest = complete[0]
    assert checkpoint_differences(newest, full / newest.name) == []
    latest = run / "latest"
    if latest.exists():
        assert run / latest.read_text() in complete
    return read_run(newest).iteration


def test_kills_during_asynchronous_saves_lose_no_checkpoint_and_change_no_bit(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """A run that saves after every step is killed at random moments, its launcher once."""
    full, run = tmp_path / "full", tmp_path / "run"
    schedule = {"global_batch_size": 4, "train_iters": SAVES, "save_interval": 1}
    settings = {**base, **schedule, "save": full}
    launcher.start(settings, ranks=RANKS).succeed()
    settings |= {"save": run, "load": run, "async_save": True, "keep_last": 3}
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    print(f"seed {seed}")
    newest = interrupted = begun = 0
    for _ in range(KILLS):
        started = launcher.start(settings, ranks=RANKS)
        print(kill_at_random(started, draw, draw.randint(1, 2 * SAVES // KILLS - 4)))
        if newest:
            assert f"loading checkpoint from {run} at iteration {newest}\n" in started.output
        assert "[checkpoint-skipped]" not in started.output
        begun += started.output.count("saving checkpoint at")
        interrupted += bool(list(run.glob(".incomplete-*")))
        newest = check_after_kill(run, full)
    assert interrupted > 0  # otherwise nothing was tested

    launched, _ = launcher.launch("torchrun", settings)
    launched.wait_until(lambda: "saving checkpoint at" in launched.output)
    os.kill(launched.pids[0], signal.SIGKILL)
    launched.wait()
    launcher.wait_until_all_ended()
    begun += launched.output.count("saving checkpoint at")
    assert check_after_kill(run, full) >= newest
    last = launcher.start(settings, ranks=RANKS).succeed()
    assert begun + last.count("saving checkpoint at") >= 100
    assert steps(run) == steps(full)
    assert checkpoint_differences(full / f"global_step{SAVES}", run / f"global_step{SAVES}") == []
    assert len(list_checkpoints(run)) == settings["keep_last"]
    assert not list(run.glob(".*"))
