"""Checkpoints on the disks of two nodes, of which one or both lose files.

Each rank has a folder of its own for --local-checkpoint-dir, and is a node.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import RANKS, SCHEDULE, Launcher, Settings, assert_equal_runs
from tests.problems import printed_codes
from tests.unit.checkpoint.fakes import flip_a_bit

STATES = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def crashed(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in iteration 6: saved at 2 and 4, and locally after each step."""
    folder = tmp_path_factory.mktemp("crashed")
    run = launcher.start(
        settings_in(folder, base),
        ranks=RANKS,
        fault="iteration:6:kill-all",
        fault_rank=0,  # the log is that of this rank
        folder=folder,
    )
    assert set(run.wait().codes) == {-9}
    assert "saved local checkpoint at iteration       5 on all nodes\n" in run.output
    for rank in range(RANKS):
        node = folder / f"node-{rank}"
        kept = {path.name for path in node.iterdir() if path.is_dir()}
        assert kept == {"global_step4", "global_step5"}
        # Its own states and those of the other node.
        for other in range(RANKS):
            assert (node / "global_step5" / STATES.format(other)).is_file()
    return folder


def settings_in(folder: Path, base: Settings) -> Settings:
    return {
        **base,
        **SCHEDULE,
        "save": "run",
        "load": "run",
        "local_checkpoint_dir": "node-$RANK",
        "local_save_interval": 1,
    }


def resumed(crashed: Path, folder: Path) -> Path:
    shutil.copytree(crashed, folder)
    shutil.rmtree(folder / "run" / "global_step4")  # the iteration of a local one
    for name, text in (("latest", "global_step2"), ("latest_checkpointed_iteration.txt", "2")):
        (folder / "run" / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "lost",
    [
        *(pytest.param(each, marks=pytest.mark.proof) for each in (None, 0)),
        pytest.param(1, marks=pytest.mark.smoke),
    ],
)
def test_a_run_continues_from_local_copies_although_a_node_has_lost_its_disk(
    lost: int | None,
    crashed: Path,
    uninterrupted: Path,
    launcher: Launcher,
    base: Settings,
    tmp_path: Path,
) -> None:
    """Claim (checkpoints): a run continues bit for bit from local checkpoints, although one of two
    nodes has lost its disk"""
    folder = resumed(crashed, tmp_path / "again")
    if lost is not None:
        shutil.rmtree(folder / f"node-{lost}")
    settings = settings_in(folder, base)
    output = launcher.start(settings, ranks=RANKS, folder=folder).succeed()
    assert " at iteration 5\n" in output
    restored = [line for line in output.splitlines() if "[local-checkpoint-restored]" in line]
    if lost is None:
        assert not restored
    else:
        assert len(restored) == 1
        assert f"node {lost} (" in restored[0].partition("received from")[0]
        assert f"node {1 - lost} (" in restored[0].partition("received from")[2]
    assert_equal_runs(folder / "run", uninterrupted)


def test_files_lost_on_both_nodes_leave_an_older_checkpoint(
    crashed: Path, uninterrupted: Path, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Iteration 5 has lost a file on both nodes, iteration 4 a byte on one; then all is lost.

    Claim (checkpoints): local checkpoints that have lost files on both nodes are not used, and
    older ones are
    """
    folder = resumed(crashed, tmp_path / "again")
    for rank in range(RANKS):
        (folder / f"node-{rank}" / "global_step5" / STATES.format(1)).unlink()
    flip_a_bit(folder / "node-1" / "global_step4" / STATES.format(1))
    settings = settings_in(folder, base)
    output = launcher.start(settings, ranks=RANKS, folder=folder).succeed()
    codes = printed_codes(output)
    assert codes.count("local-checkpoint-incomplete") == 1
    assert codes.count("local-checkpoint-restored") == 1
    assert " at iteration 4\n" in output
    assert_equal_runs(folder / "run", uninterrupted)

    folder = resumed(crashed, tmp_path / "lost")
    for rank in range(RANKS):
        shutil.rmtree(folder / f"node-{rank}")
    output = launcher.start(settings, ranks=RANKS, folder=folder).succeed()
    assert "loading checkpoint from run at iteration 2\n" in output
    assert_equal_runs(folder / "run", uninterrupted)
