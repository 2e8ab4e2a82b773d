"""The stage in a DeepSpeed file switches ZeRO; nothing else has to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.engine.ds_values import get, leaves
from megatron_ds.engine.tensor_files import read_tensors
from tests.e2e.runs import REPOSITORY, Launcher, Settings, losses, steps

FILES = REPOSITORY / "ds_configs"
SCHEDULE: Settings = {"global_batch_size": 8, "train_iters": 4}


def with_stage(stage: int, folder: Path) -> Path:
    """A copy of ds_configs/zero1.json with another stage."""
    values = json.loads((FILES / "zero1.json").read_text())
    values["zero_optimization"]["stage"] = stage
    path = folder / f"stage{stage}.json"
    path.write_text(json.dumps(values))
    return path


def run_facts(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((run / "global_step4" / "run.json").read_text())
    return facts


def test_stage_of_a_copied_file_switches_zero(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    norms = {}
    for stage in range(4):
        run = tmp_path / str(stage)
        settings = {**base, **SCHEDULE, "save": run}
        settings["deepspeed_config"] = with_stage(stage, tmp_path)
        launcher.start(settings, ranks=2).succeed()
        assert run_facts(run)["layout"]["zero_stage"] == stage
        assert losses(run) == pytest.approx(losses(tmp_path / "0"), rel=1e-5)
        norms[stage] = [record["grad_norm"] for record in steps(run)]
        assert norms[stage] == pytest.approx(norms[0], rel=1e-5)
        effective = json.loads((run / "ds_config.json").read_text())
        assert effective["zero_optimization"]["stage"] == stage
        assert effective["train_batch_size"] == 8
        optimizer_files = len(list((run / "global_step4").glob("zero_pp_rank_*_optim_states.pt")))
        assert optimizer_files == (0 if stage == 0 else 2)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("zero2_offload.json", marks=pytest.mark.proof),
        "zero3_hpz.json",
        "zero3_offload.json",
        pytest.param("zero3_nvme.json", marks=[pytest.mark.libaio, pytest.mark.proof]),
    ],
)
def test_provided_files_run_and_are_saved_with_the_checkpoints(
    name: str, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The saved file is the engine's configuration, which DeepSpeed saves in its own files: a run
    with it is the same."""
    first, second = tmp_path / "first", tmp_path / "second"
    settings = {**base, **SCHEDULE, "bf16": True}
    if name == "zero3_nvme.json":
        settings["nvme_path"] = tmp_path / "disk"
    if name == "zero3_hpz.json":
        settings["zero_hpz_partition_size"] = 2
    launcher.start({**settings, "save": first, "deepspeed_config": FILES / name}, ranks=2).succeed()
    saved = json.loads((first / "ds_config.json").read_text())
    given = json.loads((FILES / name).read_text())["zero_optimization"]
    fixed = {key: value for key in leaves(given) if (value := get(given, key)) != "auto"}
    assert {key: get(saved["zero_optimization"], key) for key in fixed} == fixed
    assert saved["zero_optimization"].keys() >= given.keys()
    assert "auto" not in saved["zero_optimization"].values()
    assert saved["bf16"]["enabled"] is True
    states = next((first / "global_step4").glob("*model_states.pt"))
    assert read_tensors(states)["ds_config"] == saved
    launcher.start(
        {**settings, "save": second, "deepspeed_config": first / "ds_config.json"}, ranks=2
    ).succeed()
    assert json.loads((second / "ds_config.json").read_text()) == saved
    assert losses(second) == losses(first)
