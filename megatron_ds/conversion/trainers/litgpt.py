"""Models of litgpt.

    FOLDER/lit_model.pth        a file of torch.save, the state dict of the model as "model"
    FOLDER/model_config.yaml    the fields of litgpt's `Config`

Facts: litgpt 0.5.13, `litgpt/config.py` and `litgpt/model.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.config.problems import user_error
from megatron_ds.conversion.foreign.trainers import LITGPT_SETTINGS, LITGPT_WEIGHTS, detect_trainer
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields
from megatron_ds.conversion.huggingface.rope_parameters import ORIGINAL
from megatron_ds.conversion.huggingface.rope_rows import LINEAR, LLAMA3
from megatron_ds.conversion.safe_unpickle import read_foreign
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.open_model import (
    file_in,
    open_model,
    padded_rows,
    settings_of,
)
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders

NAME = "litgpt"
LARGEST_SETTINGS = 2**20
"""Bytes of model_config.yaml."""
NORMS = {
    (True, True, False, False): "before",
    (True, True, True, True): "both",
    (False, False, True, True): "reordered",
}
"""Position of the norms, by `norm_1`, `norm_2`, `post_attention_norm` and `post_mlp_norm`."""
MLPS = {"GptNeoxMLP": "gelu", "LLaMAMLP": "swiglu", "GemmaMLP": "geglu", "LLaMAMoE": "swiglu"}
"""Activation function by class of the MLP."""
IGNORED = ("name", "hf_config", "vocab_size", "padding_multiple")
NAMES = TrainerNames(
    outer={
        "embedding.word": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer="transformer.h.{}",
    inner={
        "attention_norm": "norm_1",
        "attention.qkv": "attn.qkv",
        "attention.q_norm": "attn.norm_q",
        "attention.k_norm": "attn.norm_k",
        "attention.proj": "attn.proj",
        "attention_post_norm": "post_attention_norm",
        "mlp_norm": "norm_2",
        "mlp.fc_in": "mlp.fc_1 mlp.fc_2",
        "mlp.fc_out": "mlp.proj",
        "mlp.router": "mlp.gate",
        "mlp.experts.fc_in": "mlp.experts.{expert}.fc_1 mlp.experts.{expert}.fc_2",
        "mlp.experts.fc_out": "mlp.experts.{expert}.proj",
        "mlp.shared.fc_in": "mlp.shared_experts.fc_1 mlp.shared_experts.fc_2",
        "mlp.shared.fc_out": "mlp.shared_experts.proj",
        "mlp_post_norm": "post_mlp_norm",
    },
    single={"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
)


def open_litgpt(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of a folder. Rows of the padded vocabulary are ids of the model, whose logits
    litgpt has, too.

    Raises:
        UserError: If files are missing or damaged, or the model has parts that ours lacks.
    """
    del options
    checkpoint = detect_trainer(path, NAME)
    folder = path if checkpoint is None else checkpoint.path
    settings = settings_of(read_config(folder), read_fields, IGNORED)
    names = names_of(settings.model.is_gated)
    return open_model(folder, NAME, padded_rows(settings), read_weights(folder), names)


def names_of(is_gated: bool) -> TrainerNames:
    """The names of a model's tensors."""
    if is_gated:
        return NAMES
    return dataclasses.replace(NAMES, inner={**NAMES.inner, "mlp.fc_in": "mlp.fc"})


def read_config(folder: Path) -> ConfigValues:
    """The settings in a folder.

    Raises:
        UserError: If model_config.yaml is missing or has no mapping.
    """
    path = file_in(folder, LITGPT_SETTINGS)
    try:
        with path.open("rb") as file:
            values = yaml.safe_load(file.read(LARGEST_SETTINGS))
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise user_error("foreign-file-unreadable", path=path, error=error) from error
    if not isinstance(values, dict):
        raise user_error("foreign-file-unreadable", path=path, error="it is no mapping")
    return ConfigValues(path, {str(key): value for key, value in values.items()})


def read_weights(folder: Path) -> TensorReaders:
    """The tensors of the model, mapped into memory.

    Raises:
        UserError: If the file is missing or damaged, or has anything but tensors as a model.
    """
    path = file_in(folder, LITGPT_WEIGHTS)
    loaded = read_foreign(path)
    state = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise user_error("foreign-file-unreadable", path=path, error="it has no state dict")
    return {str(name): TensorReader.of(value) for name, value in state.items()}


