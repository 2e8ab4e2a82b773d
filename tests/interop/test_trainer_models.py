"""Models that other trainers' packages build and save, with the logits of the packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.conversion.registry import open_source, write
from megatron_ds.conversion.source import SourceCheckpoint
from tests.interop.trainer_models import LITGPT_CASES, OLMO_CORE_CASES, TORCHTITAN_CASES
from tests.unit.conversion.models import assert_same_tensors, logits_of
from tests.unit.conversion.test_trainers import TOLERANCE, Peer, reference_of

pytestmark = pytest.mark.interop

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = REPOSITORY / "build" / "trainers"
PROGRAM = Path(__file__).with_name("trainer_models.py")
FLAGS: dict[str, Any] = {"num_attention_heads": 4, "rotary_base": 1e6, "moe_router_topk": 2}
ROUTERS: dict[str, dict[str, Any]] = {
    "probabilities": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}
"""Flags of torchtitan's models, which no file has."""
CASES = {
    "litgpt": tuple(LITGPT_CASES),
    "olmo_core": OLMO_CORE_CASES,
    "torchtitan": tuple(TORCHTITAN_CASES),
}
WRITTEN: dict[str, tuple[str, ...]] = {
    "litgpt": CASES["litgpt"],
    "olmo_core": tuple(case for case in OLMO_CORE_CASES if case not in ("overrides", "pattern")),
    "torchtitan": CASES["torchtitan"],
}
"""Cases that can be written for the trainer, too: all but rotary positions that differ by layer."""


def run_package(action: str, trainer: str, cases: Sequence[str], folder: Path) -> None:
    """Writes or loads checkpoints by the trainer's package."""
    names = [f"{trainer}_{case}" for case in cases]
    command = [sys.executable, str(PROGRAM), action, str(folder), *names]
    paths = os.pathsep.join((str(PACKAGES), str(REPOSITORY)))
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})


@pytest.fixture(scope="module", params=CASES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A trainer, and the folder of its checkpoints, whose names begin with the trainer's."""
    folder = tmp_path_factory.mktemp(request.param)
    run_package("write", request.param, CASES[request.param], folder)
    return request.param, folder


def opened(trainer: str, case: str, folder: Path) -> SourceCheckpoint:
    flags = FLAGS | ROUTERS.get(case, {}) if trainer == "torchtitan" else {}
    return open_source(folder, options=Peer(trainer, "", "", flags).options())


def test_logits_are_those_of_the_package(saved: tuple[str, Path]) -> None:
    """Claim (conversion): models with experts, gates, attention sinks and blocks that differ, built
    and saved by the packages of torchtitan, OLMo-core and litgpt, have the packages' logits to 1e-5
    (`make test-interop`)"""
    trainer, root = saved
    for case in CASES[trainer]:
        folder = root / f"{trainer}_{case}"
        source = opened(trainer, case, folder)
        assert source.format == trainer
        tokens, expected = reference_of(folder)
        difference = (logits_of(source, tokens) - expected).abs().max()
        assert difference < TOLERANCE, (case, float(difference))


def test_the_package_loads_what_is_written_for_it(saved: tuple[str, Path], tmp_path: Path) -> None:
    """Claim (conversion): models that are written for torchtitan, OLMo-core and litgpt, experts
    included, are loaded by the packages with the logits of the models that they saved, to 1e-5
    (`make test-interop`)"""
    trainer, root = saved
    for case in WRITTEN[trainer]:
        name = f"{trainer}_{case}"
        source = opened(trainer, case, root / name)
        write(source, tmp_path / name, trainer)
        assert_same_tensors(opened(trainer, case, tmp_path / name), source)
    run_package("load", trainer, WRITTEN[trainer], tmp_path)
    for case in WRITTEN[trainer]:
        name = f"{trainer}_{case}"
        _, expected = reference_of(root / name)
        _, logits = reference_of(tmp_path / name)
        difference = (logits - expected).abs().max()
        assert difference < TOLERANCE, (case, float(difference))
