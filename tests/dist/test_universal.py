"""DeepSpeed's own converter and loader agree with ours on the universal format.

A run of this program saves a checkpoint, which both converters convert: the tensors must be equal.
A plain DeepSpeed engine, without anything of this program but the model, loads what ours writes,
and this program loads what DeepSpeed's converter writes.
"""

from __future__ import annotations

import dataclasses
import runpy
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from megatron_ds.checkpoint.metadata import list_checkpoints
from megatron_ds.checkpoint.universal.folders import SUFFIX, is_universal
from megatron_ds.checkpoint.universal.writer import convert_checkpoint, open_verified
from megatron_ds.conversion.registry import open_source, recognize
from megatron_ds.engine.deepspeed import zero_to_fp32
from megatron_ds.engine.states.state_reader import VOCABULARY_TABLES
from megatron_ds.loading.programs import convert
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.dist.engine_harness import Meshes, prepare
from tests.dist.reference import Tensors
from tests.dist.test_resharding import (
    BF16,
    DENSE,
    STEPS,
    Continued,
    Layout,
    differing_states,
    without_padding,
)
from tests.distributed import run_ranks
from tests.pages import flags as flags_page
from tests.problems import printed_codes
from tests.unit.conversion.models import assert_same_tensors

TOOL = flags_page.REPOSITORY / "tools" / "convert_checkpoint" / "ds_to_universal.py"

LAYOUTS = {
    "zero1": Layout(1, changes={"model": DENSE}),
    "zero3": Layout(3, changes={"model": DENSE}),
}
HALF = {"model": DENSE, **BF16}
HALVES = {
    "zero2": Layout(2, changes=HALF),
    "tp2": Layout(1, tp=2, changes=HALF),
    "pp2": Layout(1, pp=2, changes=HALF),
}
"""Runs in bf16."""
KINDS = ("master", "exp_avg", "exp_avg_sq")
Checkpoints = tuple[Path, list[list[str]]]
"""Folder of the checkpoints, and what each rank found wrong."""


def save_and_convert(rank: int, folder: Path) -> list[str]:
    """Saves, converts in both ways, and loads what DeepSpeed has converted."""
    meshes = prepare()
    found: list[str] = []
    for name, layout in LAYOUTS.items():
        training = Continued(name, folder, meshes, layout)
        states = save(training, name, folder)
        if rank == 0:
            (path,) = list_checkpoints(folder / name)
            target = path.with_name(f"{path.name}{SUFFIX}")
            convert_checkpoint(open_verified(path), target, lambda name, size: None)
            convert_by_deepspeed(path, folder / f"{name} theirs")
        dist.barrier()
        training.overwrite()
        log: list[str] = []
        manager = training.manager(folder / f"{name} theirs", log, universal_checkpoint=True)
        checkpoint = manager.restoring.select()
        assert checkpoint is not None
        state = training.state
        training.state = manager.restoring.load(training.engine, checkpoint)
        assert any("from the universal checkpoint" in line for line in log)
        assert training.state == state
        found += [f"{name}: {each}" for each in differing_states(training, states)]
        found += [f"{name}: {training.steps()} steps"] if training.steps() != {STEPS} else []
        training.close()
    found += [each for name in LAYOUTS for each in load_by_deepspeed(meshes, folder, name)]
    for name, layout in HALVES.items():
        training = Continued(name, folder, meshes, layout)
        save(training, f"bf16 {name}", folder)
        training.close()
    return found


def save(training: Continued, name: str, folder: Path) -> dict[str, Tensors]:
    """Takes steps, saves a checkpoint, and records its states, which are returned."""
    for _ in range(STEPS):
        training.step()
    training.manager(folder / name, []).saving.save(training.engine, training.state)
    states = training.states()
    if dist.get_rank() == 0:
        torch.save(states, folder / f"{name}.pt")
    return states


