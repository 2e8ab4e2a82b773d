"""A disk that becomes full, fails or is slow during a save, on one rank or on all.

The run reports it, keeps the older checkpoint, removes the partial one, and continues or exits as
--on-save-error says. faulty_disk.cpp lets the system calls themselves fail or wait.

Claim (checkpoints): a full or failing disk costs one checkpoint, on one rank or on all, and no rank
hangs
"""

from __future__ import annotations

import errno
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ds.checkpoint.folders.run_lock import LOCK
from megatron_ds.checkpoint.metadata import check_names, list_checkpoints, read_run
from megatron_ds.launch.exit_codes import ExitCode
from tests.e2e.runs import (
    ENDLESS,
    RANKS,
    SCHEDULE,
    Launcher,
    Settings,
    checkpoint_differences,
    steps,
)
from tests.faults import FAILURE
from tests.problems import printed_codes
from tests.proofs.cases import with_proofs

SAVED = "successfully saved checkpoint"


def checkpoints_in(run: Path) -> set[str]:
    """Names of all folders, including hidden ones, except the index cache."""
    return {path.name for path in run.iterdir() if path.is_dir()} - {"index-cache"}


@pytest.fixture(scope="module")
def with_zero3(
    launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run with ZeRO 3 on a disk without faults."""
    folder = tmp_path_factory.mktemp("zero3") / "run"
    launcher.start({**base, **SCHEDULE, "zero_stage": 3, "save": folder}, ranks=RANKS).succeed()
    return folder


@dataclass(frozen=True)
class Case:
    """A disk on which the save of iteration 4 fails, and what the run is told to do then."""

    rank: int
    """Rank that reports the error."""
    name: str
    """File, or its beginning, that cannot be written. Empty: every file, on all ranks."""
    bytes: int = 0
    """How many fit on a full disk."""
    call: str = "write"
    async_save: bool = False
    exits: bool = False
    zero_stage: int = 1

    @property
    def code(self) -> int:
        return errno.ENOSPC if self.call == "write" else errno.EIO


MODEL = "mp_rank_00_model_states.pt"
MOMENTS = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
ASYNC = {
    "full": Case(1, MOMENTS, 5000, async_save=True),
    "full, exit": Case(1, MOMENTS, 5000, async_save=True, exits=True),
    "failing": Case(0, MODEL, call="fsync", async_save=True),
    "failing, exit": Case(0, MODEL, call="fsync", async_save=True, exits=True),
}
CASES = {
    "full on the second rank": Case(1, MOMENTS, 5000),
    "full on all ranks": Case(0, "", 20000),
    "failing, exit": Case(0, MODEL, call="fsync", exits=True),
    "full on the first rank, ZeRO 3": Case(
        0, "zero_pp_rank_0_mp_rank_00_model_states.pt", zero_stage=3
    ),
    "full on the second rank, ZeRO 3": Case(1, MOMENTS[:-3], 99, zero_stage=3),
    **{f"asynchronous: {name}": case for name, case in ASYNC.items()},
}
PROOFS = {name for name in CASES if "ZeRO 3" in name} | {
    "full on the second rank",
    "full on all ranks",
    "asynchronous: full, exit",
    "asynchronous: failing",
    "asynchronous: failing, exit",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name in PROOFS)) for name in CASES]
)
def test_a_full_or_failing_disk_costs_one_checkpoint(
    name: str,
    launcher: Launcher,
    base: Settings,
    uninterrupted: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """The run continues, or exits and is resumed; it ends as on a disk without faults.

    Claim (checkpoints): a full or failing disk of an asynchronous save is reported after a step,
    and costs one checkpoint
    """
    case = CASES[name]
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "zero_stage": case.zero_stage}
    settings |= {"async_save": case.async_save}
    settings |= {"on_save_error": "exit"} if case.exits else {}
    part = f"/.incomplete-global_step4-*/{case.name}"
    fault = f"{case.call}:{case.code}:{case.bytes}:{part}"
    result = launcher.start(settings, ranks=RANKS, disk_fault=fault).wait()
    reason = re.escape(f"rank {case.rank}: [Errno {case.code}] {os.strerror(case.code)}: '{run}")
    reason += re.escape(part).replace(r"\*", "[0-9a-f]+")
    assert len(re.findall(reason, result.output)) == 1, result.output[-3000:]
    assert "Traceback" not in result.output
    expected = {"global_step2", "global_step6"}
    if case.exits:
        assert result.codes == (ExitCode.SAVE_FAILED,) * RANKS
        assert result.output.count("[save-failed]") == 1
        assert checkpoints_in(run) == {"global_step2"}
        assert (run / "latest").read_text() == "global_step2"
        output = launcher.start(settings, ranks=RANKS).succeed()
        assert f"loading checkpoint from {run} at iteration 2\n" in output
        expected.add("global_step4")
    else:
        assert result.codes == (0, 0)
        assert result.output.count("[save-skipped]") == 1
    assert checkpoints_in(run) == expected
    assert (run / "latest").read_text() == "global_step6"
    whole = request.getfixturevalue("with_zero3") if case.zero_stage == 3 else uninterrupted
    assert steps(run) == steps(whole)
    for tag in expected:
        assert check_names(run / tag) is None
        assert not checkpoint_differences(whole / tag, run / tag)


@pytest.mark.parametrize("async_save", with_proofs([False, True], [False]))
def test_a_folder_that_is_removed_during_a_save_is_created_by_the_next_one(
    async_save: bool, launcher: Launcher, base: Settings, uninterrupted: Path, tmp_path: Path
) -> None:
    """Claim (checkpoints): a `--save` folder that is removed during a save costs the checkpoints in
    it: the next save creates it, and `metrics.jsonl` continues"""
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "async_save": async_save}
    fault = "before-rename:4:remove-folder"
    result = launcher.start(settings, ranks=RANKS, fault=fault).wait()
    assert result.codes == (0, 0), result.output[-3000:]
    assert printed_codes(result.output).count("save-skipped") == 1
    assert "Traceback" not in result.output
    assert checkpoints_in(run) == {"global_step6"}
    assert not checkpoint_differences(uninterrupted / "global_step6", run / "global_step6")
    assert (run / "latest").read_text() == "global_step6"
    # In the background, all steps may have been recorded before the removal.
    assert steps(run)[-1:] == steps(uninterrupted)[-1:] or async_save
    assert not (run / LOCK).exists()


def test_a_run_whose_last_checkpoint_cannot_be_saved_fails(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The disk becomes full during the second checkpoint and stays full."""
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run}
    fault = f"write:{errno.ENOSPC}:400000:{run}/"
    result = launcher.start(settings, ranks=RANKS, disk_fault=fault).wait()
    assert result.codes == (ExitCode.SAVE_FAILED,) * RANKS, result.output[-3000:]
    assert result.output.count("[save-skipped]") == 1
    assert result.output.count("[save-failed]") == 1
    assert "Traceback" not in result.output
    assert checkpoints_in(run) == {"global_step2"}
    assert check_names(run / "global_step2") is None
    assert (run / "latest").read_text() == "global_step2"


