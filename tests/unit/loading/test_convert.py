"""The command line of tools/convert_checkpoint.py: every pair of formats, and what it rejects."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_ds.config import ModelConfig
from megatron_ds.config.options.checkpoint import FORMATS, WRITTEN_FORMATS
from megatron_ds.conversion import convert, registry
from megatron_ds.conversion.huggingface.families import FAMILIES
from megatron_ds.conversion.huggingface.read_write import write_hf
from megatron_ds.conversion.registry import open_source, recognize
from megatron_ds.conversion.safetensors_files import SINGLE
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.conversion.weights_folder import write_weights_folder
from megatron_ds.conversion.weights_locations import GGUF_ENDING, HF_CONFIG
from megatron_ds.loading.programs import convert as program
from megatron_ds.loading.programs.convert_options import MODEL_TYPES
from tests.pages import flags as flags_page
from tests.problems import printed_codes, raises_problem
from tests.unit.conftest import Run
from tests.unit.conversion.foreign_trees import write_tree
from tests.unit.conversion.hf_models import load_strictly, random_model
from tests.unit.conversion.models import SMALL, assert_same_tensors, random_source

LLAMA = SMALL | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
"""A model that all formats have."""
TOOL = program
FOLDER = "convert_checkpoint"


def test_weights_come_back_from_every_format(tmp_path: Path, run: Run) -> None:
    """From each format, each verified; with the printed sizes.

    Claim (conversion): weights come back from every format, and `--verify` finds a changed tensor
    """
    random_model("qwen2").save_pretrained(tmp_path / "0")
    formats = ["native", "hf", "torch_dist", "megatron", "hf", "hf", "native"]
    for number, target in enumerate(formats):
        load = tmp_path / str(number)
        save = tmp_path / str(number + 1)
        printed = run("--load", load, "--save", save, "--to", target, "--verify")
        assert f"wrote {save}" in printed.out
        assert recognize(save).name == target
        assert printed_codes(printed.err) == ["hf-tokenizer-not-exported"] * (target == "hf")

    assert_same_tensors(open_source(tmp_path / "7"), open_source(tmp_path / "0"))


def test_the_type_and_the_family_can_be_chosen(tmp_path: Path, run: Run) -> None:
    random_model("llama").save_pretrained(tmp_path / "theirs")
    flags = ["--to", "hf", "--hf-model-type", "mistral", "--dtype", "bf16", "--verify"]
    run("--load", tmp_path / "theirs", "--save", tmp_path / "new", *flags)
    assert load_strictly(tmp_path / "new", dtype="auto").dtype == torch.bfloat16
    assert load_strictly(tmp_path / "new").config.model_type == "mistral"


def test_every_family_can_be_chosen() -> None:
    assert tuple(FAMILIES) == MODEL_TYPES


def test_states_are_converted_where_there_are_any(
    tmp_path: Path, run: Run, megatron_checkpoints: Path
) -> None:
    """By default, the output has the weights alone."""
    flags = ("--load", megatron_checkpoints / "mlm25_tp1", "--to", "torch_dist", "--verify")
    run(*flags, "--save", tmp_path / "weights")
    run(*flags, "--save", tmp_path / "states", "--optimizer-states", "--target-adam", "torch")
    weights = open_source(tmp_path / "weights")
    states = open_source(tmp_path / "states")
    assert (weights.path.name, states.path.name) == ("release", "iter_0000003")
    assert_same_tensors(weights, states)
    random_model("llama").save_pretrained(tmp_path / "theirs")
    save = ("--save", tmp_path / "new")
    for source in ("weights", "theirs"):
        flags = ("--load", tmp_path / source, *save, "--to", "megatron", "--optimizer-states")
        assert printed_codes(run(*flags, status=1).err) == ["conversion-without-states"]
    flags = ("--load", tmp_path / "theirs", *save, "--to", "hf", "--optimizer-states")
    assert printed_codes(run(*flags).err)[0] == "no-effect"


def test_a_wrong_tensor_is_found_by_the_verification(tmp_path: Path) -> None:
    """Claim (conversion): weights come back from every format, and `--verify` finds a changed
    tensor"""
    source = random_source(ModelConfig(**SMALL))
    write_hf(source, tmp_path / "new")
    assert convert.verify(source, tmp_path / "new", "hf") < 1e-5
    tensors = load_file(tmp_path / "new" / SINGLE)
    tensors["h.1.mlp.c_fc.weight"][0, 0] += 1.0
    save_file(tensors, tmp_path / "new" / SINGLE, {"format": "pt"})
    with raises_problem("conversion-differs"):
        convert.verify(source, tmp_path / "new", "hf")


def test_the_verification_loads_no_code_and_uses_no_network(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def connect(*arguments: object) -> None:
        raise AssertionError(f"a connection to {arguments[1:]}")

    def record(*arguments: Any, **options: Any) -> Any:
        offline.append(huggingface_hub.is_offline_mode())
        return original(*arguments, **options)

    offline: list[bool] = []
    original = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", record)
    monkeypatch.setattr(socket.socket, "connect", connect)
    theirs = tmp_path / "theirs"
    random_model("llama").save_pretrained(theirs)
    code = {
        name: f"other/repository--evil.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")
    }
    values = json.loads((theirs / HF_CONFIG).read_text())
    values |= {"_attn_implementation": "kernels-community/evil", "auto_map": code}
    (theirs / HF_CONFIG).write_text(json.dumps(values))
    before = huggingface_hub.is_offline_mode()
    run("--load", theirs, "--save", tmp_path / "new", "--to", "native", "--verify")
    assert offline == [True]
    assert huggingface_hub.is_offline_mode() == before


def test_wrong_folders_are_rejected(tmp_path: Path, run: Run) -> None:
    def codes(*flags: object, status: int = 1) -> list[str]:
        return printed_codes(run(*flags, "--save", tmp_path / "new", status=status).err)

    (tmp_path / "empty").mkdir()
    assert codes("--load", tmp_path / "gone", "--to", "hf", status=2) == ["load-folder-missing"]
    assert codes("--load", tmp_path / "empty", "--to", "huggingface") == ["weights-format-unknown"]
    foreign = write_tree("nanoGPT", tmp_path / "foreign")
    for flags in ((), ("--from", "hf"), ("--from", "megatron")):
        for load in (foreign, foreign / "ckpt.pt"):
            found = codes("--load", load, *flags, "--to", "native", status=2)
            assert found == ["foreign-nanogpt"]
    url = f"file://{tmp_path}/gone"
    errors = run("--load", url, "--to", "hf", "--save", tmp_path / "new", status=1).err
    assert f"--load {url}: " in errors  # not its staging folder
    assert printed_codes(errors) == ["weights-format-unknown"]
    prefixed = ("--load", f"hf:{tmp_path / 'empty'}", "--to", "hf")
    assert codes(*prefixed) == ["hf-folder-without-config"]
    for name, code in (("native", "checkpoint-missing"), ("hf", "hf-folder-without-config")):
        assert codes("--load", tmp_path / "empty", "--from", name, "--to", "hf") == [code]
    write_weights_folder(random_source(ModelConfig(**SMALL)), tmp_path / "ours")
    (tmp_path / "ours" / "weights.json").write_text("{}")
    assert codes("--load", tmp_path / "ours", "--to", "hf") == ["checkpoint-files-damaged"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [name for name in WRITTEN_FORMATS if name != "universal"])
@pytest.mark.parametrize("damage", [b"\x00\x00\x00\x3f", b"\x00\x00\xc0\x7f"])
def test_nothing_is_written_of_damaged_weights(
    tmp_path: Path, run: Run, name: str, damage: bytes
) -> None:
    """Weights are compared with their checksums while they are converted.

    Claim (conversion): an output folder appears complete or not at all
    """
    write_weights_folder(random_source(ModelConfig(**LLAMA)), tmp_path / "ours")
    flags = ("--load", tmp_path / "ours", "--to", name, "--save")
    ending = GGUF_ENDING if name == "gguf" else ""
    run(*flags, tmp_path / f"undamaged{ending}")
    before = sorted(tmp_path.iterdir())
    weights = tmp_path / "ours" / SINGLE
    weights.write_bytes(weights.read_bytes()[: -len(damage)] + damage)
    errors = run(*flags, tmp_path / f"new{ending}", status=1).err
    assert "checkpoint-files-damaged" in printed_codes(errors)
    assert f"{SINGLE} does not match its checksum" in errors
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["native", "hf"])
def test_an_output_with_files_is_not_replaced(tmp_path: Path, run: Run, name: str) -> None:
    write_weights_folder(random_source(ModelConfig(**SMALL)), tmp_path / "ours")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("keep me")
    error = run("--load", tmp_path / "ours", "--save", tmp_path / "new", "--to", name, status=1).err
    assert printed_codes(error) == ["output-folder-not-empty"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.txt"]


def test_an_output_may_be_a_link_to_an_empty_folder(tmp_path: Path, run: Run) -> None:
    source = random_source(ModelConfig(**SMALL))
    write_weights_folder(source, tmp_path / "ours")
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/empty")
    run("--load", tmp_path / "ours", "--save", tmp_path / "link", "--to", "native")
    assert_same_tensors(open_source(tmp_path / "disk" / "empty"), source)
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "disk", "link"}


def test_an_output_may_be_an_empty_mount_point(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does, renames of the mount point and to another disk are refused."""
    disk = tmp_path / "disk"
    rename = os.rename
    source = random_source(ModelConfig(**SMALL))
    write_weights_folder(source, tmp_path / "ours")
    disk.mkdir()

    def refuse(one: Path, other: Path) -> None:
        if one == disk or other == disk or one.is_relative_to(disk) != other.is_relative_to(disk):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(other))
        rename(one, other)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == disk)
    run("--load", tmp_path / "ours", "--save", disk, "--to", "native")
    assert_same_tensors(open_source(disk), source)
    assert not list(disk.glob(".*"))


