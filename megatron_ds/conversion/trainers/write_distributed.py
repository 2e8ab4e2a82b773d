"""Writes models for torchtitan and OLMo-core, as checkpoints of torch.distributed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from megatron_ds.checkpoint.files.local_files import write_files
from megatron_ds.checkpoint.folders.output_folder import OnTensor, output_folder
from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.problems import UserError, ignore, user_error
from megatron_ds.conversion.dcp.write import write_dcp
from megatron_ds.conversion.foreign.trainers import OLMO_CORE_STATES
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.huggingface.written_config import config_of
from megatron_ds.conversion.source import (
    WRITE_DEFAULTS,
    SourceCheckpoint,
    WriteOptions,
    declared_weights,
)
from megatron_ds.conversion.trainers import olmo_core, olmo_core_settings, torchtitan
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.olmo_core_experts import joined_experts
from megatron_ds.conversion.trainers.open_model import settings_of
from megatron_ds.conversion.trainers.write_common import (
    TIED,
    check_expressed,
    raise_if_different,
    weights_for,
)
from megatron_ds.conversion.weights_locations import HF_CONFIG
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders
from megatron_ds.model.declaration.architecture import DENSE

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
    "feed_forward_moe": "moe.moe.MoEConfig",
    "router": "moe.router.MoERouterConfig",
    "latent_moe": "moe.moe.LatentMoEConfig",
    "lm_head": "lm_head.LMHeadConfig",
}
"""Classes of OLMo-core's settings in olmo_core.nn, by key."""
OVERRIDES = "block_overrides"
"""Key of the settings of single blocks by layer."""


def write_torchtitan(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes the folder of a step for torchtitan's `initial_load_path`, complete, or not at all.

    A config.json of transformers is next to it, which torchtitan does not read, if a family has the
    model.

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
    moe = source.settings.moe
    names = dataclasses.replace(torchtitan.NAMES, has_neighbors=not model.qk_layernorm)
    weights = declared_weights(model, moe)
    lacking = [name for name in weights if not names.has(name) or name.endswith(".bias")]
    if moe.is_used and not model.qk_layernorm:
        lacking.append("experts in a model without norms of queries and keys")
    if lacking:
        parts = ", ".join(lacking)
        raise user_error("foreign-target-lacks", name=torchtitan.NAME, parts=parts)
    tensors = weights_for(source, names, with_copy=True)
    _check_torchtitan(source, tensors, names)
    tensors |= _biases_of_selection(source, names)
    files = {}
    with contextlib.suppress(UserError):  # no family has the experts: flags describe the model
        _, config = config_of(source, _model_type(source))
        files[HF_CONFIG] = _json(config)
    with output_folder(folder, source.confirm) as temporary:
        write_dcp(temporary, tensors, on_tensor)
        write_files(temporary, files)


def _check_torchtitan(
    source: SourceCheckpoint, tensors: TensorReaders, names: TrainerNames
) -> None:
    """Raises:
    UserError: If the tensors and flags of torchtitan are those of another model.
    """
    settings = source.settings
    flags = {name: getattr(settings.model, name) for name in torchtitan.OPTIONS}
    flags |= {name: getattr(settings.moe, name) for name in torchtitan.OPTIONS_OF_EXPERTS}
    name = torchtitan.NAME
    try:
        fields, _ = torchtitan.fields_of(Path(name), tensors, names, flags)
        fields[TIED] = settings.model.untie_embeddings_and_output_weights
        written = settings_of(ConfigValues(Path(name), {}), lambda config: fields)
    except UserError as error:
        raise user_error("foreign-target-lacks", name=name, parts=str(error)) from error
    raise_if_different(settings, written, name)


def _biases_of_selection(source: SourceCheckpoint, names: TrainerNames) -> dict[str, TensorReader]:
    """Zeros for the biases of the selection, which each of torchtitan's layers with experts has."""
    moe = source.settings.moe
    if not moe.is_used or moe.moe_router_enable_expert_bias:
        return {}
    zeros = TensorReader.of(torch.zeros(moe.experts))
    layers = filter(moe.has_experts, range(source.settings.model.num_layers))
    name = names.single[torchtitan.EXPERT_BIAS]
    return {f"{names.layer.format(layer)}.{name}": zeros for layer in layers}


def _model_type(source: SourceCheckpoint) -> str:
    """The family of transformers that is nearest to the model of torchtitan."""
    if source.settings.moe.is_used:
        return "qwen3_moe"
    return "qwen3" if source.settings.model.qk_layernorm else "llama"


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
    values = model_of(model, source.settings.moe)
    plain = {key: value for key, value in values.items() if key != olmo_core_settings.CLASS}
    check_expressed(
        source,
        olmo_core.NAME,
        plain,
        lambda config: olmo_core_settings.read_model(config, model.seq_length),
    )
    names = olmo_core.names_of(values, model.norm_position)
    tensors = joined_experts(weights_for(source, names, olmo_core.PREFIX, with_copy=True))
    run = {"model": values, "dataset": {"sequence_length": model.seq_length}}
    with output_folder(folder, source.confirm) as temporary:
        (temporary / OLMO_CORE_STATES).mkdir()
        write_dcp(temporary / OLMO_CORE_STATES, tensors, on_tensor)
        write_files(temporary, {olmo_core.SETTINGS: _json(run)})


def model_of(model: ModelConfig, moe: MoEConfig = DENSE) -> dict[str, Any]:
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
        **_blocks(model, moe, block),
        "lm_head": {"layer_norm": norm, "bias": model.output_layer_bias},
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }
    if model.embedding_multiplier != 1:
        values["embed_scale"] = model.embedding_multiplier
    if model.embed_layernorm:
        values["embedding_norm"] = norm
    return _with_classes(values)