def read_fields(config: ConfigValues) -> Fields:
    """The options of the model; `config.lacking` has what our model lacks."""
    name = str(config.get("name", ""))
    size = config.number("n_embd", int, 4096)
    heads = config.number("n_head", int, 32)
    layers = config.number("n_layer", int, 16)
    mlp = config.get("mlp_class_name", "GptNeoxMLP")
    norm = config.get("norm_class_name", "LayerNorm")
    if norm == "LayerNorm" and "OLMo" in name:
        config.lack("LayerNorm without weights", "name", name)
    if mlp not in MLPS:
        config.lack("another MLP", "mlp_class_name", mlp)
    if config.get("latent_attention", None) is not None:
        config.lack("multi-latent attention", "latent_attention", config.get("latent_attention"))
    bias = config.get("bias", True)
    qkv_bias = config.get("attn_bias", False)
    fields = {
        "num_layers": layers,
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_query_groups": config.number("n_query_groups", int, None) or heads,
        "kv_channels": config.number("head_size", int, None) or size // heads,
        "ffn_hidden_size": config.number("intermediate_size", int, None) or 4 * size,
        "vocab_size": _rows(config),
        "seq_length": config.number("block_size", int, 4096),
        "normalization": norm,
        "norm_epsilon": config.number("norm_eps", float, 1e-5),
        "apply_layernorm_1p": norm == "RMSNorm" and "Gemma" in name,
        "activation": MLPS.get(mlp),
        "gelu_approximation": config.get("gelu_approximate", "none"),
        "add_bias_linear": bias,
        "add_qkv_bias": not bias and qkv_bias,
        "output_layer_bias": config.get("lm_head_bias", False),
        "untie_embeddings_and_output_weights": True,
        "attn_logit_softcapping": config.number("attention_logit_softcapping", float, None),
        "final_logit_softcapping": config.number("final_logit_softcapping", float, None),
        "embedding_multiplier": size**0.5 if config.get("scale_embeddings", False) else 1.0,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if scalar := config.number("attention_scores_scalar", float, None):
        fields["softmax_scale"] = scalar**-0.5
    if fields["activation"] not in ("gelu", "geglu"):
        del fields["gelu_approximation"]
    fields |= _norm_fields(config) | _rope_fields(config, fields, layers)
    return fields | _window_fields(config, layers) | _expert_fields(config, mlp, layers)


def _rows(config: ConfigValues) -> int:
    """Rows of the vocabulary tables, padding included."""
    rows = config.number("padded_vocab_size", int, None)
    if rows is None:
        multiple = config.number("padding_multiple", int, 512)
        rows = -(-config.number("vocab_size", int, 50254) // multiple) * multiple
    return int(rows)


def _norm_fields(config: ConfigValues) -> Fields:
    keys = ("norm_1", "norm_2", "post_attention_norm", "post_mlp_norm")
    values = [config.get(key, key in ("norm_1", "norm_2")) for key in keys]
    position = NORMS.get(tuple(values))
    if position is None:
        config.lack("another position of the norms", ", ".join(keys), values)
    fields: Fields = {"norm_position": position}
    is_shared = config.get("shared_attention_norm", False)
    if config.get("parallel_residual", True):
        fields["parallel_residual"] = "shared" if is_shared else "separate"
    elif is_shared:
        config.lack("one norm of attention and MLP in turn", "shared_attention_norm", is_shared)
    norm_type = config.get("norm_qk_type", "default")
    if config.get("norm_qk", False):
        scopes = {"default": "head", "olmo2": "all-heads"}
        fields |= {"qk_layernorm": True, "qk_layernorm_scope": scopes.get(norm_type)}
        if norm_type not in scopes:
            config.lack("another norm of queries and keys", "norm_qk_type", norm_type)
    return fields


def _rope_fields(config: ConfigValues, fields: Fields, layers: int) -> Fields:
    """Rotary positions, of a part of the head's dimensions."""
    head = fields["kv_channels"]
    rotated = int(config.number("rotary_percentage", float, 0.25) * head)
    base = config.number("rope_base", float, 10000.0)
    local = config.number("rope_local_base_freq", float, None)
    indices = config.get("rope_indices", None)
    condensed = config.number("rope_condense_ratio", float, 1.0)
    is_interleaved = config.get("rope_interleave", False)
    adjustments = config.get("rope_adjustments", None) or {}
    if not rotated:
        return {"position_embedding_type": "none"}
    if rotated % 2:
        config.lack("an odd number of rotated dimensions", "rotary_percentage", rotated / head)
    rope: Fields = {
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rotary_percent": rotated / head,
        "rotary_interleaved": is_interleaved,
        **_scaling_fields(config, adjustments),
    }
    if condensed != 1:
        if adjustments or local is not None:
            config.lack("two scalings of rotary positions", "rope_condense_ratio", condensed)
        rope[LINEAR] = condensed
    if local is not None:
        chosen = [True] * layers if indices is None else [bool(i) for i in indices[:layers]]
        rope["rotary_base_per_layer"] = tuple(local if is_local else base for is_local in chosen)
        rope["rope_scaling_layers"] = pattern_of([not is_local for is_local in chosen])
    return rope


def _scaling_fields(config: ConfigValues, adjustments: Any) -> Fields:
    key = "rope_adjustments"
    if "beta_fast" in adjustments or "beta_slow" in adjustments:
        config.lack(
            "YaRN, of which litgpt scales the fast dimensions, not the slow", key, adjustments
        )
        return {}
    if adjustments.get("mscale_all_dim"):
        config.lack("another scale of the attention scores", key, adjustments)
    if "low_freq_factor" in adjustments or "high_freq_factor" in adjustments:
        wanted = {**LLAMA3, "original_max_seq_len": LLAMA3[ORIGINAL]}
        del wanted[ORIGINAL]
        if any(adjustments.get(name) != value for name, value in wanted.items()):
            part = "another scaling of rotary positions than that of Llama 3.1"
            config.lack(part, key, adjustments)
        return {"use_rope_scaling": True, "rope_scaling_factor": float(adjustments["factor"])}
    return {LINEAR: float(adjustments["factor"])} if "factor" in adjustments else {}


def _window_fields(config: ConfigValues, layers: int) -> Fields:
    size = config.number("sliding_window_size", int, None)
    indices = config.get("sliding_window_indices", None)
    if size is None:
        return {}
    chosen = [True] * layers if indices is None else [bool(index) for index in indices[:layers]]
    return {
        "window_size": f"{size - 1},0",
        "window_attn_skip_freq": None if all(chosen) else str([int(value) for value in chosen]),
    }


def _expert_fields(config: ConfigValues, mlp: str, layers: int) -> Fields:
    """Experts: without groups as of Mixtral, whose weights are a softmax over the selected ones;
    with groups as of DeepSeek V3, by sigmoid scores and a bias."""
    experts = config.number("n_expert", int, 0)
    chosen = config.number("n_expert_per_token", int, 0)
    width = config.number("moe_intermediate_size", int, None)
    dense = config.number("first_k_dense_replace", int, None)
    scale = config.number("routed_scaling_factor", float, 1.0)
    shared = config.number("n_shared_expert", int, None)
    groups = _group_fields(config, chosen)
    if mlp != "LLaMAMoE":
        return {}
    if chosen == 1 and not groups:
        config.lack("a weight of 1 for one expert", "n_expert_per_token", chosen)
    fields: Fields = {
        "num_experts": (experts,),
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        "moe_router_topk_scaling_factor": None if scale == 1 else scale,
        **groups,
    }
    if shared and width:
        fields["moe_shared_expert_intermediate_size"] = shared * width
    return fields | ({"moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}"} if dense else {})


def _group_fields(config: ConfigValues, chosen: int) -> Fields:
    """The selection of experts in groups; nothing without them, when litgpt reads none of this."""
    groups = config.number("n_expert_groups", int, None)
    used = config.number("n_topk_groups", int, None)
    scores = config.number("n_topk_scores_per_group", int, None)
    is_normalized = config.get("norm_topk_prob", False)
    if not groups:
        return {}
    if is_normalized == (chosen == 1):
        config.lack("other weights of experts", "norm_topk_prob", is_normalized)
    if not used or scores != chosen // used:
        config.lack("groups by other scores", "n_topk_scores_per_group", scores)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": used,
    }
