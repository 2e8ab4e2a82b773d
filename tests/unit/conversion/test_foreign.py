"""Checkpoints of other programs that are not read are recognized by their files."""

from __future__ import annotations

import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from megatron_ds.config import Config, ModelConfig
from megatron_ds.config.options.checkpoint import FORMATS as NAMES
from megatron_ds.config.problems import UserError
from megatron_ds.conversion.foreign.contents import FolderContents, pickled_texts
from megatron_ds.conversion.foreign.recognition import FORMATS, find_foreign, location_problems
from megatron_ds.conversion.registry import open_source, recognize
from megatron_ds.conversion.weights_folder import write_weights_folder
from megatron_ds.fileio.object_store import ObjectStore
from megatron_ds.loading.locations import staged_location
from megatron_ds.loading.plan import make_plan
from tests.import_graph import REPOSITORY
from tests.object_server import BUCKET, s3_server
from tests.problems import codes, raises_problem
from tests.unit.checkpoint.native_writer import random_states, write_checkpoint
from tests.unit.conversion.foreign_trees import REFUSED, TREES, write_tree
from tests.unit.conversion.hf_models import random_model
from tests.unit.conversion.models import SMALL, random_source

READ = [name for name, tree in TREES.items() if "read" in tree]
PEERS = {
    "nanochat": "foreign-nanochat",
    "torchtitan/hf/step-3": "foreign-without-config",
}
"""Folders that the programs wrote themselves."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_is_recognized_by_its_files(name: str, tmp_path: Path) -> None:
    """In its folder, in folders above it, and by its file, whatever format is given."""
    tree = TREES[name]
    folder = write_tree(name, tmp_path / "above" / "checkpoint")
    file = folder / tree["file"]
    for format_name in {"auto", *NAMES} - {*tree.get("also", ())}:
        with raises_problem(tree["code"], "load", contains=str(file)):
            recognize(folder, format_name)
    if file.suffix not in (".json", "") and file.is_file():
        assert codes([*location_problems(f"hf:{file}")]) == [tree["code"]]
    if tree.get("below", True) and file.parent.parent in (folder, folder.parent):
        with raises_problem(tree["code"], contains=str(file)):
            recognize(folder.parent)


@pytest.mark.parametrize("name", READ)
def test_a_checkpoint_that_is_read_is_recognized_by_its_files(name: str, tmp_path: Path) -> None:
    """In its folder and the one with its steps; another format, its files, and folders further
    above are refused with what names it."""
    tree = TREES[name]
    trainer = tree["read"]
    folder = write_tree(name, tmp_path / "above" / "checkpoint")
    file = folder / tree["file"]
    given = folder / tree.get("folder", ".")
    for format_name in NAMES:
        if format_name in (trainer, *tree.get("also", ())):
            assert find_foreign(given, name=format_name) is None
            assert recognize(given, format_name).name == format_name
        else:
            with raises_problem("foreign-of-other-format", "load", contains=str(file)):
                recognize(given, format_name)
    assert recognize(given).name == tree.get("auto", trainer)
    with raises_problem("foreign-checkpoint-below", "load", contains=f"{trainer}:{folder}"):
        recognize(given.parent)
    if file.suffix not in (".json", "") and file.is_file():
        assert codes([*location_problems(str(file))]) == ["load-is-a-file"]


def test_every_format_has_a_case_and_a_row_of_the_page() -> None:
    assert {entry.code for entry in FORMATS} == {TREES[name]["code"] for name in REFUSED}
    page = (REPOSITORY / "docs" / "checkpoints" / "other_trainers.md").read_text()
    table = page[page.index("| program | recognized by |") :].splitlines()[2:]
    rows = [
        line.split(" | ")[0].removeprefix("| ")
        for line in itertools.takewhile(lambda line: line.startswith("|"), table)
    ]
    assert sorted(rows) == sorted({entry.name for entry in FORMATS})


@pytest.mark.parametrize("name", PEERS)
def test_what_the_programs_write_is_recognized(name: str, shared_data: Path) -> None:
    folder = shared_data / "peer_checkpoints2" / name
    with raises_problem(PEERS[name]):
        recognize(folder)


def test_what_megatron_writes_is_not_refused(shared_data: Path) -> None:
    for folder in (shared_data / "peer_checkpoints").iterdir():
        for path in (folder, *folder.glob("*")):
            if folder.name != "data" and path.is_dir():
                assert find_foreign(path) is None, path
                assert recognize(path), path


def readable(name: str, folder: Path) -> None:
    """Writes a checkpoint of a format that is read."""
    if name == "native":
        write_checkpoint(folder, random_states())
    elif name == "weights":
        write_weights_folder(random_source(ModelConfig(**SMALL)), folder)
    else:
        random_model("llama").save_pretrained(folder)


@pytest.mark.parametrize("name", ["native", "weights", "hf"])
def test_what_is_read_may_have_other_files_next_to_it(name: str, tmp_path: Path) -> None:
    """Also below it, where other programs put theirs."""
    readable(name, tmp_path / "run")
    for other in ("nanoGPT", "NeMo 1", "Mistral", "Composer", "torch.save", "nanochat"):
        write_tree(other, tmp_path / "run")
        write_tree(other, tmp_path / "run" / "exports")
    assert find_foreign(tmp_path / "run") is None
    assert recognize(tmp_path / "run").name == {"weights": "native"}.get(name, name)


def test_files_of_a_checkpoint_that_is_read_name_its_folder(tmp_path: Path) -> None:
    for name in ("native", "weights", "hf"):
        readable(name, tmp_path / name)
    files = {
        "native": next((tmp_path / "native").glob("global_step*/*.pt")),
        "weights": tmp_path / "weights" / "model.safetensors",
        "hf": tmp_path / "hf" / "model.safetensors",
    }
    for name, file in files.items():
        problem = find_foreign(file)
        assert problem is not None
        assert problem.code == "load-is-a-file"
        assert f"{tmp_path / name}" in str(problem).replace(str(file), "")
    (problem,) = location_problems(__file__)
    assert (problem.code, problem.fields) == ("load-is-a-file", ("load",))


def test_a_model_below_a_folder_is_named(tmp_path: Path) -> None:
    """Of several checkpoints the newest one."""
    for step in (9, 10):
        readable("hf", tmp_path / f"checkpoint-{step}")
    with raises_problem("foreign-model-below", contains=f"hf:{tmp_path / 'checkpoint-10'}"):
        recognize(tmp_path)


def test_weights_of_trainer_are_read_next_to_files_of_deepspeed(tmp_path: Path) -> None:
    folder = write_tree("DeepSpeed of Trainer", tmp_path) / "checkpoint-10"
    readable("hf", folder)
    assert [recognize(folder, name).name for name in ("auto", "hf")] == ["hf", "hf"]
    (folder / "trainer_state.json").unlink()  # it might be a checkpoint of a fork of Megatron
    assert recognize(folder, "hf").name == "hf"
    with raises_problem("foreign-deepspeed"):
        recognize(folder)


def problems_of_load(url: str, staging: Path) -> list[str]:
    """The codes by which a run, and a tool, refuse a URL."""
    values = {"load": url, "checkpoint_staging_dir": str(staging / "run")}
    _, _, problems = make_plan(Config().with_values(values))
    with pytest.raises(UserError) as refused:
        recognize(Path(staged_location(url, str(staging / "tool"), print)))
    return codes([*problems, *refused.value.problems])


BY_URL = (
    "DeepSpeed of Trainer",
    "DeepSpeed, pipeline of another program",
    "Levanter",
    "MLX, quantized",
    "MaxText",
    "Megatron Bridge",
    "NeMo 1",
    "NeMo 2",
    "nanoGPT",
)


@pytest.mark.parametrize("name", BY_URL)
def test_by_url_it_is_refused_by_the_same_name(name: str, tmp_path: Path) -> None:
    """Also if it has the pointers and folders that this program has, too."""
    system = fsspec.filesystem("memory")
    system.put(str(write_tree(name, tmp_path / "files")), f"/{tmp_path.name}", recursive=True)
    found = problems_of_load(f"memory://{tmp_path.name}", tmp_path)
    assert found == [TREES[name]["code"]] * 2
    system.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.proof
def test_of_a_server_it_is_refused_by_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path / "log") as variables:
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        for number, name in enumerate(("Megatron Bridge", "NeMo 2")):
            url = f"s3://{BUCKET}/{number}"
            folder = write_tree(name, tmp_path / name)
            for path in (path for path in folder.rglob("*") if path.is_file()):
                ObjectStore(url).upload(path, str(path.relative_to(folder)))
            assert problems_of_load(url, tmp_path) == [TREES[name]["code"]] * 2


@pytest.mark.parametrize("case", ["mlm25_tp1", "ms_pipe_tp2"])
def test_what_megatron_writes_is_loaded_by_url(
    case: str, megatron_checkpoints: Path, tmp_path: Path
) -> None:
    """With a pointer to a folder of Megatron-LM, or of a fork on DeepSpeed."""
    system = fsspec.filesystem("memory")
    system.put(str(megatron_checkpoints / case), f"/{tmp_path.name}", recursive=True)
    url = f"memory://{tmp_path.name}"
    values = {"load": url, "checkpoint_staging_dir": str(tmp_path / "run")}
    _, plan, problems = make_plan(Config().with_values(values))
    assert not problems
    assert plan.imported is not None
    staged = Path(staged_location(url, str(tmp_path / "tool"), print))
    assert open_source(staged).path.is_relative_to(staged)
    system.rm(f"/{tmp_path.name}", recursive=True)


class RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    torch.save({"model_args": RunsCode(ran), "iter_num": 1}, folder / "ckpt.pt")
    (folder / ".metadata").write_bytes(pickle.dumps({"tok_embeddings.weight": RunsCode(ran)}))
    (folder / "__0_0.distcp").touch()
    assert "tok_embeddings.weight" in FolderContents(folder).distributed_names
    assert {"model_args", "iter_num"} <= pickled_texts(folder / "ckpt.pt")
    assert find_foreign(folder) is not None
    assert not ran.exists()


def test_damaged_files_are_of_no_format(tmp_path: Path) -> None:
    """Truncated at any place, and folders, pipes and unreadable JSON with the names of files."""
    write_tree("nanoGPT", tmp_path / "whole")
    content = (tmp_path / "whole" / "ckpt.pt").read_bytes()
    part = tmp_path / "part" / "ckpt.pt"
    part.parent.mkdir()
    for size in range(0, len(content), 97):
        part.write_bytes(content[:size])
        find_foreign(part.parent)
    shutil.rmtree(part.parent)
    for name in ("ckpt.pt", "config.json", "metadata.json", "model.safetensors", "x.gguf"):
        (part.parent / name).mkdir(parents=True)
    (part.parent / "adapter_config.json").write_text("[" * 10**5)
    (part.parent / "huge.safetensors").write_bytes(b"\xff" * 64)
    assert find_foreign(part.parent) is None
    assert find_foreign(tmp_path / "nowhere") is None
