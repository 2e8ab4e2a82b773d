"""Random weights of small models, as a source of no format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.files.full_weights import load_full_weights
from megatron_ds.config import ModelConfig, MoEConfig, TokenizerConfig
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.source import SavedRun, SourceCheckpoint, declared_weights
from megatron_ds.engine.states.state_reader import MASTER, TensorReader
from megatron_ds.model.declaration.architecture import DENSE
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.tables import tables

TABLES = tables(__file__, tuple)

SMALL: dict[str, Any] = TABLES["small"]


LLAMA: dict[str, Any] = TABLES["llama"]
OTHER_LLAMA = {**LLAMA, "kv_channels": 6, "rotary_base": 5000.0}


OF_CORE: dict[str, tuple[dict[str, Any], MoEConfig]] = {
    name: (LLAMA | options["model"], MoEConfig(**options["experts"]))
    for name, options in TABLES["of_core"].items()
}
"""Models that Megatron Core alone has, with their experts."""


def model(**changes: Any) -> ModelConfig:
    """A model of four layers."""
    return ModelConfig(**{**SMALL, "num_layers": 4, **changes})


def random_source(
    config: ModelConfig,
    tokenizer: TokenizerConfig | None = None,
    seed: int = 1,
    moe: MoEConfig = DENSE,
) -> SourceCheckpoint:
    """Weights of a model, all of them random, biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: TensorReader.of(
            0.3 * torch.randn(weight.shape, generator=generator) + ("norm.weight" in name)
        )
        for name, weight in declared_weights(config, moe).items()
    }
    settings = ModelSettings.of(config, moe, tokenizer, eod=None)
    return SourceCheckpoint(Path("random"), "random", settings, tensors).checked()


def random_training(config: ModelConfig) -> dict[str, Any]:
    """What a source has of Adam after 7 iterations of 4 samples, of which one was skipped."""
    kinds = {
        kind: random_source(config, seed=seed).tensors
        for seed, kind in enumerate(("exp_avg", "exp_avg_sq", MASTER), 2)
    }
    run = SavedRun(
        iteration=7,
        consumed_samples=28,
        applied_samples=24,
        steps=6,
        softmax_rows=config.vocab_size,
        arguments={
            "optimizer": "adam", "lr": 0.1, "min_lr": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.9,
            "adam_eps": 1e-7, "weight_decay": 0.1,
        },
        scheduler={"max_lr": 0.1, "min_lr": 0.01, "num_steps": 24, "lr_decay_style": "cosine"},
    )  # fmt: skip
    return {"optimizer": kinds, "run": run, "unread": ""}


def model_of(source: SourceCheckpoint) -> GPTModel:
    """The model of a source, in fp32."""
    config = source.settings.model
    mesh = Mesh.single()
    rng = RngStreams(0)
    model = GPTModel(config, mesh=mesh, rng=rng, seed=None, moe=source.settings.moe).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            value = source.tensors[name].read().float()
            tensor.zero_()
            tensor[: len(value)] = value
    return model


def logits(source: SourceCheckpoint, tokens: Tensor) -> Tensor:
    """fp32 logits of the model of a source, without padding."""
    with torch.no_grad():
        return model_of(source)(tokens)[..., : source.settings.model.vocab_size]


def assert_same_tensors(found: SourceCheckpoint, expected: SourceCheckpoint) -> None:
    """The same names in the same order, types and bytes."""
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        own = found.tensors[name]
        assert (own.shape, own.dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(own.read(), tensor.read()), name


def logits_of(source: SourceCheckpoint, tokens: Tensor) -> Tensor:
    """fp32 logits [B, S, V] of the model of a source, without padding of ours.

    Args:
        source: The weights.
        tokens: Ids [B, S].
    """
    settings = source.settings
    raw = GPTModel(
        settings.model, mesh=Mesh.single(), rng=RngStreams(0), seed=None, moe=settings.moe
    )
    model = raw.float().eval()
    weights = ((name, tensor.read()) for name, tensor in source.tensors.items())
    load_full_weights(model, weights, 0, 1)
    with torch.no_grad():
        logits: Tensor = model.logits(model.hidden(tokens))
    return logits[..., : settings.model.vocab_size]
