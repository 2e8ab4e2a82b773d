"""Conversion between formats: the states of a run, and a verification by logits.

A verification holds one model at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.files.full_weights import load_full_weights
from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import user_error
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ADAM_SETTINGS, SourceCheckpoint
from megatron_ds.engine.states.state_reader import MASTER
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

COMPARED_TOKENS = 16
"""Tokens whose logits are compared, the last ones of the prompt."""
SCALED_TOKENS = 512
"""Tokens of a prompt of a model with scaled positions, whose slow rotations differ far out."""
TOLERANCE = 1e-4
"""Accepted difference of two models' fp32 logits, relative to the largest; a wrong tensor changes
them by far more."""


def with_training(source: SourceCheckpoint) -> SourceCheckpoint:
    """A source with the states of the run that saved it, in fp32.

    Args:
        source: A checkpoint of this program or of Megatron, opened with its optimizer states.

    Raises:
        UserError: If it has no states, or another optimizer's than Adam's.
    """
    run = source.run
    reason = source.unread
    if not reason and run is not None:
        is_known = run.arguments.keys() >= {*ADAM_SETTINGS}
        if run.steps is None or run.consumed_samples is None or not is_known:
            reason = "counters or settings of the optimizer are missing"
    if reason or run is None:
        raise user_error("conversion-without-states", path=source.path, reason=reason)
    optimizer = {
        key: {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
        for key, tensors in source.optimizer.items()
        if key in (*MOMENTS, MASTER)
    }
    complete = dataclasses.replace(
        source,
        optimizer=optimizer,
        tensors=optimizer.get(MASTER, source.tensors),
        run=dataclasses.replace(run, softmax_rows=source.rows),
    )
    return complete.checked().to(source.dtype)


def verify(source: SourceCheckpoint, folder: Path, name: str) -> float:
    """Compares what the models of a source and of a target compute for a fixed prompt.

    The model of an hf folder is transformers' own.

    Args:
        source: The weights, in the type of the target.
        folder: Folder that was written.
        name: Its format.

    Returns:
        The largest difference of two logits, relative to the largest logit.

    Raises:
        UserError: If it is larger than rounding explains.
    """
    model = source.settings.model
    generator = torch.Generator().manual_seed(1)
    size = (1, prompt_length(model))
    prompt = torch.randint(0, model.vocab_size, size, generator=generator)
    dtypes = {tensor.dtype for tensor in source.tensors.values()}
    before = _logits(source, prompt, dtypes)
    written = open_source(folder, name)
    if name == "universal" and len(dtypes) == 1:  # which has the master weights
        written = written.to(*dtypes)
    after = _logits(written, prompt, dtypes)
    error = float((before - after).abs().max() / before.abs().max())
    if not error < TOLERANCE:  # also for nan
        raise user_error("conversion-differs", folder=folder, error=error)
    return error


def prompt_length(model: ModelConfig) -> int:
    """Tokens of a prompt whose last ones depend on all parts of a model: on the edge of every
    window, and on scaled positions."""
    windows = [window for window in model.windows if window is not None]
    longest = max(windows, default=0)
    scaled = SCALED_TOKENS if model.is_rotary and model.rope_scalings else 0
    return min(max(longest + COMPARED_TOKENS, scaled), model.seq_length)


def _logits(source: SourceCheckpoint, prompt: Tensor, dtypes: set[torch.dtype]) -> Tensor:
    """fp32 logits of the last tokens, for the tokens of the vocabulary."""
    if source.format == "hf":
        logits = _transformers_logits(source.path, prompt, dtypes)
    else:
        logits = own_logits(source, prompt)
    return logits[..., : source.settings.model.vocab_size]


def own_logits(source: SourceCheckpoint, prompt: Tensor) -> Tensor:
    """fp32 logits [1, S, V] of the model of a source, of the last `COMPARED_TOKENS`."""
    settings = source.settings
    mesh = Mesh.single()
    raw = GPTModel(settings.model, mesh=mesh, rng=RngStreams(0), seed=None, moe=settings.moe)
    model = raw.float().eval()
    weights = ((name, tensor.read()) for name, tensor in source.tensors.items())
    load_full_weights(model, weights, 0, 1)
    with torch.no_grad():
        hidden_SBH = model.hidden(prompt)[-COMPARED_TOKENS:]
        logits: Tensor = model.logits(hidden_SBH)
    return logits


@contextmanager
def _offline() -> Iterator[None]:
    """Lets every request to the Hub fail, as HF_HUB_OFFLINE does."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _transformers_logits(path: Path, prompt: Tensor, dtypes: set[torch.dtype]) -> Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _offline():
        config = AutoConfig.from_pretrained(path, **options)
        # Neither code nor kernels of the Hub that config.json may name; a kernel would be loaded in
        # spite of the argument `attn_implementation`.
        config.auto_map = {}
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, **options
        )
    with torch.no_grad():
        if len(dtypes) == 1:  # rounded as the target, unlike buffers
            for parameter in model.parameters():
                parameter.copy_(parameter.to(*dtypes))
        logits: Tensor = model.eval()(prompt, logits_to_keep=COMPARED_TOKENS).logits
    return logits
