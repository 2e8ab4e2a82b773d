"""The command line of tools/convert_checkpoint.py: every pair of formats, and what it rejects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ds.checkpoint.formats import convert
from megatron_ds.checkpoint.formats.open_source import format_of, open_source
from megatron_ds.checkpoint.formats.safetensors_files import SINGLE
from megatron_ds.checkpoint.formats.weights_folder import write_weights_folder
from megatron_ds.config import ModelConfig
from tests.problems import printed_codes, raises_problem
from tests.unit.checkpoint.formats.hf_models import load_strictly, random_model
from tests.unit.checkpoint.formats.models import SMALL, assert_same_tensors, random_source
from tests.unit.tools.conftest import Run
from tools import convert_checkpoint

TOOL = convert_checkpoint


def test_weights_come_back_from_every_format(tmp_path: Path, run: Run) -> None:
    """hf to native to hf to hf to native, each verified; with the printed sizes."""
    random_model("qwen2").save_pretrained(tmp_path / "0")
    formats = ["native", "hf", "hf", "native"]
    for number, target in enumerate(formats):
        load, save = tmp_path / str(number), tmp_path / str(number + 1)
        printed = run("--load", load, "--save", save, "--to", target, "--verify")
        assert f"wrote {save}" in printed.out
        assert format_of(save) == target
        assert printed_codes(printed.err) == ["hf-tokenizer-not-exported"] * (target == "hf")

    assert_same_tensors(open_source(tmp_path / "4"), open_source(tmp_path / "0"))


def test_the_type_and_the_family_can_be_chosen(tmp_path: Path, run: Run) -> None:
    random_model("llama").save_pretrained(tmp_path / "theirs")
    flags = ["--to", "hf", "--hf-model-type", "mistral", "--dtype", "bf16", "--verify"]
    run("--load", tmp_path / "theirs", "--save", tmp_path / "new", *flags)
    assert load_strictly(tmp_path / "new", dtype="auto").dtype == torch.bfloat16
    assert load_strictly(tmp_path / "new").config.model_type == "mistral"


def test_sizes_without_a_meaning_are_reported(tmp_path: Path, run: Run) -> None:
    random_model("llama").save_pretrained(tmp_path / "theirs")
    sizes = ["--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2]
    error = run(
        *("--load", tmp_path / "theirs", "--save", tmp_path / "new", "--to", "native"), *sizes
    ).err
    assert printed_codes(error) == ["no-effect"]


def test_a_wrong_tensor_is_found_by_the_verification(tmp_path: Path) -> None:
    source = random_source(ModelConfig(**SMALL))
    target = convert.Target(tmp_path / "new", "hf")
    convert.WRITERS["hf"](source, target, lambda name, size: None)
    assert convert.verify(source, target) < 1e-5
    tensors = load_file(tmp_path / "new" / SINGLE)
    tensors["transformer.h.1.mlp.c_fc.weight"][0, 0] += 1.0
    save_file(tensors, tmp_path / "new" / SINGLE, {"format": "pt"})
    with raises_problem("conversion-differs"):
        convert.verify(source, target)


def test_wrong_folders_are_rejected(tmp_path: Path, run: Run) -> None:
    def codes(*flags: object, status: int = 1) -> list[str]:
        return printed_codes(run(*flags, "--save", tmp_path / "new", status=status).err)

    (tmp_path / "empty").mkdir()
    assert codes("--load", tmp_path / "gone", "--to", "hf", status=2) == ["load-folder-missing"]
    assert codes("--load", tmp_path / "empty", "--to", "hf") == ["weights-format-unknown"]
    for name, code in (
        ("native", "checkpoint-missing"),
        ("hf", "hf-folder-without-config"),
    ):
        assert codes("--load", tmp_path / "empty", "--from", name, "--to", "hf") == [code]
    write_weights_folder(random_source(ModelConfig(**SMALL)), tmp_path / "ours")
    (tmp_path / "ours" / "weights.json").write_text("{}")
    assert codes("--load", tmp_path / "ours", "--to", "hf") == ["checkpoint-files-damaged"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["native", "hf"])
def test_an_output_with_files_is_not_replaced(tmp_path: Path, run: Run, name: str) -> None:
    write_weights_folder(random_source(ModelConfig(**SMALL)), tmp_path / "ours")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("keep me")
    error = run(
        *("--load", tmp_path / "ours", "--save", tmp_path / "new", "--to", name), status=1
    ).err
    assert printed_codes(error) == ["output-folder-not-empty"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.txt"]
