"""Writes models for torchtitan and OLMo-core, as checkpoints of torch.distributed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.files.local_files import write_files
from megatron_ds.checkpoint.folders.output_folder import OnTensor, output_folder
from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import ignore, user_error
from megatron_ds.conversion.dcp.write import write_dcp
from megatron_ds.conversion.foreign.trainers import OLMO_CORE_STATES
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.huggingface.written_config import config_of
from megatron_ds.conversion.source import WRITE_DEFAULTS, SourceCheckpoint, WriteOptions
from megatron_ds.conversion.trainers import olmo_core, olmo_core_settings, torchtitan
from megatron_ds.conversion.trainers.open_model import settings_of
from megatron_ds.conversion.trainers.write_common import (
    check_expressed,
    raise_if_different,
    weights_for,
)
from megatron_ds.conversion.weights_locations import HF_CONFIG

CLASSES = {
    "": "transformer.config.TransformerConfig",
    "block": "transformer.config.TransformerBlockConfig",
    "sequence_mixer": "attention.AttentionConfig",
    "sliding_window": "attention.SlidingWindowAttentionConfig",
    "gate": "attention.GateConfig",
    "rope": "rope.RoPEConfig",
    "layer_norm": "layer_norm.LayerNormConfig",
    "qk_norm": "layer_norm.LayerNormConfig",
    "embedding_norm": "layer_norm.LayerNormConfig",
    "feed_forward": "feed_forward.FeedForwardConfig",
    "lm_head": "lm_head.LMHeadConfig",
}
"""Classes of OLMo-core's settings in olmo_core.nn, by key."""


