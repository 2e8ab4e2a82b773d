"""The native folder of weights: what is written is read, or the folder is rejected."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ds.checkpoint.metadata import MANIFEST, manifest_text, read_manifest
from megatron_ds.config import ModelConfig
from megatron_ds.conversion.native import is_native
from megatron_ds.conversion.safetensors_files import INDEX, SINGLE, open_safetensors, write_sharded
from megatron_ds.conversion.source import WriteOptions
from megatron_ds.conversion.weights_folder import (
    check_checksums,
    open_weights_folder,
    write_weights_folder,
)
from megatron_ds.conversion.weights_locations import SETTINGS, is_weights_folder
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.fileio.atomic import FileRecord
from tests.problems import raises_problem
from tests.unit.conversion.models import SMALL, assert_same_tensors, random_source
from tests.unit.tokenizer.test_tokenizers import gpt2_files

CONFIG = ModelConfig(
    **SMALL,
    activation="swiglu",
    position_embedding_type="rope",
    rotary_base=500.0,
    untie_embeddings_and_output_weights=True,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_weights_folder(random_source(CONFIG), tmp_path / "weights")
    return tmp_path / "weights"


def write_settings(folder: Path, values: dict[str, Any]) -> None:
    """Replaces the settings, with their entry in the manifest."""
    content = json.dumps(values).encode()
    files = read_manifest(folder) | {SETTINGS: FileRecord.of(content)}
    (folder / SETTINGS).write_bytes(content)
    (folder / MANIFEST).write_text(manifest_text(files))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_weights_and_settings_are_kept(
    tmp_path: Path, dtype: torch.dtype | None, shard_bytes: int
) -> None:
    source = random_source(CONFIG).to(dtype)
    folder = tmp_path / "weights"
    write_weights_folder(source, folder, WriteOptions(shard_bytes=shard_bytes))

    found = open_weights_folder(folder)

    assert (folder / INDEX).is_file() == (shard_bytes < 10**9)
    assert_same_tensors(found, source)
    assert found.settings == source.settings
    assert found.settings.model.rotary_base == 500.0
    assert check_checksums(folder) is None
    assert is_weights_folder(folder)
    assert not is_native(folder)


def test_the_parts_of_fused_tensors_are_declared(folder: Path) -> None:
    """Claim (checkpoints): the parts of fused matrices are declared in checkpoints and folders of
    weights, and another order is rejected"""
    values = json.loads((folder / SETTINGS).read_text())
    expected = {"mlp.fc_in": ["gate", "up"], "attention.qkv": ["query", "key", "value"]}
    assert values["parts"] == {
        f"layers.{layer}.{module}.{kind}": parts
        for layer in range(CONFIG.num_layers)
        for module, parts in expected.items()
        for kind in ("weight", "bias")
    }
    del values["parts"]  # as in folders of older versions
    write_settings(folder, values)
    assert_same_tensors(open_weights_folder(folder), random_source(CONFIG))


def test_the_tokenizer_is_copied(tmp_path: Path) -> None:
    tokenizer = gpt2_files(tmp_path)
    write_weights_folder(random_source(CONFIG, tokenizer), tmp_path / "weights")
    content = Path(str(tokenizer.vocab_file)).read_bytes()
    os.rename(tmp_path / "weights", tmp_path / "moved")

    copied = open_weights_folder(tmp_path / "moved").settings.tokenizer_config

    assert Path(str(copied.vocab_file)).is_relative_to(tmp_path / "moved")
    assert Path(str(copied.vocab_file)).read_bytes() == content


def test_the_safetensors_library_reads_the_files_and_the_other_way_round(tmp_path: Path) -> None:
    values = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3, 3).to(torch.bfloat16),
        "strided": torch.randn(4, 6).t(),
    }
    write_sharded(tmp_path, {name: TensorReader.of(value) for name, value in values.items()})

    content = (tmp_path / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            start = 8 + length + entry["data_offsets"][0]
            assert start % values[name].element_size() == 0, name
    for name, found in load_file(tmp_path / SINGLE).items():
        assert torch.equal(found, values.pop(name))
    assert not values
    assert open_safetensors(tmp_path / SINGLE)["scalar"].read() == 2.5


def test_a_damaged_tensor_is_found_by_its_checksum(folder: Path) -> None:
    content = bytearray((folder / SINGLE).read_bytes())
    content[-1] ^= 1
    (folder / SINGLE).write_bytes(content)

    damage = check_checksums(folder, [folder / "weights.json"])

    assert damage.code == "checkpoint-files-damaged"
    assert check_checksums(folder, [folder / SINGLE]) is None  # compared elsewhere


@pytest.mark.parametrize("cut", [-1, 4, 40])
def test_a_truncated_file_is_rejected(folder: Path, cut: int) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:cut])
    with raises_problem("foreign-file-unreadable"):
        open_safetensors(folder / SINGLE)
    with raises_problem("checkpoint-file-size"):
        open_weights_folder(folder)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"format_version": 99}, "checkpoint-of-other-format"),
        ({"fixed": {"wheels": 4}}, "checkpoint-of-newer-version"),
        ({"fixed": None}, "foreign-file-unreadable"),
        ({"parts": ["gate", "up"]}, "foreign-file-unreadable"),
        ({"parts": {"layers.0.mlp.fc_in.weight": ["up", "gate"]}}, "fused-parts-changed"),
    ],
)
def test_settings_of_other_versions_are_rejected(
    folder: Path, change: dict[str, Any], code: str
) -> None:
    write_settings(folder, json.loads((folder / SETTINGS).read_text()) | change)
    with raises_problem(code):
        open_weights_folder(folder)


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    """Claim (conversion): an output folder appears complete or not at all"""
    source = random_source(CONFIG)

    def fail() -> torch.Tensor:
        raise OSError("the disk is full")

    broken = TensorReader.full((32,), torch.float32, fail)
    tensors = {**source.tensors, "final_norm.weight": broken}
    with pytest.raises(OSError, match="full"):
        write_weights_folder(dataclasses.replace(source, tensors=tensors), tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_not_replaced(folder: Path) -> None:
    with raises_problem("output-folder-not-empty", "save"):
        write_weights_folder(random_source(CONFIG), folder)
    assert check_checksums(folder) is None


@pytest.mark.parametrize("name", ["layers.0.mlp.fc_in.weight", "head.weight"])
def test_names_and_shapes_are_checked_before_anything_is_read(name: str) -> None:
    source = random_source(CONFIG)
    other = {**source.tensors, name: TensorReader.of(torch.zeros(7, 32))}
    with raises_problem("weights-shape-mismatch", contains=name):
        dataclasses.replace(source, tensors=other).checked()
    del other[name]
    with raises_problem("weights-names-mismatch", contains=name):
        dataclasses.replace(source, tensors=other).checked()


def test_padding_of_the_vocabulary_is_removed() -> None:
    source = random_source(CONFIG)
    padded = {
        name: TensorReader.of(torch.nn.functional.pad(tensor.read(), (0, 0, 0, 14)))
        if name in ("embedding.word.weight", "head.weight")
        else tensor
        for name, tensor in source.tensors.items()
    }
    assert_same_tensors(dataclasses.replace(source, tensors=padded).checked(), source)
