"""Loads the model and tokenizer of a checkpoint, or of weights in any format, for generation.

The checkpoint itself determines both; it may have any tensor-parallel size and ZeRO stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatron_ds.checkpoint.files.full_weights import load_full_weights
from megatron_ds.config import ModelConfig, TokenizerConfig
from megatron_ds.config.problems import raise_if_any, user_error
from megatron_ds.conversion.native import DTYPES
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.end_tokens import KEY, ids_of, read_end_tokens


def tokenizer_config(source: SourceCheckpoint, overrides: Mapping[str, Any]) -> TokenizerConfig:
    """The tokenizer of the weights, with some fields replaced.

    Code in its files runs only if this is given.

    Raises:
        UserError: If the tokenizer runs code.
    """
    config = TokenizerConfig(**{**source.settings.tokenizer, **overrides})
    if config.trust_remote_code and not overrides.get("trust_remote_code"):
        raise user_error("checkpoint-tokenizer-runs-code", path=source.path)
    return config


def load_tokenizer(
    config: TokenizerConfig, model: ModelConfig, *, may_be_smaller: bool = False
) -> Tokenizer:
    """Builds the tokenizer of a model.

    Args:
        config: Kind and files.
        model: The model.
        may_be_smaller: Whether the model may have rows for more ids than the tokenizer.

    Raises:
        UserError: If its files are missing or its vocabulary is not the model's.
    """
    # A NullTokenizer's end-of-document id is not counted in its --vocab-size.
    uncounted = config.tokenizer_type == "NullTokenizer"
    tokenizer = build_tokenizer(config, model.vocab_size - uncounted)
    size = tokenizer.vocab_size
    vocab_size = model.vocab_size
    if size != vocab_size and not (may_be_smaller and size < vocab_size):
        raise user_error(
            "tokenizer-does-not-match-model", vocab_size=size, model_vocab_size=vocab_size
        )
    return tokenizer


def end_tokens(source: SourceCheckpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids at which the model ends texts, as its generation_config.json or config.json has them.

    They are in a folder of Hugging Face, or next to the tokenizer that a run keeps of one.

    Raises:
        UserError: If one of these files is damaged.
    """
    settings = source.settings
    ids = ids_of(settings.generation.get(KEY), source.path)
    if not ids and settings.model_type is not None:
        ids = ids_of(settings.special_ids.get(KEY), source.path)
    ids = ids or read_end_tokens(tokenizer.folder)
    # Some files have -1 for none.
    return frozenset(token for token in ids if 0 <= token < settings.model.vocab_size)


def load_model(
    source: SourceCheckpoint, mesh: Mesh, device: torch.device, *, precision: str | None = None
) -> GPTModel:
    """Loads this rank's shard of a model that will not be trained.

    Args:
        source: The weights.
        mesh: Its tensor-parallel group may differ from the training run's.
        device: Device of the parameters.
        precision: "fp32", "bf16" or "fp16" (default: the source's).

    Raises:
        UserError: If the model cannot be sharded over this many ranks.
    """
    config = source.settings.model
    raise_if_any(config.problems(mesh.tp.size))
    dtype = source.dtype if precision is None else DTYPES[precision]
    # Dropped tokens would depend on how many tokens are computed at a time.
    moe = dataclasses.replace(source.settings.moe, moe_token_dropping=False)
    rng = RngStreams(mesh.tp.rank, device)
    model = GPTModel(config, mesh=mesh, rng=rng, seed=None, moe=moe)
    model = model.to(device=device, dtype=dtype)
    weights = ((name, tensor.read()) for name, tensor in source.tensors.items())
    load_full_weights(model, weights, mesh.tp.rank, mesh.tp.size)
    return model.requires_grad_(False).eval()
