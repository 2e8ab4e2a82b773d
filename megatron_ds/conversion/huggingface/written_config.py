"""The family and the config.json that a model is written with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.conversion.folding import explicit, folded
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.huggingface.families import FAMILIES, Family
from megatron_ds.conversion.huggingface.read_config import settings_of
from megatron_ds.conversion.huggingface.standard_values import standard_values
from megatron_ds.conversion.model_settings import ModelSettings, resolved
from megatron_ds.conversion.published import with_positions
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.conversion.weights_locations import HF_CONFIG

NTK = ("rope_ntk_factor", "max_position_embeddings")
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def without_mup(source: SourceCheckpoint, model_type: str | None) -> SourceCheckpoint:
    """A model of muP with its multipliers in config.json, if a family has them, or in its weights.

    Raises:
        UserError: If no family has them, and they cannot be folded into the weights.
    """
    if not source.settings.model.use_mup:
        return source
    described = explicit(source)
    try:
        config_of(described.without_predictions(), model_type)
    except UserError:
        return folded(source)
    return described


def config_of(source: SourceCheckpoint, model_type: str | None) -> tuple[str, dict[str, Any]]:
    """The family that a model is written as, and its config.json.

    Raises:
        UserError: If no family, or not the given one, has the parts of the model.
    """
    settings = canonical_settings(with_positions(source.settings))
    kinds = [model_type] if model_type is not None else [settings.model_type, *FAMILIES]
    tried = []
    for choice in dict.fromkeys(entry for entry in kinds if entry is not None):
        family = FAMILIES[choice]
        values: dict[str, Any] = {
            "model_type": choice,
            "architectures": [family.architecture],
            "use_cache": True,
        }
        for row in family.rows:
            values |= row.write(settings.moe if row.is_of_experts else settings.model)
        differences = _differences(family, values, settings)
        if not differences:
            dtypes = {tensor.dtype for tensor in source.tensors.values()}
            if len(dtypes) == 1 and (name := DTYPE_NAMES.get(*dtypes)) is not None:
                values["torch_dtype"] = name
            return choice, values
        tried.append(f"{choice} lacks {differences}")
    raise user_error("hf-no-family", tried="".join(f"\n  - {reason}" for reason in tried))


def canonical_settings(settings: ModelSettings) -> ModelSettings:
    """The settings with one of several spellings of the same model."""
    fixed = {**settings.fixed}
    model = settings.model
    if model.activation == "openai-gelu":
        fixed |= {"activation": "gelu", "gelu_approximation": "tanh"}
    bases = model.rotary_bases
    if len(set(bases)) == 1 and (model.rotary_base_per_layer or bases[0] != model.rotary_base):
        # A base that NTK scaling has raised needs no scaling.
        fixed |= {"rotary_base": bases[0], "rotary_base_per_layer": ()}
        fixed = {name: fixed[name] for name in fixed if name not in NTK}
    return dataclasses.replace(settings, fixed=fixed)


def _differences(family: Family, values: Mapping[str, Any], settings: ModelSettings) -> str:
    """Parts that a family cannot express: where a config.json read back is another model."""
    config = ConfigValues(Path(HF_CONFIG), standard_values(values, family))
    try:
        read = settings_of(family.rows, config)
    except UserError as error:
        return str(error)
    if config.lacking:
        return "; ".join(config.lacking)
    theirs = resolved(read)
    expected = resolved(settings)
    different = sorted(
        name for name in {*theirs, *expected} if theirs.get(name) != expected.get(name)
    )
    return ", ".join(f"{name} {expected.get(name)}" for name in different)
