"""Crashes during a save and damage afterwards: an older checkpoint loads, and the run is exact.

The unit tests of checkpoints interrupt saves at every rename; here complete runs are killed.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ds.checkpoint.folders.run_lock import LOCK
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    check_names,
    list_checkpoints,
    manifest_text,
    read_manifest,
    read_run,
)
from megatron_ds.engine.deepspeed.checkpoint_io import write_tensors
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from tests.e2e.runs import (
    RANKS,
    SCHEDULE,
    Launcher,
    Run,
    Settings,
    assert_equal_runs,
    checkpoint_differences,
    steps,
)
from tests.proofs.cases import with_proofs
from tests.unit.checkpoint.fakes import flip_a_bit

CRASHED_AT = 4

COMPLETE_BEFORE = {
    "between-engine-files": 2,
    "before-run-facts": 2,
    "before-manifest": 2,
    "before-rename": 2,
    "before-pointers": 4,
    "between-pointers": 4,
}
"""Stage of the crash -> iteration of the newest complete checkpoint after it."""
OTHERS = [stage for stage in COMPLETE_BEFORE if stage != "before-rename"]
IN_BACKGROUND = ("between-engine-files", "before-manifest", "between-pointers")
"""Stages of asynchronous saves at which runs are killed."""


@pytest.mark.parametrize(
    ("stage", "async_save"),
    [
        pytest.param("before-rename", False, marks=pytest.mark.smoke),
        *with_proofs(
            [(stage, False) for stage in OTHERS], [(stage, False) for stage in OTHERS[:-1]]
        ),
        *with_proofs(
            [(stage, True) for stage in IN_BACKGROUND],
            [(stage, True) for stage in IN_BACKGROUND[1:]],
        ),
    ],
)
def test_a_crash_during_a_save_loses_at_most_that_save(
    stage: str,
    async_save: bool,
    uninterrupted: Path,
    launcher: Launcher,
    base: Settings,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "async_save": async_save}
    crashed = launcher.start(settings, ranks=RANKS, fault=f"{stage}:{CRASHED_AT}:kill-all").wait()
    assert set(crashed.codes) == {-9}
    assert (run / LOCK).exists()  # of a dead process: the next run does not wait
    is_published = (run / f"global_step{CRASHED_AT}").exists()
    assert is_published == (COMPLETE_BEFORE[stage] == CRASHED_AT)
    assert (run / "latest").exists()

    output = launcher.start(settings, ranks=RANKS).succeed()
    assert f"loading checkpoint from {run} at iteration {COMPLETE_BEFORE[stage]}\n" in output
    assert "[checkpoint-skipped]" not in output
    assert "waiting up to" not in output
    assert ("written in the background" in crashed.output) == async_save
    assert_equal_runs(run, uninterrupted)
    assert not (run / LOCK).exists()
    assert [path.name for path in run.glob(".*")] == []


def test_resume_falls_back_to_the_checkpoint_before_damaged_ones(
    uninterrupted: Path, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """A NaN with the right checksum in one checkpoint, a flipped byte in the next, a truncated
    file, and a missing one in the last.

    Claim (non-finite): weights that are not finite are neither loaded nor saved, and no checkpoint
    is removed after a skipped step
    """
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "save_interval": 1}
    launcher.start(settings, ranks=RANKS).succeed()
    moments = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    poisoned = run / "global_step3"
    states = read_tensors(poisoned / moments)
    states["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[5] = math.nan
    files = {**read_manifest(poisoned), moments: write_tensors(states, poisoned / moments)}
    (poisoned / MANIFEST).write_text(manifest_text(files))
    flip_a_bit(run / "global_step4" / moments)
    truncated = run / "global_step5" / "mp_rank_00_model_states.pt"
    size = truncated.stat().st_size
    with truncated.open("r+b") as file:
        file.truncate(size - 1)
    (run / "global_step6" / moments).unlink()

    output = launcher.start(settings, ranks=RANKS).succeed()
    skipped = [line for line in output.splitlines() if "[checkpoint-skipped]" in line]
    named = [(run / "global_step6", moments), (run / "global_step5", truncated.name)]
    named += [(run / "global_step4", moments), (poisoned, moments)]
    for line, (path, name) in zip(skipped, named, strict=True):
        assert f"{path}: " in line
        assert name in line
    assert f"loading checkpoint from {run} at iteration 2\n" in output
    assert_equal_runs(run, uninterrupted)


@dataclass(frozen=True)
class Moment:
    """When and which rank to kill during a save."""

    event: str
    """Event of the save to wait for: a file that appears, the rename, or the pointer."""
    delay: float
    """Seconds after the event."""
    victim: int | None
    """Rank to kill; None for all."""

    def has_happened(self, run: Path, iteration: int) -> bool:
        name = f"global_step{iteration}"
        if self.event == "pointer":
            return read_pointer(run) == name
        if self.event == "name":
            return (run / name).exists()
        return any(run.glob(f".incomplete-{name}-*/{self.event}"))


EVENTS = [
    ".",
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "run.json",
    "manifest.json",
    "name",
    "pointer",
]
CLOSELY = 0.0002
"""Seconds between looks for events that last less than a millisecond."""
LATER_SAVES = 8


def moments(count: int) -> list[Moment]:
    """All ranks at once at an event, or one or all of them up to the time of a save after it."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        event = EVENTS[(5 * number + 1) % len(EVENTS)]
        delay = draw.uniform(0.0, 0.03)
        victim = (0, 1, None)[number % 3]
        found.append(Moment(event, delay, victim) if number % 2 else Moment(event, 0.0, None))
    return found


