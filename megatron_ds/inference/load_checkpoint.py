"""Loads a checkpoint's model and tokenizer for generation.

The checkpoint itself determines both; it may have any tensor-parallel size and ZeRO stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_ds.checkpoint import full_weights, metadata, selection, storage
from megatron_ds.checkpoint.metadata import RUN, TOKENIZER, CheckpointMetadata
from megatron_ds.config import ModelConfig, MoEConfig, TokenizerConfig
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.stored_files import with_copies

Settings = TypeVar("Settings", ModelConfig, MoEConfig, TokenizerConfig)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find_checkpoint(folder: Path, warn: Callable[[str], None]) -> CheckpointMetadata:
    """Selects the last undamaged checkpoint of a --save folder, or the folder's own.

    The files with weights are checked against their checksums.

    Args:
        folder: A --save folder, or the folder of one checkpoint.
        warn: Called with a line for each newer checkpoint that is damaged.

    Raises:
        UserError: If there is none.
    """
    is_checkpoint = (folder / RUN).is_file()
    if is_checkpoint:
        listing = selection.CheckpointListing(folder, (folder,))
    else:
        listing = selection.list_folder(folder)
    found = selection.select_checkpoint(
        listing, None, _find_damage, lambda problem: warn(f"WARNING: {problem.render()}")
    )
    assert found is not None
    return found


def _find_damage(path: Path) -> Problem | None:
    try:
        if (damage := metadata.find_damage(path)) is not None:
            return damage
        files = full_weights.files_with_weights(metadata.read_run(path))
        return storage.files_damaged(storage.find_damaged_files(path, files))
    except OSError as error:
        return metadata.unreadable_checkpoint(error)  # a running training may have removed it


def model_config(found: CheckpointMetadata) -> ModelConfig:
    """The model's configuration.

    Raises:
        UserError: If the checkpoint has a field unknown to this version.
    """
    return _from_dict(ModelConfig, found.run.config["model"], found)


def moe_config(found: CheckpointMetadata) -> MoEConfig:
    """The model's mixture of experts.

    Raises:
        UserError: If the checkpoint has a field unknown to this version.
    """
    values = dict(found.run.config.get("moe", {}))
    if "num_experts" in values:
        values["num_experts"] = tuple(values["num_experts"])
    return _from_dict(MoEConfig, values, found)


def tokenizer_config(found: CheckpointMetadata, given: Mapping[str, Any]) -> TokenizerConfig:
    """The training's tokenizer configuration, with some fields replaced.

    The tokenizer's files are those in the checkpoint. Code in them runs only if this is given.

    Raises:
        UserError: If the checkpoint has a field unknown to this version, or runs code.
    """
    saved = with_copies(found.run.config["tokenizer"], found.path / TOKENIZER)
    config = _from_dict(TokenizerConfig, {**saved, **given}, found)
    if config.trust_remote_code and not given.get("trust_remote_code"):
        raise user_error("checkpoint-tokenizer-runs-code", path=found.path)
    return config


def load_tokenizer(config: TokenizerConfig, model: ModelConfig) -> Tokenizer:
    """Builds the tokenizer of a model.

    Raises:
        UserError: If its files are missing or its vocabulary is not the model's.
    """
    # A NullTokenizer's end-of-document id is not counted in its --vocab-size.
    uncounted = config.tokenizer_type == "NullTokenizer"
    tokenizer = build_tokenizer(config, model.vocab_size - uncounted)
    size, wanted = tokenizer.vocab_size, model.vocab_size
    if size != wanted:
        raise user_error("tokenizer-does-not-match-model", vocab_size=size, model_vocab_size=wanted)
    return tokenizer


def load_model(
    found: CheckpointMetadata, mesh: Mesh, device: torch.device, *, precision: str | None = None
) -> GPTModel:
    """Loads this rank's shard of a checkpoint's model.

    Args:
        found: The checkpoint.
        mesh: Its tensor-parallel group may differ from the training's.
        device: Device of the parameters.
        precision: "fp32", "bf16" or "fp16" (default: the training's).

    Raises:
        UserError: If the model cannot be sharded over this many ranks.
    """
    config = model_config(found)
    raise_if_any(config.problems(mesh.tp.size))
    dtype = DTYPES[precision or found.run.layout.precision]
    # Dropped tokens would depend on how many tokens are computed at a time.
    moe = dataclasses.replace(moe_config(found), moe_token_dropping=False)
    rng = RngStreams(mesh.tp.rank, device)
    model = GPTModel(config, mesh=mesh, rng=rng, seed=None, moe=moe)
    model = model.to(device=device, dtype=dtype)
    weights = full_weights.iter_full_weights(found)
    full_weights.load_full_weights(model, weights, mesh.tp.rank, mesh.tp.size)
    return model.eval()


def _from_dict(
    kind: type[Settings], values: Mapping[str, Any], found: CheckpointMetadata
) -> Settings:
    known = {item.name for item in dataclasses.fields(kind)}
    if unknown := ", ".join(sorted(values.keys() - known)):
        path, group = found.path / RUN, kind.__name__
        raise user_error("checkpoint-of-newer-version", path=path, group=group, unknown=unknown)
    return kind(**values)
