"""A crash during a save, at any stage, and damage afterwards: some checkpoint always loads, and the
run goes on exactly. The saves of tests/unit/checkpoint are crashed at every single rename; here it
is whole runs, killed in earnest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import (
    REPOSITORY,
    Launcher,
    Settings,
    checkpoint_differences,
    evaluations,
    records,
    steps,
)

KILLED = REPOSITORY / "tests" / "e2e" / "killed.py"
RANKS = 2
SCHEDULE: Settings = {
    "global_batch_size": 8,
    "train_iters": 6,
    "save_interval": 2,
    "eval_interval": 3,
    "eval_iters": 1,
}
CRASHED_AT = 4

COMPLETE_BEFORE = {
    "between_files": 2,
    "before_run_facts": 2,
    "before_manifest": 2,
    "before_rename": 2,
    "before_pointers": 4,
    "between_pointers": 4,
}
"""Stage of the crash -> iteration of the newest complete checkpoint after it."""


@pytest.fixture(scope="module")
def undisturbed(
    launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run without a crash."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    launcher.start({**base, **SCHEDULE, "save": folder}, ranks=RANKS).succeed()
    return folder


def assert_equal_runs(run: Path, undisturbed: Path) -> None:
    assert steps(run) == steps(undisturbed)
    assert evaluations(run) == evaluations(undisturbed)
    for tag in ("global_step4", "global_step6"):
        found = checkpoint_differences(undisturbed / tag, run / tag)
        assert not found, found[:10]
    assert (run / "latest").read_text() == "global_step6"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.parametrize("stage", COMPLETE_BEFORE)
def test_a_crash_during_a_save_costs_at_most_that_save(
    stage: str, undisturbed: Path, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run}
    crashed = launcher.start(
        settings, ranks=RANKS, script=KILLED, environment={"KILL_AT": f"{stage}:{CRASHED_AT}"}
    ).wait()
    assert set(crashed.codes) == {-9}
    named = (run / f"global_step{CRASHED_AT}").exists()
    assert named == (COMPLETE_BEFORE[stage] == CRASHED_AT)
    assert (run / "latest").exists()

    output = launcher.start(settings, ranks=RANKS).succeed()
    assert f"loading checkpoint from {run} at iteration {COMPLETE_BEFORE[stage]}\n" in output
    assert "skipping" not in output
    assert_equal_runs(run, undisturbed)
    assert [path.name for path in run.glob(".*")] == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(
    undisturbed: Path, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """A flipped byte in one, a truncated file in the next, a missing one in the last."""
    run = tmp_path / "run"
    settings = {**base, **SCHEDULE, "save": run, "load": run, "save_interval": 1}
    launcher.start(settings, ranks=RANKS).succeed()
    moments = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    flipped = run / "global_step4" / moments
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 0x10
    flipped.write_bytes(content)
    truncated = run / "global_step5" / "mp_rank_00_model_states.pt"
    size = truncated.stat().st_size
    with truncated.open("r+b") as file:
        file.truncate(size - 1)
    (run / "global_step6" / moments).unlink()

    output = launcher.start(settings, ranks=RANKS).succeed()
    skipped = [line for line in output.splitlines() if "skipping the checkpoint" in line]
    assert skipped == [
        f"WARNING: skipping the checkpoint {run / 'global_step6'}: {moments} is missing",
        f"WARNING: skipping the checkpoint {run / 'global_step5'}: {truncated.name} has "
        f"{size - 1} bytes, the manifest says {size}",
        f"WARNING: skipping the checkpoint {run / 'global_step4'}: {moments} is damaged "
        "(its SHA-256 differs from the manifest's)",
    ]
    assert f"loading checkpoint from {run} at iteration 3\n" in output
    assert_equal_runs(run, undisturbed)


def test_without_any_whole_checkpoint_the_run_starts_anew(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = {**base, "train_iters": 1, "save": run, "load": run}
    launcher.start(settings).succeed()
    before = records(run)
    (run / "global_step1" / "manifest.json").unlink()
    output = launcher.start(settings).succeed()
    assert "it has no manifest.json, so its save did not finish" in output
    assert "will start from random" in output
    assert [record["lm_loss"] for record in records(run)] == [before[0]["lm_loss"]]
