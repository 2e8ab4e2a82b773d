"""Checkpoints that nanotron's own classes and functions wrote on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from megatron_ds.conversion.registry import open_source
from tests.fork_server import REPOSITORY
from tests.unit.conversion.models import logits_of

pytestmark = pytest.mark.interop

PACKAGES = REPOSITORY / "build" / "trainers"
PROGRAM = Path(__file__).with_name("nanotron_program.py")
MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 60,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
RUNS: dict[str, dict[str, Any]] = {
    "one process": {"tp": 1},
    "TP 2": {"tp": 2},
    "TP 2 x DP 2, ZeRO 1, tied, all heads": {
        "tp": 2,
        "dp": 2,
        "zero": 1,
        "settings": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    },
}


def write_samples(path: Path) -> Tensor:
    """Samples [24, 17] of six steps."""
    samples = numpy.random.default_rng(0).integers(1, 60, (24, 17))
    numpy.save(path, samples)
    return torch.from_numpy(samples)


@pytest.mark.parametrize("name", RUNS)
def test_logits_are_those_of_nanotron(name: str, tmp_path: Path) -> None:
    """Claim (conversion): checkpoints that nanotron's own model wrote after six steps, with one and
    two tensor-parallel ranks, have its logits to 1e-5; torch computes in place of flash-attn's
    kernels, which need a GPU (`make test-interop`)"""
    samples = write_samples(tmp_path / "samples.npy")
    options = dict(RUNS[name])
    settings = MODEL | options.pop("settings", {})
    folder = tmp_path / "run"
    spec = {
        "folder": str(folder), "tokens": str(tmp_path / "samples.npy"), "settings": settings,
        "batch": 4, "steps": [3, 6], "zero": 0, **options,
    }  # fmt: skip
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    paths = os.pathsep.join((str(PACKAGES), str(REPOSITORY)))
    command = [sys.executable, str(PROGRAM), str(file)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})
    with numpy.load(folder / "results.npz") as results:
        expected = torch.from_numpy(results["logits"])
    source = open_source(folder)
    assert (source.format, source.path) == ("nanotron", folder / "6")
    assert (logits_of(source, samples[:2, :-1]) - expected).abs().max() < 1e-5