def test_training_continues_while_a_slow_disk_writes_and_a_stopped_run_waits_for_it(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """One rank, which prints everything in its order. A save takes longer than five steps.

    Claim (checkpoints): training continues while a slow disk writes; saves never interleave; a run
    ends after its last save
    """
    run = tmp_path / "run"
    settings = {**base, "save": run, "async_save": True, "micro_batch_size": 4}
    settings |= {"train_iters": ENDLESS, "global_batch_size": 4, "save_interval": 5}
    started = launcher.start(settings, disk_fault="write:0:40000:/.incomplete-global_step")
    started.wait_until(lambda: "saving checkpoint at iteration      10" in started.output)
    os.kill(started.pids[0], signal.SIGTERM)
    result = started.wait()
    assert result.codes == (ExitCode.TERMINATED,)
    lines = [
        line
        for line in result.output.splitlines()
        if re.search(r"saving checkpoint|stalled|successfully saved|^ .*iteration +\d+/", line)
    ]
    first = lines.index(f"saving checkpoint at iteration       5 to {run}")
    assert "stalled" in lines[first + 1]
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
    settings = {**base, **SCHEDULE, "save": run, "async_save": True, "save_interval": 4}
    slow = "write:0:300000:/.incomplete-global_step"
    result = launcher.start(settings, ranks=RANKS, disk_fault=slow, fault="iteration:6:fail").wait()
    assert result.codes == (1, 1)
    assert result.output.count(FAILURE) > 0
    assert not (run / LOCK).exists()
    assert list_checkpoints(run) == []
    assert not (run / "latest").exists()
