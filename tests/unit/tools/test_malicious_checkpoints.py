"""Files that would run code when they are unpickled, through every tool that reads checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_ds.checkpoint.metadata import MANIFEST, RUN, manifest_text, read_manifest
from megatron_ds.config import ModelConfig
from megatron_ds.conversion.inspect import command as inspect_checkpoint
from megatron_ds.conversion.safe_unpickle import read_dcp_metadata
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.loading.programs import convert as convert_checkpoint
from tests.unit.checkpoint.native_writer import random_states, write_checkpoint
from tests.unit.checkpoint.test_full_weights import Trap
from tests.unit.conftest import Run
from tests.unit.conversion.hf_models import random_model
from tests.unit.conversion.megatron_writer import Layout
from tests.unit.conversion.megatron_writer import write_checkpoint as write_megatron
from tests.unit.conversion.models import SMALL, random_source

PICKLES = (".pt", ".bin", ".distcp", ".metadata")
TOOLS: dict[str, tuple[ModuleType, Callable[[Path, Path], list[object]]]] = {
    "inspect": (inspect_checkpoint, lambda folder, new: [folder]),
    "compare": (inspect_checkpoint, lambda folder, new: [folder, folder]),
    "verify": (inspect_checkpoint, lambda folder, new: [folder, "--verify"]),
    "convert": (
        convert_checkpoint,
        lambda folder, new: ["--load", folder, "--save", new, "--to", "native"],
    ),
}


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, megatron_checkpoints: Path
) -> dict[str, Path]:
    """An intact checkpoint of every format that has pickles."""
    folder = tmp_path_factory.mktemp("intact")
    write_checkpoint(folder / "native", random_states(), tp=2, dp=2, stage=1)
    random_model("llama").save_pretrained(folder / "hf", safe_serialization=True)
    model = random_model("llama")
    torch.save(model.state_dict(), folder / "hf" / "pytorch_model.bin")
    (folder / "hf" / "model.safetensors").unlink()
    names = {"mlm25_tp1": "megatron", "ms_pipe_tp2": "deepspeed", "mlm0190_gpt": "torch_dist"}
    found = {kind: megatron_checkpoints / name for name, kind in names.items()}
    return {**found, "native": folder / "native", "hf": folder / "hf"}


def pickles_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.suffix in PICKLES or path.name in PICKLES):
            yield path


def replace(path: Path, trap: Path) -> None:
    """Replaces a file, or in a file of several tensors each of them, by a pickle with the trap."""
    with open(path.with_name("trap"), "wb") as file:
        torch.save({"module": Trap(trap), "weight": Trap(trap)}, file)
    content = path.with_name("trap").read_bytes()
    path.with_name("trap").unlink()
    if path.suffix == ".distcp":
        places = read_dcp_metadata(path.with_name(".metadata")).storage_data.values()
        filled = bytearray(path.stat().st_size + len(content))
        for place in places:
            if place.relative_path == path.name:
                filled[place.offset : place.offset + len(content)] = content
        content = bytes(filled)
    path.write_bytes(content)
    if (path.parent / MANIFEST).is_file():
        files = {**read_manifest(path.parent), path.name: FileRecord.of(content)}
        (path.parent / MANIFEST).write_text(manifest_text(files))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", ["native", "hf", "megatron", "deepspeed", "torch_dist"])
def test_no_file_runs_code(
    kind: str,
    tool: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Claim (checkpoints): reading a checkpoint executes no code, whatever its files contain"""
    module, arguments = TOOLS[tool]
    names = [path.relative_to(checkpoints[kind]) for path in pickles_below(checkpoints[kind])]
    assert len(names) > 0
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        trap = tmp_path / "sprung"
        shutil.copytree(checkpoints[kind], folder)
        replace(folder / name, trap)
        new = tmp_path / "new"
        status = module.main([str(each) for each in arguments(folder, new)])
        printed = capsys.readouterr()
        assert not trap.exists(), name
        assert "Traceback" not in printed.err
        # A tool that does not read a file cannot see what is in it.
        assert status in (0, 1)
        if number == 0 or (tool == "verify" and kind == "native"):
            assert status == 1, name
        shutil.rmtree(new, ignore_errors=True)


def test_the_trap_works(tmp_path: Path) -> None:
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "sprung").is_dir()


@pytest.mark.parametrize("changes", [{"partitions": []}, {"shards": {}}, {"experts": ["x"]}])
def test_a_record_that_does_not_fit_the_files_is_an_error(
    checkpoints: dict[str, Path], tmp_path: Path, run_tool: Run, changes: dict[str, Any]
) -> None:
    """With a manifest that matches it."""
    folder = shutil.copytree(checkpoints["native"], tmp_path / "save")
    path = folder / "global_step8"
    content = json.dumps({**json.loads((path / RUN).read_text()), **changes}).encode()
    (path / RUN).write_bytes(content)
    files = {**read_manifest(path), RUN: FileRecord.of(content)}
    (path / MANIFEST).write_text(manifest_text(files))
    for other in ((), (folder,)):
        status = 0 if "experts" in changes else 1
        assert "Traceback" not in run_tool(inspect_checkpoint, folder, *other, status=status).err


@pytest.mark.parametrize("tool", TOOLS)
def test_a_malformed_value_is_an_error(tool: str, tmp_path: Path, run_tool: Run) -> None:
    config = ModelConfig(**SMALL)
    folder = write_megatron(tmp_path, config, random_source(config), Layout())
    (path,) = folder.rglob("model_optim_rng.pt")
    torch.save({**torch.load(path, weights_only=False), "iteration": "x"}, path)
    module, arguments = TOOLS[tool]
    printed = run_tool(module, *arguments(folder, tmp_path / "new"), status=1)
    assert "foreign-file-unreadable" in printed.err


def test_names_do_not_control_the_terminal(
    checkpoints: dict[str, Path], tmp_path: Path, run_tool: Run
) -> None:
    folder = shutil.copytree(checkpoints["hf"], tmp_path / "theirs")
    (folder / "\x1b[2Jname").write_text("")
    shown = run_tool(inspect_checkpoint, folder).out
    assert "\x1b" not in shown
    assert os.sep not in "\\x1b[2Jname"
    assert "\\x1b[2Jname" in shown
