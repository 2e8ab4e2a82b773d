"""Fixtures: a tiny corpus, settings to train on it, and a launcher that cleans up its processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tests.e2e.runs import ENDLESS, RANKS, SCHEDULE, Launcher, Settings, losses
from tests.e2e.servers import Server
from tests.token_files import write_pair

VOCAB = 120


def write_corpus(prefix: Path, count: int, seed: int, step: int) -> Path:
    """Token files whose documents count up or down from a random token."""
    draw = np.random.default_rng(seed)
    documents = [
        np.append(
            (draw.integers(0, VOCAB) + step * np.arange(draw.integers(10, 60))) % VOCAB, VOCAB
        )
        for _ in range(count)
    ]
    write_pair(prefix, documents)
    return prefix


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Programs that run in the test's process set variables of ranks, which others would read."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of token files whose documents count up."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", 300, seed=0, step=1)


@pytest.fixture(scope="session")
def base(corpus: Path) -> Settings:
    """A model of two layers with dropout on the corpus; no training length and no global batch."""
    return {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 32,
        "micro_batch_size": 2,
        "lr": 1e-2,
        "data_path": corpus,
        "split": "80,10,10",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCAB,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "log_interval": 1,
        "eval_interval": 1000,
        "eval_iters": 0,
        "num_workers": 0,
    }


@pytest.fixture
def endless(base: Settings, tmp_path: Path) -> Settings:
    """A run that saves into the test's folder, and that something else must end."""
    return {**base, "train_iters": ENDLESS, "save": tmp_path}


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("output"))


@pytest.fixture(scope="session")
def uninterrupted(
    launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run of SCHEDULE without a crash."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    launcher.start({**base, **SCHEDULE, "save": folder}, ranks=RANKS).succeed()
    return folder


@pytest.fixture(scope="session")
def endless_losses(
    launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """The first losses of `endless` on two ranks without a launcher."""
    folder = tmp_path_factory.mktemp("endless")
    settings = {**base, "train_iters": ENDLESS, "exit_interval": 2, "save": folder}
    launcher.start(settings, ranks=RANKS).succeed()
    return losses(folder)


@pytest.fixture
def running(launcher: Launcher) -> Iterator[list[Server]]:
    """Servers to be stopped after the test."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        os.kill(server.run.pids[0], signal.SIGTERM)
        assert server.run.wait().codes == (0,) * len(server.run.pids), server.run.output


@pytest.fixture(autouse=True)
def _no_process_left_behind(launcher: Launcher) -> Iterator[None]:
    """All runs end with their test, and all processes with their run."""
    yield
    left = launcher.end_all()
    assert not left, f"processes outlived their run: {left}"
