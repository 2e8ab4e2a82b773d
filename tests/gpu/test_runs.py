"""Runs on an accelerator equal those on the CPU.

Ranks that share a device communicate by gloo: NCCL allows one rank per device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import pytest

from tests.e2e.runs import (
    LAUNCHERS,
    PRETRAIN,
    Launcher,
    Run,
    checkpoint_differences,
    free_port,
    steps,
    to_flags,
)

ITERATIONS = 6
TOLERANCE = 1e-4
"""Relative difference of a loss or gradient norm in fp32 between devices."""
TRAINING = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "train_iters": ITERATIONS}
ZERO3 = {"zero_stage": 3}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero{stage}": (1, {"zero_stage": stage}) for stage in range(4)},
    "zero2-offload": (1, {"zero_stage": 2, "cpu_optimizer": True}),
    "zero3-offload": (1, {**ZERO3, "cpu_optimizer": True, "remote_device": "cpu"}),
    "zero1-tp2": (2, {"zero_stage": 1, "tensor_model_parallel_size": 2}),
    "zero3-tp2": (2, {**ZERO3, "tensor_model_parallel_size": 2}),
    **{f"zero{stage}-dp2": (2, {"zero_stage": stage}) for stage in range(1, 4)},
    "zero3-tp2-dp2": (4, {**ZERO3, "tensor_model_parallel_size": 2}),
}
"""Name -> number of ranks and flags."""


def train(
    launcher: Launcher, settings: Mapping[str, Any], *, ranks: int = 1, on_cpu: bool = False
) -> Run:
    """Starts a run on the accelerator, or on the CPU where there is one."""
    environment = {"DS_ACCELERATOR": "cpu"} if on_cpu else {}
    words: list[object] = [PRETRAIN, *to_flags({"global_batch_size": 8, **settings})]
    if ranks == 1:
        words = [LAUNCHERS["python -m torch.distributed.run"][0], *words]
    else:
        command = LAUNCHERS["python -m torch.distributed.run"]
        words = [*command, ranks, "--master_port", free_port(), *words]
        words += ["--distributed-backend", "gloo"]
    return launcher.command(words, environment, inherit_device=not on_cpu)


def figures(save: Path) -> list[float]:
    return [record[key] for record in steps(save) for key in ("lm_loss", "grad_norm")]


@pytest.fixture(scope="module")
def twin(
    launcher: Launcher, base: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run of one process on the CPU; its checkpoint is that of half the iterations.

    Workers of pytest-xdist share one.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    save = folder / "twin"
    done = folder / "twin.done"
    with filelock.FileLock(folder / "twin.lock"):
        if not done.exists():
            settings = {**base, **TRAINING, "save": save, "save_interval": ITERATIONS // 2}
            train(launcher, settings, on_cpu=True).succeed()
            done.touch()
    return save


@pytest.mark.gpu(reason="compares kernels of the device with those of the CPU")
@pytest.mark.parametrize("name", LAYOUTS)
def test_run_equals_that_of_the_cpu(
    launcher: Launcher, base: Mapping[str, Any], twin: Path, tmp_path: Path, name: str
) -> None:
    ranks, layout = LAYOUTS[name]
    train(launcher, {**base, **TRAINING, **layout, "save": tmp_path}, ranks=ranks).succeed()
    assert figures(tmp_path) == pytest.approx(figures(twin), rel=TOLERANCE)


@pytest.mark.gpu(reason="kernels of the device may add in any order")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumed_run_is_bitwise_equal(
    launcher: Launcher, base: Mapping[str, Any], tmp_path: Path, precision: str
) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    common = {**base, "train_iters": ITERATIONS, "deterministic_mode": True, precision: True}
    common = {name: value for name, value in common.items() if name != "fp32"}
    if precision == "fp16":
        common["allow_fp16_on_cpu"] = True
    train(launcher, {**common, "save": whole}).succeed()
    first = {**common, "save": parts, "exit_interval": ITERATIONS // 2}
    train(launcher, first).succeed()
    train(launcher, {**common, "save": parts, "load": parts}).succeed()
    assert steps(parts) == steps(whole)
    last = f"global_step{ITERATIONS}"
    assert checkpoint_differences(parts / last, whole / last) == []


@pytest.mark.gpu(reason="moves a checkpoint between the device and the CPU")
def test_checkpoint_moves_between_devices(
    launcher: Launcher, base: Mapping[str, Any], twin: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    back = tmp_path / "back"
    common = {**base, **TRAINING}
    half = {"ckpt_step": ITERATIONS // 2}
    train(launcher, {**common, **half, "load": twin, "save": there, "save_interval": 1}).succeed()
    assert figures(there) == pytest.approx(figures(twin)[ITERATIONS:], rel=TOLERANCE)
    step = {"ckpt_step": ITERATIONS - 1}
    train(launcher, {**common, **step, "load": there, "save": back}, on_cpu=True).succeed()
    assert figures(back) == pytest.approx(figures(twin)[2 * (ITERATIONS - 1) :], rel=TOLERANCE)
