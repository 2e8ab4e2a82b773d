"""Models of nanotron: Llama and dense Qwen 2.

    FOLDER/checkpoint_metadata.json
    FOLDER/model_config.json

Facts: nanotron 0.4 and its source of April 2026, `models/llama.py`, `models/qwen.py` and
`config/models_config.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_ds.conversion.foreign.trainers import NANOTRON_SETTINGS, detect_trainer
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields
from megatron_ds.conversion.huggingface.rope_rows import LINEAR
from megatron_ds.conversion.model_settings import read_json_object
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.nanotron_files import read_tensors
from megatron_ds.conversion.trainers.open_model import (
    file_in,
    open_model,
    padded_rows,
    settings_of,
)
from megatron_ds.conversion.trainers.runs.nanotron import with_nanotron_run

NAME = "nanotron"
BIAS = "model.decoder.0.pp_block.attn.qkv_proj.bias"
IGNORED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "is_llama_config",
    "pretraining_tp",
    "use_cache",
    "attention_bias",
    "z_loss_enabled",
    "z_loss_coefficient",
    "flex_attention_mask",
    "_attn_implementation",
    "_fused_rms_norm",
    "_use_doc_masking",
    "log_attn_probs",
    "ring_attn_heads_k_stride",
)
NAMES = TrainerNames(
    outer={
        "embedding.word": "model.token_position_embeddings.pp_block.token_embedding",
        "final_norm": "model.final_layer_norm.pp_block",
        "head": "model.lm_head.pp_block",
    },
    layer="model.decoder.{}.pp_block",
    inner={
        "attention_norm": "input_layernorm",
        "attention.qkv": "attn.qkv_proj",
        "attention.proj": "attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.fc_in": "mlp.gate_up_proj",
        "mlp.fc_out": "mlp.down_proj",
    },
)


def open_nanotron(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of a folder, or of its last step, and its run.

    Raises:
        UserError: If files are missing or damaged, or the model has parts that ours lacks.
    """
    checkpoint = detect_trainer(path, NAME)
    folder = path if checkpoint is None else checkpoint.path
    file = file_in(folder, NANOTRON_SETTINGS)
    sharded = read_tensors(folder)
    theirs = {name: tensor.weight for name, tensor in sharded.items()}
    config = ConfigValues(file, {k: v for k, v in read_json_object(file).items() if v is not None})
    settings = settings_of(config, lambda values: _fields(values, BIAS in theirs), IGNORED)
    source = open_model(folder, NAME, padded_rows(settings), theirs, NAMES)
    source = dataclasses.replace(source, settings=settings)
    return with_nanotron_run(source, sharded, NAMES, options)


def _fields(config: ConfigValues, has_bias: bool) -> Fields:
    is_qwen = config.get("is_qwen2_config", False)
    heads = config.number("num_attention_heads", int)
    # Llama's rotated neighbors before it had the key.
    is_interleaved = config.get("rope_interleaved", not is_qwen)
    is_fused = config.get("_fused_rotary_emb", False) or config.get("_use_qkv_packed", False)
    if is_qwen and is_interleaved and not is_fused:
        config.lack("its rotation of neighbors without the fused kernel", "rope_interleaved", True)
    absent = {"scaled rotary positions": "rope_scaling", "experts": "moe_config"}
    for part, key in absent.items():
        if value := config.get(key, None):
            config.lack(part, key, value)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        config.lack("another activation function", "hidden_act", activation)
    layers = config.number("num_hidden_layers", int)
    return {
        **_layer_fields(config, layers),
        "num_layers": layers,
        "hidden_size": config.number("hidden_size", int),
        "num_attention_heads": heads,
        "num_query_groups": config.number("num_key_value_heads", int, None) or heads,
        "ffn_hidden_size": config.number("intermediate_size", int),
        "vocab_size": config.number("vocab_size", int),
        "seq_length": config.number("max_position_embeddings", int, 2048),
        "position_embedding_type": "rope",
        "rotary_base": config.number("rope_theta", float, 10000.0),
        "rotary_interleaved": bool(is_interleaved),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", float, 1e-6),
        "activation": "swiglu",
        "add_bias_linear": False,
        "add_qkv_bias": has_bias,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _layer_fields(config: ConfigValues, layers: int) -> Fields:
    """Windows, and layers without positions, which have no window."""
    every = config.number("no_rope_layer", int, None) or 0
    size = config.number("sliding_window_size", int, None)
    factor = config.number("rope_seq_len_interpolation_factor", float, None)
    fields: dict[str, Any] = {"no_rope_freq": str(every)}
    if factor is not None:
        fields[LINEAR] = factor
    if size is not None:
        fields["window_size"] = f"{size - 1},0"
        if every:
            layers_with = [int((layer + 1) % every != 0) for layer in range(layers)]
            fields["window_attn_skip_freq"] = str(layers_with)
    return fields