def convert_by_deepspeed(path: Path, folder: Path) -> None:
    """Converts a copy of a checkpoint by DeepSpeed's own code."""
    copy = Path(shutil.copytree(path, folder / path.name))
    options: dict[str, Any] = {"num_extract_workers": 1, "num_merge_workers": 1}
    options |= {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    output = f"{copy}{SUFFIX}"
    ds_to_universal.main(Namespace(input_folder=str(copy), output_folder=output, **options))


def load_by_deepspeed(meshes: Meshes, folder: Path, name: str) -> Iterator[str]:
    """What a plain engine has otherwise after it has loaded our universal checkpoint."""
    training = Continued(name, folder, meshes, LAYOUTS[name])
    config = training.config
    stage = LAYOUTS[name].stage
    training.close()
    shape = config.model
    if stage == 3:  # DeepSpeed's loader of this stage knows no padding
        shape = dataclasses.replace(shape, make_vocab_size_divisible_by=1)
    model = GPTModel(shape, mesh=Mesh.single(), rng=RngStreams(0), seed=3, moe=config.moe)
    values: dict[str, Any] = {
        "train_batch_size": dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": True},
    }
    engine, *_ = deepspeed.initialize(model=model, config=values)
    path, _ = engine.load_checkpoint(str(folder / name))
    assert path is not None
    expected = torch.load(folder / f"{name}.pt")
    if engine.global_steps != STEPS:
        yield f"{name}: {engine.global_steps} global steps"
    for kind in KINDS:
        read = {
            key: (
                safe_get_full_fp32_param(parameter)
                if kind == "master"
                else safe_get_full_optimizer_state(parameter, kind)
            )
            for key, parameter in engine.module.named_parameters()
        }
        for key, value in without_padding(read).items():
            if not torch.equal(value, expected[kind][key]):
                yield f"{name}: DeepSpeed's {kind} of {key}"
    steps = {int(each["step"]) for each in engine.optimizer.optimizer.state.values()}
    if steps != {STEPS}:
        yield f"{name}: {steps} steps in DeepSpeed's optimizer"
    engine.destroy()


def load_on_one(rank: int, folder: Path) -> list[str]:
    meshes = prepare()
    return [each for name in LAYOUTS for each in load_by_deepspeed(meshes, folder, name)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("universal")
    return folder, run_ranks(save_and_convert, 2, folder)


def test_deepspeed_and_this_program_load_each_others_checkpoints(checkpoints: Checkpoints) -> None:
    """Claim (checkpoints): a plain DeepSpeed engine loads universal checkpoints of this program,
    with ZeRO 1 and 3, on one and two processes; this program loads those of DeepSpeed's converter,
    without tensor parallelism"""
    assert checkpoints[1] == [[], []]


def test_deepspeed_loads_them_on_another_layout(checkpoints: Checkpoints) -> None:
    """Claim (checkpoints): a plain DeepSpeed engine loads universal checkpoints of this program,
    with ZeRO 1 and 3, on one and two processes; this program loads those of DeepSpeed's converter,
    without tensor parallelism"""
    assert run_ranks(load_on_one, 1, checkpoints[0]) == [[]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_converters_write_the_same_tensors(name: str, checkpoints: Checkpoints) -> None:
    """Claim (checkpoints): without tensor parallelism, DeepSpeed's converter with
    `--inject_missing_state` writes the same tensors as `ds_to_universal.py`"""
    folder = checkpoints[0]
    (own,), (theirs,) = (
        [path for path in (folder / each).iterdir() if is_universal(path)]
        for each in (name, f"{name} theirs")
    )
    files = sorted(path.relative_to(own) for path in own.glob("zero/*/*.pt"))
    expected = sorted(path.relative_to(theirs) for path in theirs.glob("zero/*/*.pt"))
    if name == "zero3":  # whose number of steps DeepSpeed keeps in another file
        files = [path for path in files if path.name != "step.pt"]
    assert files == expected
    for path in files:
        ours, other = (torch.load(each / path, weights_only=False) for each in (own, theirs))
        if path.name == "step.pt":
            assert int(ours) == int(other) == STEPS
            continue
        own_values = ours["param"].flatten()
        values = (other if name == "zero3" else other["param"]).flatten()  # not stored by shape
        is_table = path.parent.name in VOCABULARY_TABLES  # with padding in DeepSpeed's
        assert torch.equal(own_values, values[: len(own_values) if is_table else None]), path


@pytest.mark.parametrize("name", HALVES)
def test_the_script_beside_a_checkpoint_writes_the_master_weights(
    name: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (checkpoints): `--dtype fp32`, `tools/zero_to_fp32.py` and the `zero_to_fp32.py` next
    to the checkpoints write the master weights of bf16 runs bit for bit, with ZeRO 2 equal to
    DeepSpeed's script; also with tensor parallelism and pipeline stages"""
    folder = checkpoints[0] / f"bf16 {name}"
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", str(folder), str(tmp_path / "own")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "zero_to_fp32.py"), run_name="__main__")
    assert ended.value.code == 0
    own = {key: each.read() for key, each in open_source(tmp_path / "own").tensors.items()}
    masters = torch.load(checkpoints[0] / f"bf16 {name}.pt")["master"]
    assert own.keys() == masters.keys()
    assert all(torch.equal(own[key], masters[key]) for key in masters)
    assert not all(torch.equal(each, each.bfloat16().float()) for each in own.values())
    if name == "zero2":  # which DeepSpeed's script reads, too
        theirs = without_padding(get_fp32_state_dict_from_zero_checkpoint(str(folder)))
        assert all(torch.equal(own[key], theirs[key]) for key in own)


def test_the_script_beside_a_checkpoint_explains_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zero_to_fp32, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        zero_to_fp32.main()
    assert ended.value.code == zero_to_fp32.MISSING


def test_the_tool_converts(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = list_checkpoints(checkpoints[0] / "zero3")
    copy = shutil.copytree(path, tmp_path / path.name)
    output = tmp_path / f"{path.name}{SUFFIX}"
    flags = ["--input_folder", str(copy), "--output_folder", str(output), "--no_strict"]

    assert flags_page.load(TOOL).main(flags) == 0

    printed = capsys.readouterr()
    assert f"wrote {output}" in printed.out
    assert printed_codes(printed.err) == ["ignored-flag"]
    assert (tmp_path / "latest_universal").read_text() == output.name
    expected = Path(f"{path}{SUFFIX}")
    names = sorted(each.relative_to(expected) for each in expected.rglob("*"))
    assert sorted(each.relative_to(output) for each in output.rglob("*")) == names
    assert (output / "run.json").read_bytes() == (path / "run.json").read_bytes()
    assert_same_tensors(open_source(output), open_source(path))
    assert recognize(output).name == "universal"
    options = ["--load", str(copy), "--save", str(tmp_path / "again"), "--to", "universal"]
    assert convert.main([*options, "--verify"]) == 0
    assert_same_tensors(open_source(tmp_path / "again"), open_source(output))
    options = ["--load", str(output), "--save", str(tmp_path / "native"), "--to", "native"]
    assert convert.main([*options, "--from", "universal", "--verify"]) == 0
    assert_same_tensors(open_source(tmp_path / "native"), open_source(output))
    options = ["--load", str(tmp_path / "native"), "--save", str(tmp_path / "no")]
    capsys.readouterr()
    assert convert.main([*options, "--to", "universal"]) == 1
    assert printed_codes(capsys.readouterr().err)[-1] == "universal-input-missing"
    assert convert.main([*options, "--to", "universal", "--dtype", "bf16"]) == 2
    assert printed_codes(capsys.readouterr().err) == ["universal-dtype"]
    for name in ("again", "native"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "latest_universal").write_text(output.name)
    # Neither a damaged checkpoint nor a folder with files.
    assert flags_page.load(TOOL).main(flags) == 1
    assert printed_codes(capsys.readouterr().err)[-1] == "output-folder-not-empty"
    shutil.rmtree(output)
    damaged = next(copy.glob("*optim_states.pt"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert flags_page.load(TOOL).main(flags) == 1
    assert printed_codes(capsys.readouterr().err)[-1] == "all-checkpoints-damaged"
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, "latest_universal"]
