"""The weights of a training checkpoint of this program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megatron_ds.checkpoint.full_weights import lazy_full_weights
from megatron_ds.checkpoint.metadata import RUN, CheckpointMetadata, list_checkpoints
from megatron_ds.checkpoint.native_settings import (
    find_checkpoint,
    model_config,
    moe_config,
    tokenizer_config,
)
from megatron_ds.conversion.source import ModelSettings, WeightsSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By --fp16 and --bf16."""


def is_native(path: Path) -> bool:
    """Whether a folder is a checkpoint, or a --save folder that has one."""
    return (path / RUN).is_file() or bool(list_checkpoints(path))


def open_native(path: Path, warn: Callable[[str], None]) -> WeightsSource:
    """Opens the last undamaged checkpoint of a --save folder, or the folder's own.

    Raises:
        UserError: If there is none.
    """
    return source_of(find_checkpoint(path, warn))


def source_of(found: CheckpointMetadata) -> WeightsSource:
    """The weights of a checkpoint.

    Raises:
        UserError: If it has options or weights unknown to this version.
    """
    tensors = dict(lazy_full_weights(found))
    precision = DTYPES[found.run.layout.precision]
    settings, parts = settings_of(found), declared_parts(found)
    return WeightsSource(
        found.path, "native", settings, tensors, precision, parts, reader=found.reader
    ).checked()


def declared_parts(found: CheckpointMetadata) -> dict[str, tuple[str, ...]]:
    """Names of the parts of fused parameters, in their order, as the checkpoint declares them."""
    return {name: shard.parts for name, shard in found.run.shards.items() if shard.parts}


def settings_of(found: CheckpointMetadata) -> ModelSettings:
    """The options of a checkpoint's model.

    Raises:
        UserError: If it has options unknown to this version.
    """
    fingerprint = found.run.tokenizer
    return ModelSettings.of(
        model_config(found),
        moe_config(found),
        tokenizer_config(found),
        None if fingerprint is None else fingerprint.eod,
    )
