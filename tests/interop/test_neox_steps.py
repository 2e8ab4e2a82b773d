"""Steps of gpt-neox with mistakes, which tests/interop/write_neox.py recorded, are checked."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.e2e.runs import to_flags
from tests.fork_server import REPOSITORY
from tests.interop.test_trainer_runs import EMBEDDING, NAMED
from tests.interop.trainer_mistakes import FIRST, MISTAKES

pytestmark = pytest.mark.interop

ARCHIVE = Path(__file__).parents[1] / "golden" / "neox_mistakes.tar.xz"
BATCH = 4
FLAGS: dict[str, Any] = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 47,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": BATCH,
    "train_iters": 20,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 20,
    "lr_warmup_fraction": 0.2,
    "min_lr": 0.001,
    "num_workers": 0,
    "eval_iters": 0,
}
NAMED_HERE = NAMED | {
    "lost micro-batch": (EMBEDDING, "data", "of 4 micro-batches, 2 did not enter"),
    "wrong loss mean": (EMBEDDING, "data", "weights of 0.222, 0.333, 0.222, 0.222"),
}
"""The tensor, the kind, and words of what is found."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neox")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "mistakes"


def check(folder: Path, first: int, second: int, samples: Path) -> Any:
    """Runs tools/check_step.py on the samples of the steps; returns the finished process."""
    with numpy.load(folder / "results.npz") as arrays:
        numpy.save(samples, arrays["samples"][first * BATCH : second * BATCH])
    locations = [f"neox:{folder / f'global_step{step}'}" for step in (first, second)]
    words = [*locations, "--trust-recorded-files", "--samples", samples, *to_flags(FLAGS)]
    command = [sys.executable, REPOSITORY / "tools" / "check_step.py", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_steps_of_neox_are_equal(recorded: Path, tmp_path: Path) -> None:
    """Claim (logging): steps that gpt-neox's model and DeepSpeed computed are computed again by one
    process, and equal in weights and moments (`make test-interop`)"""
    result = check(recorded, 3, FIRST - 1, tmp_path / "samples.npy")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal: weights, exp_avg and exp_avg_sq of " in result.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_neox_is_named(mistake: str, recorded: Path, tmp_path: Path) -> None:
    """Claim (logging): of a step of gpt-neox, the first tensor that differs and the kind of mistake
    are named (`make test-interop`)"""
    step = FIRST + MISTAKES.index(mistake)
    result = check(recorded, step - 1, step, tmp_path / "samples.npy")
    name, kind, words = NAMED_HERE[mistake]
    lines = result.stdout.splitlines()
    assert (result.returncode, lines[1]) == (1, f"not equal: {name}"), result.stderr + result.stdout
    assert lines[2].startswith(f"    {kind} ("), lines
    assert words in lines[2], lines