def read_pointer(run: Path) -> str:
    return (run / "latest").read_text() if (run / "latest").exists() else ""


def kill_at(run: Run, moment: Moment, folder: Path, iteration: int) -> None:
    """Waits for the moment and kills. After the loss of one rank, the others exit by themselves."""
    # The folder of an earlier killed save may still exist.
    run.wait_until(lambda: f"saving checkpoint at iteration {iteration:7d}" in run.output, CLOSELY)
    # On a busy machine, the event of a save may pass between two looks: then that of a later one.
    saves = range(iteration, iteration + LATER_SAVES)
    run.wait_until(lambda: any(moment.has_happened(folder, each) for each in saves), CLOSELY)
    time.sleep(moment.delay)
    if moment.victim is None or len(run.pids) == 1:  # the process of a launcher
        run.kill()
    else:
        os.kill(run.pids[moment.victim], signal.SIGKILL)
        codes = run.wait().codes
        assert codes[moment.victim] == -signal.SIGKILL
        assert codes[1 - moment.victim] != 0


def check_after_kill(run: Path, full: Path) -> int:
    """All checkpoints are complete and those of `full`; returns the newest iteration."""
    found = list_checkpoints(run)
    for path in found:
        assert check_names(path) is None
        if (full / path.name).exists():
            assert not checkpoint_differences(full / path.name, path)
    assert not read_pointer(run) or run / read_pointer(run) in found
    return read_run(found[0]).iteration if found else 0


@pytest.mark.parametrize(
    ("kills", "async_save"),
    with_proofs(
        [(2, True), (2, False), (150, True), (150, False)], [(2, False), (150, True), (150, False)]
    ),
)
def test_kills_during_saves_lose_no_checkpoint_and_change_no_bit(
    kills: int, async_save: bool, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """One run that saves after every step is killed again and again, and resumed each time.

    Every 25th time it has a launcher, which is killed. Every step's loss finally equals that of an
    uninterrupted run.

    Claim (checkpoints): a run that is killed again and again while saving, synchronously or not (a
    rank, all, the launcher), has complete checkpoints only, and equals an uninterrupted one bit for
    bit: two kills of asynchronous saves in `make test`, 150 of both in `make proofs`
    """
    full = tmp_path / "full"
    run = tmp_path / "run"
    # Each kill is at the first or second save after a resume, or at one of the next ones.
    last = 4 * kills + LATER_SAVES
    settings = {**base, "global_batch_size": 4, "train_iters": last, "save": full}
    launcher.start({**settings, "save_interval": 3}, ranks=RANKS).succeed()
    settings |= {"save": run, "load": run, "save_interval": 1, "keep_last": 3}
    settings |= {"async_save": async_save}
    newest = 0
    interrupted = 0
    for number, moment in enumerate(moments(kills), start=1):
        if number % 25:
            started = launcher.start(settings, ranks=RANKS)
        else:
            started, _ = launcher.launch("torchrun", settings)
        kill_at(started, moment, run, newest + 1 + number % 2)
        launcher.wait_until_all_ended()
        loaded = f"loading checkpoint from {run} at iteration {newest}\n" in started.output
        assert loaded == (newest > 0), f"kill {number}: {moment}"
        assert "[checkpoint-skipped]" not in started.output
        interrupted += any(path.is_dir() for path in run.glob(".incomplete-*"))
        newest = check_after_kill(run, full)
    # Most events precede the rename; if all kills came later, nothing was tested.
    assert interrupted > 0

    launcher.start(settings, ranks=RANKS).succeed()
    assert steps(run) == steps(full)
    assert not checkpoint_differences(full / f"global_step{last}", run / f"global_step{last}")
    assert len(list_checkpoints(run)) == settings["keep_last"]
    assert not list(run.glob(".*"))
