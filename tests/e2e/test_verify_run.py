"""Runs are replayed as one process and compared with their records."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_ds.training.replay.one_process import Trust
from megatron_ds.training.replay.verification import verify
from tests.e2e.corrupted_run import DATA, FORWARD, GRADIENT, OPTIMIZER, RANDOM, WEIGHT
from tests.e2e.runs import Launcher, Settings
from tests.proofs.cases import with_proofs
from tests.tables import tables

LAYOUTS: dict[str, Settings] = tables(__file__)["proofs"]
Check = Callable[..., tuple[int, list[str]]]
NAMED = {
    DATA: f"sample {8 * (DATA - 1) + 5}: data",
    RANDOM: "layers.1: random numbers",
    FORWARD: "layers.0: output: forward",
    GRADIENT: "layers.1.mlp.fc_in.weight: gradient",
    WEIGHT: "layers.0.attention.proj.weight: weights",
    OPTIMIZER: "layers.0.mlp.fc_out.weight: update",
}
"""What is named, by the step in which it is corrupted."""


@pytest.fixture
def check(launcher: Launcher) -> Check:
    """Checks a run; returns the status and the lines."""

    def checked(run: Path, *steps: str) -> tuple[int, list[str]]:
        lines: list[str] = []

        def replay(flags: Sequence[str]) -> int:
            launcher.start(flags).succeed()
            return 0

        trust = Trust(files=True)
        return verify(run, steps or None, replay, lines.append, trust=trust), lines

    return checked


@pytest.fixture(scope="module")
def corrupted(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two pipeline stages, most of whose steps go wrong."""
    folder = tmp_path_factory.mktemp("corrupted") / "run"
    settings = {**base, "global_batch_size": 8, "train_iters": OPTIMIZER, "zero_stage": 0}
    settings |= {"save": folder, "save_interval": 1, "record_every": 1}
    settings["pipeline_model_parallel_size"] = 2
    script = Path(__file__).with_name("corrupted_run.py")
    launcher.start(settings, script=script, ranks=2).succeed()
    return folder


def test_a_run_equals_its_replay(
    launcher: Launcher, base: Settings, tmp_path: Path, check: Check
) -> None:
    """Claim (logging): a recorded run with tensor parallelism, ZeRO-2 and dropout that is resumed
    with other settings equals its replay as one process"""
    settings = {**base, "global_batch_size": 8, "train_iters": 4, "attention_dropout": 0}
    settings |= {"save": tmp_path, "save_interval": 2, "record_every": 1}
    launcher.start({**settings, "exit_interval": 2, "zero_stage": 2}, ranks=2).succeed()
    settings |= {"load": tmp_path, "record_every": 2, "tensor_model_parallel_size": 2}
    launcher.start({**settings, "sequence_parallel": True}, ranks=2).succeed()
    status, lines = check(tmp_path)
    assert (status, [line for line in lines if line.startswith("step")]) == (
        0,
        ["step 1 is equal", "step 2 is equal", "step 4 is equal"],
    ), "\n".join(lines)


@pytest.mark.parametrize("layout", with_proofs(LAYOUTS, LAYOUTS))
def test_every_layout_equals_its_replay(
    launcher: Launcher, base: Settings, tmp_path: Path, check: Check, layout: str
) -> None:
    """Claim (logging): recorded runs of every kind of parallelism and number format equal their
    replays as one process"""
    ranks = LAYOUTS[layout]["ranks"]
    settings = {**base, "global_batch_size": 8, "train_iters": 6}
    settings |= {
        "save": tmp_path,
        "save_interval": 3,
        "record_every": 1,
        "lr": 1e-3,
        **LAYOUTS[layout],
    }
    del settings["ranks"]
    launcher.start(settings, ranks=ranks).succeed()
    status, lines = check(tmp_path)
    assert status == 0, "\n".join(lines)


@pytest.mark.parametrize("step", NAMED)
def test_what_is_corrupted_is_named(corrupted: Path, check: Check, step: int) -> None:
    """Claim (logging): a sample, a random state, an activation, a reduced gradient, a weight or a
    moment of the optimizer that is corrupted in a run of pipeline stages is named by its replay as
    one process"""
    status, lines = check(corrupted, str(step))
    named = re.sub(": (norm|sum):", ":", lines[-1].partition(" (")[0])
    assert (status, named) == (1, f"step {step} is not equal: {NAMED[step]}")


def test_steps_before_a_corruption_are_equal(corrupted: Path, check: Check) -> None:
    status, lines = check(corrupted, f"1-{DATA}")
    assert status == 1
    assert [line.partition(":")[0] for line in lines if line.startswith("step")] == [
        "step 1 is equal",
        f"step {DATA} is not equal",
    ]
