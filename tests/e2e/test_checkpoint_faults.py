"""A disk that becomes full or fails during a save, on one rank or on all.

The run reports it, keeps the older checkpoint, removes the partial one, and continues or exits as
--on-save-error says. faulty_disk.cpp lets the system calls themselves fail.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ds.checkpoint.metadata import find_damage
from megatron_ds.launch.exit_codes import ExitCode
from tests.e2e.runs import Launcher, Result, Settings, checkpoint_differences, steps
from tests.faults import build_faulty_disk
from tests.fork_server import ForkServer

RANKS = 2
FAILS_AT = 4
SAVED = {"global_step2", "global_step6"}
SCHEDULE: Settings = {"global_batch_size": 8, "train_iters": 6, "save_interval": 2}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher whose processes have the faulty disk loaded."""
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(build_faulty_disk(folder)))
        server = ForkServer()
        yield Launcher(folder, server)
        server.close()


def run_with_fault(
    launcher: Launcher, settings: Settings, call: str, code: int, bytes: int, part: str
) -> Result:
    fault = f"{call}:{code}:{bytes}:{part}"
    return launcher.start(settings, ranks=RANKS, environment={"DISK_FAULT": fault}).wait()


def checkpoints_in(run: Path) -> set[str]:
    """Names of all folders, including hidden ones, except the index cache."""
    return {path.name for path in run.iterdir() if path.is_dir()} - {"index-cache"}


@pytest.fixture(scope="module")
def uninterrupted(
    launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """ZeRO stage -> folder of a run on a disk without faults."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    for stage in (1, 3):
        settings = {**base, **SCHEDULE, "zero_stage": stage, "save": folder / str(stage)}
        launcher.start(settings, ranks=RANKS).succeed()
    return {stage: folder / str(stage) for stage in (1, 3)}


CASES = {
    "the second rank's disk is full": (1, 1, "zero_pp_rank_1_mp_rank_00_optim_states.pt", 5000),
    "all ranks' disks are full": (1, 0, "", 20000),
    "zero3, the first rank's disk is full": (3, 0, "zero_pp_rank_0_mp_rank_00_model_states.pt", 0),
    "zero3, the second rank's disk is full": (3, 1, "zero_pp_rank_1_mp_rank_00_optim_states", 99),
}


@pytest.mark.parametrize("case", CASES)
def test_a_full_disk_loses_one_checkpoint_and_the_run_continues(
    case: str, launcher: Launcher, base: Settings, uninterrupted: dict[int, Path], tmp_path: Path
) -> None:
    stage, rank, name, bytes = CASES[case]
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "zero_stage": stage, "save": run}
    part = f"/.incomplete-global_step{FAILS_AT}/{name}"
    result = run_with_fault(launcher, settings, "write", errno.ENOSPC, bytes, part)
    assert result.codes == (0, 0), result.output[-3000:]
    assert f"rank {rank}: [Errno 28] No space left on device: '{run}{part}" in result.output
    assert result.output.count("[save-skipped]") == 1
    assert checkpoints_in(run) == SAVED
    assert (run / "latest").read_text() == "global_step6"
    assert steps(run) == steps(uninterrupted[stage])
    for tag in SAVED:
        assert not checkpoint_differences(uninterrupted[stage] / tag, run / tag)


def test_on_save_error_exit_ends_the_run(
    launcher: Launcher, base: Settings, uninterrupted: dict[int, Path], tmp_path: Path
) -> None:
    """fsync fails; after the repair the run resumes from the older checkpoint."""
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "on_save_error": "exit"}
    part = f"/.incomplete-global_step{FAILS_AT}/mp_rank_00_model_states.pt"
    result = run_with_fault(launcher, settings, "fsync", errno.EIO, 0, part)
    assert result.codes == (ExitCode.SAVE_FAILED,) * RANKS, result.output[-3000:]
    assert f"rank 0: [Errno 5] Input/output error: '{run}{part}'" in result.output
    assert result.output.count("[save-failed]") == 1
    assert "Traceback" not in result.output
    assert checkpoints_in(run) == {"global_step2"}
    assert (run / "latest").read_text() == "global_step2"

    output = launcher.start(settings, ranks=RANKS).succeed()
    assert f"loading checkpoint from {run} at iteration 2\n" in output
    assert steps(run) == steps(uninterrupted[1])


def test_a_run_whose_last_checkpoint_cannot_be_saved_fails(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The disk becomes full during the second checkpoint and stays full."""
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run}
    result = run_with_fault(launcher, settings, "write", errno.ENOSPC, 400_000, f"{run}/")
    assert result.codes == (ExitCode.SAVE_FAILED,) * RANKS, result.output[-3000:]
    assert result.output.count("[save-skipped]") == 1
    assert result.output.count("[save-failed]") == 1
    assert "Traceback" not in result.output
    assert checkpoints_in(run) == {"global_step2"}
    assert find_damage(run / "global_step2") is None
    assert (run / "latest").read_text() == "global_step2"
