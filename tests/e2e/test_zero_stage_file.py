"""The DeepSpeed files of ds_configs/ run, and the saved configurations repeat the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ds.config.deepspeed_file import get, leaves
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from tests.e2e.runs import REPOSITORY, Launcher, Settings, losses

FILES = REPOSITORY / "ds_configs"
SCHEDULE: Settings = {"global_batch_size": 8, "train_iters": 4}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("zero2_offload.json", marks=pytest.mark.proof),
        pytest.param("zero3_hpz.json", marks=pytest.mark.proof),
        "zero3_offload.json",
        pytest.param("zero3_nvme.json", marks=[pytest.mark.libaio, pytest.mark.proof]),
    ],
)
def test_provided_files_run_and_are_saved_with_the_checkpoints(
    name: str, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The saved file is the engine's configuration, which DeepSpeed saves in its own files: a run
    with it is the same. So is a run with the saved settings.

    Claim (deepspeed): a run with the `config.yaml` of another one has its losses to the last digit
    """
    first = tmp_path / "first"
    second = tmp_path / "second"
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
    repeated: Settings = {**settings, "deepspeed_config": first / "ds_config.json"}
    if name == "zero3_offload.json":
        repeated = {"config": first / "config.yaml"}
    launcher.start({**repeated, "save": second}, ranks=2).succeed()
    assert json.loads((second / "ds_config.json").read_text()) == saved
    assert losses(second) == losses(first)