def write_torchtitan(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes the folder of a step for torchtitan's `initial_load_path`, complete, or not at all.

    A config.json of transformers is next to it, which torchtitan does not read.

    Args:
        source: The weights.
        folder: Must not exist, or be empty.
        options: Not used.
        on_tensor: Reports progress.

    Raises:
        UserError: If torchtitan's Llama 3 and Qwen 3 lack a part of the model, or the folder has
            files already.
        OSError: If the disk fails.
    """
    del options
    model = source.settings.model
    names = dataclasses.replace(torchtitan.NAMES, has_neighbors=not model.qk_layernorm)
    tensors = weights_for(source, names, with_copy=True)
    unnamed = {*tensors} - {*_named(names.layer, tensors, names)}
    lacking = sorted(unnamed) + [name for name in tensors if name.endswith(".bias")]
    if lacking or source.settings.moe.is_used:
        parts = "experts" if source.settings.moe.is_used else ", ".join(lacking)
        raise user_error("foreign-target-lacks", name=torchtitan.NAME, parts=parts)
    flags = {name: getattr(model, name) for name in torchtitan.OPTIONS}
    fields, _ = torchtitan.fields_of(folder, tensors, names, flags)
    fields["untie_embeddings_and_output_weights"] = model.untie_embeddings_and_output_weights
    written = settings_of(ConfigValues(folder, {}), lambda config: fields)
    raise_if_different(source.settings, written, torchtitan.NAME)
    model_type = "qwen3" if model.qk_layernorm else "llama"
    _, config = config_of(source, model_type)
    with output_folder(folder) as temporary:
        write_dcp(temporary, tensors, on_tensor)
        write_files(temporary, {HF_CONFIG: _json(config)})


def _named(layer: str, tensors: Any, names: Any) -> list[str]:
    """The tensors that have a name of the trainer."""
    start = layer.partition("{}")[0]
    stems = {stem for module in names.inner.values() for stem in module.split()}
    outer = {*names.outer.values()}
    named = []
    for name in tensors:
        module = name.rpartition(".")[0]
        inner = name.removeprefix(start).partition(".")[2].rpartition(".")[0]
        if module in outer or (name.startswith(start) and inner in stems):
            named.append(name)
    return named


def write_olmo_core(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes the folder of a step for OLMo-core, complete, or not at all.

    It has no state of a trainer.

    Args:
        source: The weights.
        folder: Must not exist, or be empty.
        options: Not used.
        on_tensor: Reports progress.

    Raises:
        UserError: If OLMo-core lacks a part of the model, or the folder has files already.
        OSError: If the disk fails.
    """
    del options
    model = source.settings.model
    if source.settings.moe.is_used:
        raise user_error("foreign-target-lacks", name=olmo_core.NAME, parts="experts")
    values = model_of(model)
    plain = {key: value for key, value in values.items() if key != olmo_core_settings.CLASS}
    check_expressed(
        source,
        olmo_core.NAME,
        plain,
        lambda config: olmo_core_settings.read_model(config, model.seq_length),
    )
    names = olmo_core.names_of(values, model.norm_position)
    tensors = weights_for(source, names, olmo_core.PREFIX, with_copy=True)
    run = {"model": values, "dataset": {"sequence_length": model.seq_length}}
    with output_folder(folder) as temporary:
        (temporary / OLMO_CORE_STATES).mkdir()
        write_dcp(temporary / OLMO_CORE_STATES, tensors, on_tensor)
        write_files(temporary, {olmo_core.SETTINGS: _json(run)})


def model_of(model: ModelConfig) -> dict[str, Any]:
    """OLMo-core's settings of a model, as far as it has its parts."""
    norm = {
        "name": "default" if model.normalization == "LayerNorm" else "rms",
        "eps": model.norm_epsilon,
        "bias": model.normalization == "LayerNorm",
    }
    positions = {position: name for name, position in olmo_core_settings.NORM_POSITIONS.items()}
    activation = "gelu_tanh" if model.activation == "geglu" else "silu"
    mixer: dict[str, Any] = {
        "type": "attention",
        "name": "default",
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "bias": model.add_bias_linear,
        "rope": _rope(model) if model.is_rotary else None,
    }
    if model.qk_layernorm:
        mixer |= {"qk_norm": norm, "use_head_qk_norm": model.qk_layernorm_scope == "head"}
    if model.softmax_type == "learnable":
        mixer |= {"attention_sinks": True, "backend": "torch"}
    for granularity, option in olmo_core_settings.GATES.items():
        if getattr(model, option):
            mixer["gate"] = {"granularity": granularity}
    if any(model.windows):
        mixer["sliding_window"] = {
            "pattern": [window or -1 for window in model.windows],
            "force_full_attention_on_first_layer": False,
            "force_full_attention_on_last_layer": False,
        }
    block: dict[str, Any] = {
        "name": positions.get(model.norm_position, "default"),
        "sequence_mixer": mixer,
        "layer_norm": norm,
        "feed_forward": {
            "hidden_size": model.mlp_hidden_size,
            "bias": model.add_bias_linear,
            "activation": activation,
        },
    }
    if model.residual_multiplier != 1:
        block["attention_residual_alpha"] = model.residual_multiplier
        block["feed_forward_residual_alpha"] = model.residual_multiplier
    values: dict[str, Any] = {
        "d_model": model.hidden_size,
        "vocab_size": model.vocab_size,
        "n_layers": model.num_layers,
        "block": block,
        "lm_head": {"layer_norm": norm, "bias": model.output_layer_bias},
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }
    if model.embedding_multiplier != 1:
        values["embed_scale"] = model.embedding_multiplier
    if model.embed_layernorm:
        values["embedding_norm"] = norm
    return _with_classes(values)


def _rope(model: ModelConfig) -> dict[str, Any]:
    base = model.rotary_base
    rope: dict[str, Any] = {
        "name": "default",
        "theta": int(base) if base.is_integer() else base,
        "partial_rotary_factor": model.rotary_percent,
        "no_global_rope": _is_local(model),
    }
    scaling: dict[str, Any] = {}
    if model.position_embedding_type == "yarn":
        name = "YaRNRoPEScalingConfig"
        scaling = {
            "factor": model.rotary_scaling_factor,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
            "old_context_len": model.yarn_original_max_position_embeddings,
        }
    elif model.use_rope_scaling:
        name = "StepwiseRoPEScalingConfig"
        scaling = {"factor": model.rope_scaling_factor, **olmo_core_settings.STEPWISE}
    elif (factor := model.rotary_seq_len_interpolation_factor) != 1:
        name = "PIRoPEScalingConfig"
        scaling = {"factor": factor}
    if scaling:
        rope["scaling"] = scaling | {olmo_core_settings.CLASS: f"olmo_core.nn.rope.{name}"}
    return rope


def _is_local(model: ModelConfig) -> bool:
    """Whether the layers without a window are those without positions."""
    layers = model.rope_layers.get("no_rope_freq", ())
    return any(layers) and [*layers] == [window is None for window in model.windows]


def _with_classes(values: dict[str, Any], key: str = "") -> dict[str, Any]:
    """The settings with the class of each object, by which OLMo-core builds it."""
    objects = {
        name: _with_classes(value, name)
        for name, value in values.items()
        if isinstance(value, dict) and name in CLASSES
    }
    return {**values, **objects, olmo_core_settings.CLASS: f"olmo_core.nn.{CLASSES[key]}"}


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