def _blocks(model: ModelConfig, moe: MoEConfig, dense: dict[str, Any]) -> dict[str, Any]:
    """The settings of all blocks, of which some or all have experts.

    Args:
        model: The model.
        moe: Its experts.
        dense: The settings of a block without experts.
    """
    if not moe.is_used:
        return {"block": dense}
    names = {position: name for name, position in olmo_core_settings.EXPERT_BLOCKS.items()}
    block = {
        **{key: value for key, value in dense.items() if key != "feed_forward"},
        "name": names.get(model.norm_position, "moe"),
        "feed_forward_moe": _experts(model, moe),
    }
    layers = [layer for layer in range(model.num_layers) if moe.has_experts(layer)]
    if len(layers) == model.num_layers:
        return {"name": "moe", "block": block}
    overrides = {str(layer): block for layer in layers}
    return {"name": "moe", "block": dense, OVERRIDES: overrides}


def _experts(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    is_sigmoid = moe.moe_router_score_function == "sigmoid"
    is_normalized = moe.moe_router_topk > 1 and (is_sigmoid or not moe.is_pre_softmax)
    router: dict[str, Any] = {
        "top_k": moe.moe_router_topk,
        "gating_function": moe.moe_router_score_function,
    }
    if is_normalized:
        router["normalize_expert_weights"] = 1.0
    if moe.moe_router_enable_expert_bias:
        router["bias_gamma"] = moe.moe_router_bias_update_rate
    experts: dict[str, Any] = {
        "name": "dropless",
        "num_experts": moe.experts,
        "hidden_size": moe.width(model),
        "router": router,
    }
    if moe.moe_latent_size is not None:
        experts["latent_moe"] = {"latent_dim": moe.moe_latent_size}
    return experts


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
    if overrides := values.get(OVERRIDES):
        objects[OVERRIDES] = {
            layer: _with_classes(block, "block") for layer, block in overrides.items()
        }
    return {**values, **objects, olmo_core_settings.CLASS: f"olmo_core.nn.{CLASSES[key]}"}


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
