"""Models that other trainers' packages build and save, with the logits of the packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.conversion.registry import open_source, write
from megatron_ds.conversion.source import SourceCheckpoint
from tests.interop.trainer_models import LITGPT_CASES, OLMO_CORE_CASES, TORCHTITAN_CASES
from tests.unit.conversion.models import assert_same_tensors, logits_of
from tests.unit.conversion.test_trainers import Peer, reference_of

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
WRITTEN = {"litgpt": tuple(LITGPT_CASES), "olmo_core": ("head_gate", "gate", "sinks")}
"""Cases that can be written for the trainer, too."""


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a trainer's models, with its name as the start of theirs."""
    folder = tmp_path_factory.mktemp(request.param)
    cases = [f"{request.param}_{case}" for case in CASES[request.param]]
    command = [sys.executable, str(PROGRAM), str(folder), *cases]
    paths = os.pathsep.join((str(PACKAGES), str(REPOSITORY)))
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})
    return folder


def opened(trainer: str, case: str, folder: Path) -> SourceCheckpoint:
    flags = FLAGS | ROUTERS.get(case, {}) if trainer == "torchtitan" else {}
    return open_source(folder, options=Peer(trainer, "", "", flags).options())


def test_logits_are_those_of_the_package(saved: Path, tmp_path: Path) -> None:
    """Claim (conversion): models with experts, gates, attention sinks and blocks that differ, built
    and saved by the packages of torchtitan, OLMo-core and litgpt, have the packages' logits to 1e-5
    (`make test-interop`)"""
    folders = sorted(saved.iterdir())
    trainer = next(name for name in CASES if folders[0].name.startswith(f"{name}_"))
    assert len(folders) == len(CASES[trainer])
    for folder in folders:
        case = folder.name.removeprefix(f"{trainer}_")
        source = opened(trainer, case, folder)
        assert source.format == trainer
        tokens, expected = reference_of(folder)
        difference = (logits_of(source, tokens) - expected).abs().max()
        assert difference < 1e-5, (folder.name, float(difference))
        if case in WRITTEN.get(trainer, ()):
            write(source, tmp_path / folder.name, trainer)
            assert_same_tensors(open_source(tmp_path / folder.name), source)
