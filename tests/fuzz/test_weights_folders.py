"""Arbitrary JSON in the files of weights is rejected with a problem that names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ds.config import ModelConfig
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.megatron.detect import detect_megatron
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.safetensors_files import INDEX, SINGLE
from megatron_ds.conversion.weights_folder import open_weights_folder, write_weights_folder
from megatron_ds.conversion.weights_locations import HF_CONFIG, SETTINGS
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, JSON, MISSING, paths_in, read_or_error, replaced
from tests.unit.conversion.megatron_writer import Layout, write_checkpoint
from tests.unit.conversion.models import SMALL, random_source

SETTINGS_OF_FUZZ = settings(FUZZ_SETTINGS, suppress_health_check=[HealthCheck.too_slow])
LLAMA = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
LLAMA |= {"activation": "swiglu", "add_bias_linear": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("weights")
    source = random_source(ModelConfig(**SMALL, **LLAMA))
    write_hf(source, parent / "hf")
    write_weights_folder(source, parent / "ours")
    shutil.copytree(parent / "hf", parent / "indexed")
    return parent


def changed(values: Any, data: st.DataObject) -> Any:
    path = data.draw(st.sampled_from(paths_in(values)))
    return replaced(values, path, data.draw(JSON | st.just(MISSING) if path else JSON))


def check(folder: Path) -> None:
    """The folder is rejected, or all of its tensors can be read."""

    def read() -> None:
        source = (open_hf if (folder / HF_CONFIG).exists() else open_weights_folder)(folder)
        for name, tensor in source.tensors.items():
            assert tuple(tensor.read().shape) == tensor.shape, name

    read_or_error(read, str(folder), "weights", "layers.", "embedding.", "norm", "head.")


@SETTINGS_OF_FUZZ
@given(data=st.data())
@pytest.mark.parametrize(("kind", "name"), [("hf", HF_CONFIG), ("ours", SETTINGS)])
def test_changed_settings_are_rejected_or_read(
    folders: Path, kind: str, name: str, data: st.DataObject
) -> None:
    file = folders / kind / name
    original = file.read_text()
    try:
        file.write_text(json.dumps(changed(json.loads(original), data)))
        check(folders / kind)
    finally:
        file.write_text(original)


@SETTINGS_OF_FUZZ
@given(data=st.data())
def test_changed_headers_of_tensors_are_rejected_or_read(
    folders: Path, data: st.DataObject
) -> None:
    file = folders / "hf" / SINGLE
    original = file.read_bytes()
    length = int.from_bytes(original[:8], "little")
    header = json.dumps(changed(json.loads(original[8 : 8 + length]), data)).encode()
    size = data.draw(st.sampled_from([len(header), 0, len(header) + 9, 2**63]))
    try:
        file.write_bytes(size.to_bytes(8, "little") + header + original[8 + length :])
        check(folders / "hf")
    finally:
        file.write_bytes(original)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ModelConfig(**SMALL)
    moments = {name: random_source(config) for name in ("exp_avg", "exp_avg_sq")}
    folder = tmp_path_factory.mktemp("megatron")
    return write_checkpoint(folder, config, random_source(config), Layout(), moments)


@SETTINGS_OF_FUZZ
@given(data=st.data())
def test_changed_states_of_megatron_are_rejected_or_read(
    megatron: Path, data: st.DataObject
) -> None:
    (file,) = megatron.rglob("model_optim_rng.pt")
    original = file.read_bytes()
    state = torch.load(file, weights_only=False)
    state["args"] = vars(state["args"])
    found: Any = detect_megatron(megatron)

    def read() -> None:
        model = open_megatron(found.path)
        for tensors in (model.checked().tensors, *model.optimizer.values()):
            for name, tensor in tensors.items():
                assert tuple(tensor.read().shape) == tensor.shape, name

    try:
        torch.save(changed(state, data), file)
        read_or_error(read, str(megatron), "weights", "layers.", "embedding.", "norm", "version")
    finally:
        file.write_bytes(original)


@SETTINGS_OF_FUZZ
@given(content=JSON)
def test_any_index_is_rejected_or_read(folders: Path, content: Any) -> None:
    folder = folders / "indexed"
    for index in (content, {"weight_map": content}, {"weight_map": {"x": content}}):
        (folder / INDEX).write_text(json.dumps(index))
        check(folder)
