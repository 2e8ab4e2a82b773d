"""Writes a model for litgpt: lit_model.pth and model_config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_ds.checkpoint.files.local_files import write_files
from megatron_ds.checkpoint.folders.output_folder import OnTensor, output_folder
from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.problems import ignore
from megatron_ds.conversion.foreign.trainers import LITGPT_SETTINGS, LITGPT_WEIGHTS
from megatron_ds.conversion.huggingface.rope_parameters import ORIGINAL
from megatron_ds.conversion.huggingface.rope_rows import LLAMA3
from megatron_ds.conversion.source import WRITE_DEFAULTS, SourceCheckpoint, WriteOptions
from megatron_ds.conversion.trainers.litgpt import (
    IGNORED,
    MLPS,
    NAME,
    NORMS,
    names_of,
    read_fields,
)
from megatron_ds.conversion.trainers.write_common import TIED, check_expressed, weights_for

WITH_OFFSET = "Gemma"
"""A name by which litgpt adds 1 to the weights of norms."""


def write_litgpt(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes a folder for litgpt, complete, or not at all. All weights are in memory at once.

    A tied output layer is written as a copy: litgpt has no tied ones.

    Args:
        source: The weights.
        folder: Must not exist, or be empty.
        options: Not used.
        on_tensor: Reports progress.

    Raises:
        UserError: If litgpt lacks a part of the model, or the folder has files already.
        OSError: If the disk fails.
    """
    del options
    settings = source.settings
    values = config_of(settings.model, settings.moe)
    check_expressed(source, NAME, values, read_fields, (*IGNORED, TIED))
    tensors = weights_for(source, names_of(settings.model.is_gated), with_copy=True)
    with output_folder(folder, source.confirm) as temporary:
        state = {}
        for name, tensor in tensors.items():
            state[name] = tensor.read().contiguous()
            on_tensor(name, tensor.nbytes)
        torch.save({"model": state}, temporary / LITGPT_WEIGHTS)
        text = yaml.safe_dump(values)
        write_files(temporary, {LITGPT_SETTINGS: text.encode()})


def config_of(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """The fields of litgpt's Config, as far as it has the parts of a model."""
    positions = [key for key, position in NORMS.items() if position == model.norm_position]
    norms = ("norm_1", "norm_2", "post_attention_norm", "post_mlp_norm")
    classes = [name for name, activation in MLPS.items() if activation == model.activation]
    scope = {"head": "default", "all-heads": "olmo2"}[model.qk_layernorm_scope]
    scaled = model.embedding_multiplier == model.hidden_size**0.5
    rows = model.vocab_size
    values: dict[str, Any] = {
        "name": WITH_OFFSET if model.apply_layernorm_1p else "model",
        "hf_config": {},
        "block_size": model.seq_length,
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_query_groups": model.kv_heads,
        "head_size": model.head_dim,
        "intermediate_size": model.mlp_hidden_size,
        "vocab_size": rows,
        "padded_vocab_size": rows,
        "norm_class_name": model.normalization,
        "norm_eps": model.norm_epsilon,
        "norm_qk": model.qk_layernorm,
        "norm_qk_type": scope,
        "parallel_residual": model.parallel_residual is not None,
        "shared_attention_norm": model.parallel_residual == "shared",
        "bias": model.add_bias_linear,
        "attn_bias": model.add_qkv_bias,
        "lm_head_bias": model.output_layer_bias,
        "mlp_class_name": "LLaMAMoE" if moe.is_used else next(iter(classes), "GptNeoxMLP"),
        "gelu_approximate": model.gelu_kind or "none",
        "attention_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "scale_embeddings": scaled,
        **dict(zip(norms, next(iter(positions), (True, True, False, False)), strict=True)),
        **_positions(model),
    }
    if model.softmax_scale is not None:
        scalar = model.softmax_scale**-2
        values["attention_scores_scalar"] = round(scalar) if scalar > 1 else scalar
    windows = model.windows
    if any(windows):
        values["sliding_window_size"] = model.window
        values["sliding_window_indices"] = [int(window is not None) for window in windows]
    return values | (_experts(model, moe) if moe.is_used else {})


def _positions(model: ModelConfig) -> dict[str, Any]:
    if not model.is_rotary:
        return {"rotary_percentage": 0.0}
    bases = model.rotary_bases
    scaled = model.rope_layers.get("rope_scaling_layers", [True] * model.num_layers)
    values: dict[str, Any] = {
        "rotary_percentage": model.rotary_percent,
        "rope_interleave": model.rotary_interleaved,
        "rope_base": _integer(bases[0]),
        "rope_condense_ratio": 1,
    }
    if len({*bases}) > 1 or not all(scaled):
        base = next((base for base, has in zip(bases, scaled, strict=True) if has), bases[0])
        local = next((base for base, has in zip(bases, scaled, strict=True) if not has), base)
        values["rope_base"] = _integer(base)
        values["rope_local_base_freq"] = local
        values["rope_indices"] = [int(not has) for has in scaled]
    if model.use_rope_scaling:
        lengths = {key: value for key, value in LLAMA3.items() if key != ORIGINAL}
        values["rope_adjustments"] = {
            "factor": model.rope_scaling_factor,
            **lengths,
            "original_max_seq_len": LLAMA3[ORIGINAL],
        }
    elif model.rotary_seq_len_interpolation_factor != 1:
        values["rope_adjustments"] = {"factor": model.rotary_seq_len_interpolation_factor}
    return values


def _experts(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    layers = [moe.has_experts(layer) for layer in range(model.num_layers)]
    width = moe.width(model)
    values = {
        "n_expert": moe.experts,
        "n_expert_per_token": moe.moe_router_topk,
        "moe_intermediate_size": width,
        "first_k_dense_replace": layers.index(True) or None,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
    }
    if (shared := moe.moe_shared_expert_intermediate_size) is not None:
        values["n_shared_expert"] = shared // width
    if (groups := moe.moe_router_num_groups) is not None:
        used = moe.moe_router_group_topk or groups
        values["n_expert_groups"] = groups
        values["n_topk_groups"] = used
        values["n_topk_scores_per_group"] = moe.moe_router_topk // used
        values["norm_topk_prob"] = moe.moe_router_topk > 1
    return values


def _integer(value: float) -> float:
    return int(value) if float(value).is_integer() else value