def script(name: str) -> ModuleType:
    """A tool by its path."""
    path = flags_page.REPOSITORY / "tools" / name
    return flags_page.load(path)


def test_the_scripts_of_other_projects_convert(tmp_path: Path, run_tool: Run) -> None:
    """To native and to fp32, and by two names to a model of transformers."""
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    expected = open_source(tmp_path / "theirs")

    def converted(name: str, *flags: object) -> SourceCheckpoint:
        run_tool(script(name), *flags, tmp_path / name)
        return open_source(tmp_path / name)

    native = converted(
        "hf2megads_weight_converter.py", "--hf-ckpt-dir", tmp_path / "theirs", "--save"
    )
    assert_same_tensors(native, expected)
    full = converted("zero_to_fp32.py", "--tag", native.path.name, tmp_path)
    assert_same_tensors(full, expected.to(torch.float32))
    name = f"{FOLDER}/deepspeed_to_transformers.py"
    back = converted(name, "--input_folder", native.path, "--output_folder")
    assert back.format == "hf"
    assert_same_tensors(back, expected)
    name = f"{FOLDER}/deepspeed_to_megatron.py"
    sizes = ("--target_tp", 2, "--target_pp", 2)
    release = converted(name, *sizes, "--input_folder", native.path, "--output_folder")
    assert (release.format, release.path.name) == ("megatron", "release")
    assert len(list(release.path.iterdir())) == 4
    assert_same_tensors(release, expected)
    flags = ["--model-type", "GPT", "--loader", "llama_mistral", "--checkpoint-type", "hf"]
    flags += ["--saver", "core", "--target-tensor-parallel-size", "2", "--bf16"]
    flags += ["--load-dir", str(tmp_path / "theirs"), "--save-dir"]
    release = converted("checkpoint/convert.py", *flags)
    assert (release.format, len(list(release.path.iterdir()))) == ("megatron", 2)
    assert_same_tensors(release, expected)
    (tmp_path / "hf2megads_weight_converter.py").rename(tmp_path / "moved")
    flags = ["--to-hf-ckpt", "--load", tmp_path / "moved", "--save"]
    assert_same_tensors(converted("hf2megads_weight_converter.py", *flags), expected)


