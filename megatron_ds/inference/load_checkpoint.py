"""Loads a checkpoint's model and tokenizer for generation.

The checkpoint itself determines both; it may have any tensor-parallel size and ZeRO stage.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron_ds.checkpoint import full_weights
from megatron_ds.checkpoint.metadata import CheckpointMetadata
from megatron_ds.checkpoint.saved_model import model_config, moe_config
from megatron_ds.config import ModelConfig, TokenizerConfig
from megatron_ds.config.problems import raise_if_any, user_error
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.tokenizer import Tokenizer, build_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
