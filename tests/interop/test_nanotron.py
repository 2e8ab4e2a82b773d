"""Checkpoints that nanotron's own classes and functions wrote on the CPU, in several layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from tests.dist.test_trainer_start import check_starts
from tests.fork_server import REPOSITORY
from tests.unit.conversion.models import logits_of
from tests.unit.conversion.test_trainers import TOLERANCE, Peer, reference_of

pytestmark = pytest.mark.interop

PACKAGES = REPOSITORY / "build" / "trainers"
PROGRAM = Path(__file__).with_name("nanotron_run.py")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP 2 x DP 2, ZeRO 1": {"tp": 2, "dp": 2, "zero": 1},
    "tied": {"tp": 2, "model": {"tie_word_embeddings": True, "num_key_value_heads": 4}},
}
OPTIONS = ReadOptions(optimizer=True, run=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of runs of three steps."""
    folder = tmp_path_factory.mktemp("nanotron")
    samples = numpy.random.default_rng(0).integers(1, 120, (12, 17))
    numpy.savez(folder / "samples.npz", tokens=samples)
    paths = os.pathsep.join((str(PACKAGES), str(REPOSITORY)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for name, layout in LAYOUTS.items():
        words = [folder / "samples.npz", folder / name, "3", json.dumps(layout)]
        (folder / name).mkdir()
        command = [sys.executable, PROGRAM, *words]
        subprocess.run(command, check=True, timeout=600, env=environment)
    return {name: folder / name for name in LAYOUTS}


def opened(folder: Path) -> SourceCheckpoint:
    source = open_source(folder, options=OPTIONS)
    assert (source.format, source.path) == ("nanotron", folder / "3")
    return source


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_nanotron(name: str, runs: dict[str, Path]) -> None:
    """Claim (conversion): checkpoints that nanotron's own model wrote, of one and of two
    tensor-parallel ranks, have its logits to 1e-5; torch computes in place of flash-attn's kernels,
    which need a GPU (`make test-interop`)"""
    tokens, expected = reference_of(runs[name])
    assert (logits_of(opened(runs[name]), tokens) - expected).abs().max() < TOLERANCE


def test_a_run_of_four_ranks_starts_with_the_logits_of_nanotron(runs: dict[str, Path]) -> None:
    """Claim (conversion): a run in two tensor-parallel shards and two pipeline stages starts from
    checkpoints that nanotron's own model wrote with its logits at every position, to 1e-5 (`make
    test-interop`)"""
    peers = [Peer("nanotron", path.name, path.name) for path in runs.values()]
    check_starts(peers, next(iter(runs.values())).parent)


def test_states_that_ranks_and_replicas_divide_are_those_of_one_process(
    runs: dict[str, Path],
) -> None:
    """Claim (checkpoints): Adam's states that nanotron's ZeRO 1 divides over two replicas of two
    tensor-parallel ranks are those of its run in one process (`make test-interop`)"""
    one = opened(runs["one process"])
    divided = opened(runs["TP 2 x DP 2, ZeRO 1"])
    for source in (one, divided):
        run = source.run
        assert run is not None
        assert (run.iteration, run.consumed_samples, run.steps) == (3, 12, 3)
    for key, states in one.optimizer.items():
        for name, tensor in states.items():
            value = tensor.read()
            difference = (divided.optimizer[key][name].read() - value).abs().max()
            assert difference <= 1e-4 * value.abs().max(), (key, name)
