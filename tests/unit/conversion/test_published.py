"""What a Hugging Face model says of itself, after a training that began with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.metadata import Checkpoint, DataOrder, ParallelLayout, RunRecord
from megatron_ds.config import CheckpointConfig, Config, ScheduleConfig
from megatron_ds.conversion.huggingface.read_write import GENERATION, open_hf, write_hf
from megatron_ds.conversion.native import settings_of
from megatron_ds.conversion.safetensors_files import SINGLE, open_safetensors
from megatron_ds.conversion.source import SourceCheckpoint, WriteOptions
from megatron_ds.conversion.weights_folder import open_weights_folder, write_weights_folder
from megatron_ds.conversion.weights_locations import HF_CONFIG
from megatron_ds.loading.plan import make_plan
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint
from megatron_ds.train_state import TrainState
from tests.unit.conversion.hf_models import VOCAB, load_strictly, logits_of, random_model
from tests.unit.conversion.test_huggingface import change_config, saved, tensors_in

LENGTH = 16
"""Sequence length of the training."""


def trained(load: str, folder: Path, values: dict[str, Any], end: int | None) -> SourceCheckpoint:
    """The checkpoint of a run that starts with the weights of a folder, with the same weights.

    Args:
        load: Value of --load.
        folder: Folder of the checkpoint.
        values: Given options, besides the sequence length.
        end: Id that ends a document. None: no tokenizer.
    """
    options = CheckpointConfig(load=load, override_rope=True)
    config = Config(
        checkpoint=options, schedule=ScheduleConfig(micro_batch_size=1, global_batch_size=1)
    )
    given = {"seq_length": LENGTH, **values}
    config = dataclasses.replace(config.with_values(given), given=frozenset(given))
    config, plan, problems = make_plan(config)
    assert problems == []
    assert plan.imported is not None
    fingerprint = None if end is None else TokenizerFingerprint("kind", {}, VOCAB, end)
    run = RunRecord(
        state=TrainState(),
        config=config.with_vocab(VOCAB).to_dict(),
        layout=ParallelLayout.of(config, 1),
        data_order=DataOrder.of(config, 1),
        shards={},
        branch=Lineage.new(),
        tokenizer=fingerprint,
        published=config.published,
    )
    run = RunRecord.from_dict(json.loads(json.dumps(run.to_dict())))
    settings = settings_of(Checkpoint(folder, run))
    return dataclasses.replace(plan.imported, path=folder, format="native", settings=settings)


def exported(source: SourceCheckpoint, folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """config.json and generation_config.json of an export, and its warnings."""
    warnings: list[str] = []
    write_hf(source, folder, WriteOptions(warn=warnings.append))
    files = [json.loads((folder / name).read_text()) for name in (HF_CONFIG, GENERATION)]
    return files[0], files[1], "\n".join(warnings)


def published(folder: Path, name: str = "phi3") -> Path:
    """A model with end tokens, generation settings and a license."""
    model = random_model(name)
    model.generation_config.update(do_sample=True, temperature=0.6, eos_token_id=[1, 2])
    model.save_pretrained(folder)
    change_config(folder, bos_token_id=4, eos_token_id=1, pad_token_id=3)
    (folder / "LICENSE").write_text("All rights.")
    (folder / "README.md").write_text("A model.")
    return folder


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_trained_model_is_exported_as_it_was_published(tmp_path: Path, is_chain: bool) -> None:
    """Claim (conversion): an export of a run that began with a Hugging Face model has its family,
    positions, special tokens and settings of generation, and names what it does not have"""
    theirs = published(tmp_path / "theirs")
    load = f"hf:{theirs}"
    if is_chain:
        write_weights_folder(open_hf(theirs), tmp_path / "native")
        load = str(tmp_path / "native")
    source = trained(load, tmp_path / "run", {}, end=1)
    if is_chain:
        write_weights_folder(source, tmp_path / "again")
        source = open_weights_folder(tmp_path / "again")
    assert source.settings.model.seq_length == LENGTH
    config, generation, warnings = exported(source, tmp_path / "hf")
    before = json.loads((theirs / HF_CONFIG).read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    for key in ("model_type", "max_position_embeddings", *ids):
        assert config[key] == before[key], key
    assert (generation["eos_token_id"], generation["temperature"]) == ([1, 2], 0.6)
    (line,) = [line for line in warnings.splitlines() if str(theirs) in line]
    assert ": LICENSE; README.md" in line
    loaded = load_strictly(tmp_path / "hf")
    assert (logits_of(loaded) == logits_of(load_strictly(theirs))).all()


def test_positions_hold_only_for_the_same_rotation(tmp_path: Path) -> None:
    load = f"hf:{saved(tmp_path / 'theirs')}"
    for number, (values, positions, is_lost) in enumerate(
        [
            ({"max_position_embeddings": 32}, 64, False),
            ({"seq_length": 128}, 128, False),
            ({"rotary_base": 900.0}, LENGTH, True),
            ({"rotary_seq_len_interpolation_factor": 2.0}, LENGTH, True),
        ]
    ):
        source = trained(load, tmp_path / "run", values, end=None)
        config, _, warnings = exported(source, tmp_path / str(number))
        assert config["max_position_embeddings"] == positions, values
        assert ("max_position_embeddings 64" in warnings) == is_lost, values


def test_token_ids_of_another_tokenizer_are_not_kept(tmp_path: Path) -> None:
    theirs = published(tmp_path / "theirs", "llama")
    source = trained(f"hf:{theirs}", tmp_path / "run", {}, end=7)
    config, generation, warnings = exported(source, tmp_path / "other end")
    assert (config["bos_token_id"], config["eos_token_id"]) == (4, 7)
    assert "eos_token_id" not in generation
    assert "eos_token_id [1, 2]" in warnings

    (theirs / "tokenizer.json").write_text("{}")
    values = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB}
    source = trained(f"hf:{theirs}", tmp_path / "run", values, end=7)
    config, generation, warnings = exported(source, tmp_path / "other tokenizer")
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] == 7
    assert generation["temperature"] == 0.6
    assert "another tokenizer" in warnings


@pytest.mark.parametrize("has_prefix", [False, True])
def test_names_have_the_prefix_of_the_published_files(tmp_path: Path, has_prefix: bool) -> None:
    from safetensors.torch import save_file

    theirs = saved(tmp_path / "theirs", "gpt2")
    names = {
        key if has_prefix else key.removeprefix("transformer."): tensor
        for key, tensor in tensors_in(theirs).items()
    }
    save_file(names, theirs / SINGLE)
    source = trained(f"hf:{theirs}", tmp_path / "run", {"seq_length": 24}, end=1)
    exported(source, tmp_path / "hf")
    assert open_safetensors(tmp_path / "hf" / SINGLE).keys() == names.keys()
    assert (logits_of(load_strictly(tmp_path / "hf")) == logits_of(random_model("gpt2"))).all()
