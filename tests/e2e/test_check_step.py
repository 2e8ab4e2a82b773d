"""Steps with a mistake are computed again from their checkpoint, and the mistake is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_ds.config import Config
from megatron_ds.config.problems import ignore
from megatron_ds.training.replay.check_step import check_step, open_pair
from megatron_ds.training.replay.one_process import Trust
from tests.e2e.mistaken_run import DOUBLED, FIRST, GLOBAL_BATCH, MISTAKES, STALE, SWAPPED
from tests.e2e.runs import Launcher, Settings
from tests.problems import raises_problem
from tests.proofs.cases import with_proofs

EMBEDDING = "embedding.word.weight"
NAMED = {
    "decay of norms": ("layers.0.attention_norm.weight", "weight decay", "decays by 0.1 more"),
    "lost micro-batch": (EMBEDDING, "data", "of 4 micro-batches, 2 did not enter"),
    "stale moment": (STALE, "moments", "exp_avg is that of the first checkpoint"),
    "clipping left out": (EMBEDDING, "clipping", "was not clipped to a norm of 0.1"),
    "swapped rank": (SWAPPED, "rank", "of 2 slices along dimension 1, 0 has that of 1"),
    "doubled gradient": (DOUBLED, "gradient", "is 2 times the expected one"),
    "schedule off by one": (EMBEDDING, "schedule", "that of iteration 10"),
    "wrong loss mean": (EMBEDDING, "data", "weights of 0.222, 0.333, 0.222, 0.222"),
    "lost moments": (EMBEDDING, "moments", "from empty moments"),
    "count of steps": (EMBEDDING, "moments", "had counted other steps"),
}
"""The tensor, the kind, and words of what is found."""
Check = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def mistaken(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that saves every step, and makes a mistake in each."""
    folder = tmp_path_factory.mktemp("mistaken") / "run"
    last = FIRST + len(MISTAKES) - 1
    settings = {**base, "global_batch_size": GLOBAL_BATCH, "train_iters": 2 * last}
    settings |= {"exit_interval": last, "zero_stage": 0, "save": folder, "save_interval": 1}
    settings |= {"clip_grad": 0.1, "weight_decay": 0.1, "lr": 3e-3, "adam_eps": 1e-12}
    settings |= {"lr_decay_style": "cosine", "attention_dropout": 0, "hidden_dropout": 0}
    script = Path(__file__).with_name("mistaken_run.py")
    launcher.start(settings, script=script).succeed()
    return folder


@pytest.fixture
def check(launcher: Launcher) -> Check:
    """Checks the steps between two checkpoints; returns the status and the lines."""

    def checked(run: Path, first: int, second: int) -> tuple[int, list[str]]:
        lines: list[str] = []

        def replay(flags: Sequence[str]) -> int:
            launcher.start(flags).succeed()
            return 0

        trust = Trust(files=True)
        paths = [str(run / f"global_step{iteration}") for iteration in (first, second)]
        with open_pair(*paths, Config(), trust, ignore) as pair:
            return check_step(pair, replay, lines.append, trust=trust, tolerance=None), lines

    return checked


def test_steps_without_a_mistake_are_equal(mistaken: Path, check: Check) -> None:
    """Claim (logging): the steps between two checkpoints are computed again by one process,
    and equal in weights and moments of Adam"""
    status, lines = check(mistaken, 1, FIRST - 1)
    assert status == 0, lines
    assert lines[1].startswith("equal: weights, exp_avg and exp_avg_sq of ")


def test_samples_are_not_given_for_a_run_of_this_program(mistaken: Path) -> None:
    paths = (str(mistaken / f"global_step{iteration}") for iteration in (1, 2))
    with (
        raises_problem("samples-of-own-run"),
        open_pair(*paths, Config(), Trust(files=True), ignore, Path("samples.npy")),
    ):
        pass


@pytest.mark.parametrize("mistake", with_proofs(MISTAKES, MISTAKES[2:]))
def test_a_mistake_is_named(mistaken: Path, check: Check, mistake: str) -> None:
    """Claim (logging): of a step between two checkpoints, the first tensor that differs and
    the kind of mistake are named"""
    iteration = FIRST + MISTAKES.index(mistake)
    status, lines = check(mistaken, iteration - 1, iteration)
    name, kind, words = NAMED[mistake]
    assert (status, lines[1]) == (1, f"not equal: {name}"), lines
    assert lines[2].startswith(f"    {kind} ("), lines
    assert words in lines[2], lines