def test_a_script_without_a_folder_reports_it(tmp_path: Path, run_tool: Run) -> None:
    module = script("hf2megads_weight_converter.py")
    assert printed_codes(run_tool(module, "--save", tmp_path, status=2).err) == ["required"]


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("hf2megads_weight_converter.py", ["--hf-ckpt-dir"], "--save"),
        ("zero_to_fp32.py", [], "OUTPUT_DIR"),
        ("convert_checkpoint/deepspeed_to_transformers.py", ["--input-folder"], "--output-folder"),
        ("convert_checkpoint/deepspeed_to_megatron.py", ["--input-folder"], "--output-folder"),
        ("checkpoint/convert.py", ["--load-dir"], "--save-dir"),
    ],
)
def test_errors_of_a_script_name_its_own_flags(
    name: str, source: list[str], target: str, tmp_path: Path, run_tool: Run
) -> None:
    random_model("llama").save_pretrained(tmp_path / "theirs")
    (tmp_path / "new" / "file").mkdir(parents=True)
    output = [target] * target.startswith("--") + [tmp_path / "new"]
    error = run_tool(script(name), *source, "no", *output, status=2).err
    assert printed_codes(error) == ["load-folder-missing"]
    error = run_tool(script(name), *source, tmp_path / "theirs", *output, status=1).err
    assert f"\n{target} {tmp_path / 'new'}: it exists" in error


def test_each_format_that_load_can_name_is_read_and_written() -> None:
    writers = [each.name for each in registry.FORMATS if each.write is not None]
    assert sorted(writers) == sorted(WRITTEN_FORMATS)
    assert {each.name for each in registry.FORMATS} == {*FORMATS}
