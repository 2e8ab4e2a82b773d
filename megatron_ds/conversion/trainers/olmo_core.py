"""Models of OLMo-core.

    stepN/config.json         the settings of the run, "model" among them
    stepN/model_and_optim     a state dict of torch.distributed, weights below `model.`

Facts: ai2-olmo-core 3.0.0, `olmo_core/nn`; version 2 calls `sequence_mixer` `attention`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.foreign.trainers import INDEX, OLMO_CORE_STATES, detect_trainer
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields
from megatron_ds.conversion.huggingface.rope_rows import LINEAR
from megatron_ds.conversion.model_settings import read_json_object
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.open_model import file_in, open_model, settings_of
from megatron_ds.conversion.trainers.runs.olmo_core import with_olmo_core_run

NAME = "olmo_core"
SETTINGS = "config.json"
PREFIX = "model."
CLASS = "_CLASS_"
"""Key of the class of an object, which is not imported."""
DEFAULT_LENGTH = 2048
NORM_POSITIONS = {"default": "before", "reordered_norm": "reordered", "peri_norm": "both"}
NORMS = {
    "default": "LayerNorm",
    "rms": "RMSNorm",
    "qwen_rms": "RMSNorm",
    "fused_rms": "RMSNorm",
    "cute_rms": "RMSNorm",
}
ACTIVATIONS: dict[str, Fields] = {
    "silu": {"activation": "swiglu"},
    "gelu_tanh": {"activation": "geglu", "gelu_approximation": "tanh"},
}
STEPWISE = {"low_freq_proportion": 0.0, "high_freq_proportion": 0.25, "old_context_len": 8192}
"""Scaling of Llama 3.1."""
IGNORED_OF_MODEL = (
    "dtype",
    "init_method",
    "init_seed",
    "init_std",
    "embedding_init_std",
    "freeze_params",
)
IGNORED_OF_ATTENTION = (
    "type",
    "dtype",
    "use_flash",
    "backend",
    "mxfp8_projections",
    "mxfp8_qkv_projection",
    "mxfp8_out_projection",
    "use_recompute_qkv_prep",
    "mxfp8_save_qkv_for_backward",
)
NAMES = TrainerNames(
    outer={
        "embedding.word": "embeddings",
        "embedding.norm": "embedding_norm",
        "final_norm": "lm_head.norm",
        "head": "lm_head.w_out",
    },
    layer="blocks.{}",
    inner={
        "attention_norm": "attention_norm",
        "attention.qkv": "attention.w_q attention.w_k attention.w_v",
        "attention.q_norm": "attention.q_norm",
        "attention.k_norm": "attention.k_norm",
        "attention.proj": "attention.w_out",
        "attention_post_norm": "post_attention_norm",
        "mlp_norm": "feed_forward_norm",
        "mlp.fc_in": "feed_forward.w1 feed_forward.w3",
        "mlp.fc_out": "feed_forward.w2",
        "mlp_post_norm": "post_feed_forward_norm",
    },
)
REORDERED = {"attention_post_norm": "attention_norm", "mlp_post_norm": "feed_forward_norm"}
"""Names of the norms after attention and MLP in blocks without others."""


def open_olmo_core(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of the last step of a folder, or of the folder of a step, and its run.

    Raises:
        UserError: If files are missing or damaged, or the model has parts that ours lacks.
    """
    checkpoint = detect_trainer(path, NAME)
    folder = path if checkpoint is None else checkpoint.path
    states = folder if (folder / INDEX).is_file() else folder / OLMO_CORE_STATES
    has_settings = states != folder or (folder / SETTINGS).is_file()
    step = folder if has_settings else folder.parent
    run = read_json_object(file_in(step, SETTINGS))
    config = ConfigValues(step / SETTINGS, _object(run.get("model")))
    settings = settings_of(config, lambda values: read_model(values, _length(run)))
    saved = DcpFolder.open(states)
    theirs = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(PREFIX)
    }
    names = names_of(config.values, settings.model.norm_position)
    source = open_model(step, NAME, settings, theirs, names)
    return with_olmo_core_run(source, saved, names, run, options)


def names_of(model: Mapping[str, Any], norm_position: str) -> TrainerNames:
    """The names of a model's tensors, and whether neighboring rows are rotated together."""
    names = NAMES
    if norm_position == "reordered":
        names = dataclasses.replace(names, inner={**names.inner, **REORDERED})
    block = _object(model.get("block"))
    mixer = _object(block.get("sequence_mixer") or block.get("attention"))
    is_complex = _object(mixer.get("rope") or {}).get("name") == "complex"
    return dataclasses.replace(names, has_neighbors=is_complex)


def _length(run: Mapping[str, Any]) -> int:
    """Tokens of a sequence of the run."""
    for part, key in (("dataset", "sequence_length"), ("train_module", "max_sequence_length")):
        value = run.get(part)
        if isinstance(value, dict) and isinstance(value.get(key), int):
            return int(value[key])
    return DEFAULT_LENGTH


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    return {key: item for key, item in value.items() if key != CLASS and item is not None}


def _part(
    config: ConfigValues,
    key: str,
    read: Callable[[ConfigValues], Fields],
    ignored: Collection[str] = (),
) -> Fields:
    """The fields of an object in the settings, whose unknown keys are noted; none without it."""
    value = config.get(key, None)
    if value is None:
        return {}
    inner = config.inner(_object(value))
    fields = read(inner)
    for name in sorted(inner.values.keys() - inner.used - {*ignored}):
        config.lack("an unknown setting", f"{key}.{name}", inner.values[name])
    return fields


def read_model(config: ConfigValues, seq_length: int) -> Fields:
    """The options of the model; `config.lacking` has what our model lacks.

    Args:
        config: The settings "model" of a run.
        seq_length: Tokens of a sequence of the run.
    """
    config.used.update(IGNORED_OF_MODEL)
    layers = config.number("n_layers", int)
    if (name := config.get("name", "default")) != "default":
        config.lack("another kind of model", "name", name)
    for key in ("block_pattern", "block_overrides"):
        if value := config.get(key, None):
            config.lack("blocks that differ", key, value)
    scale = config.number("embed_scale", float, None)
    fields: Fields = {
        "num_layers": layers,
        "hidden_size": config.number("d_model", int),
        "vocab_size": config.number("vocab_size", int),
        "seq_length": seq_length,
        "embedding_multiplier": 1.0 if scale is None else scale,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    norms: list[tuple[Any, Any]] = []
    fields |= _part(config, "block", lambda block: _read_block(block, fields, norms))
    fields |= _part(
        config, "lm_head", lambda head: _read_head(head, norms), ("dtype", "loss_implementation")
    )
    if config.get("embedding_norm", None) is not None:
        _part(config, "embedding_norm", lambda norm: _read_norm(norm, norms), ("dtype",))
        fields["embed_layernorm"] = True
        if scale not in (None, 1.0):
            config.lack("a factor of a normalized embedding", "embed_scale", scale)
    if len({*norms}) > 1:
        config.lack("norms of several kinds", "layer_norm", sorted({*norms}, key=str))
    normalization, epsilon = norms[0] if norms else (None, None)
    if not norms:
        config.lack("a model without norms", "layer_norm", None)
    return {**fields, "normalization": normalization, "norm_epsilon": epsilon}


def _read_norm(config: ConfigValues, norms: list[tuple[Any, Any]]) -> Fields:
    """Notes kind and epsilon of a norm."""
    name = config.get("name", "default")
    kind_of_norm = NORMS.get(name)
    config.get("full_precision", None)
    epsilon = config.number("eps", float, None)
    has_bias = config.get("bias", True)
    if kind_of_norm is None:
        config.lack("another norm", "layer_norm.name", name)
    elif has_bias != (kind_of_norm == "LayerNorm"):
        config.lack(
            f"{kind_of_norm} {'with' if has_bias else 'without'} biases",
            "layer_norm.bias",
            has_bias,
        )
    if config.get("elementwise_affine", True) is not True:
        config.lack("norms without weights", "layer_norm.elementwise_affine", False)
    norms.append((kind_of_norm, 1e-5 if epsilon is None else epsilon))
    return {}


def _read_block(config: ConfigValues, model: Fields, norms: list[tuple[Any, Any]]) -> Fields:
    name = config.get("name", "default")
    if name not in NORM_POSITIONS:
        config.lack("another kind of block", "block.name", name)
    if config.get("feed_forward_moe", None) is not None:
        config.lack("experts", "block.feed_forward_moe", "...")
    alphas = [
        config.number(f"{part}_residual_alpha", float, None) or 1.0
        for part in ("attention", "feed_forward")
    ]
    if alphas[0] != alphas[1]:
        config.lack("two factors of the residual", "block.attention_residual_alpha", alphas)
    _part(config, "layer_norm", lambda norm: _read_norm(norm, norms), ("dtype",))
    fields: Fields = {
        "norm_position": NORM_POSITIONS.get(name),
        "hidden_dropout": config.number("dropout", float, None) or 0.0,
        "residual_multiplier": alphas[0],
    }
    key = "sequence_mixer" if config.get("sequence_mixer", None) is not None else "attention"
    fields |= _part(
        config,
        key,
        lambda mixer: _read_attention(mixer, model, norms),
        IGNORED_OF_ATTENTION,
    )
    fields |= _part(config, "feed_forward", _read_feed_forward, ("dtype",))
    attention_bias = fields.pop("attention_bias", None)
    mlp_bias = fields.pop("mlp_bias", None)
    if attention_bias is not mlp_bias:
        biases = [attention_bias, mlp_bias]
        config.lack("biases in only some of the linear layers", "block.*.bias", biases)
    return {**fields, "add_bias_linear": bool(mlp_bias)}


def _read_attention(config: ConfigValues, model: Fields, norms: list[tuple[Any, Any]]) -> Fields:
    heads = config.number("n_heads", int, 16)
    head_dim = config.number("head_dim", int, None) or model["hidden_size"] // heads
    mixer = config.values.get("type", "attention")
    name = config.get("name", "default")
    if name != "default" or mixer != "attention":
        config.lack("another kind of attention", "sequence_mixer.name", f"{mixer}, {name}")
    absent = {
        "gates of attention": "gate",
        "clipped queries, keys and values": "clip_qkv",
        "softmax that depends on the length": "scalable_softmax",
        "attention sinks": "attention_sinks",
        "a norm with weights of each head": "qk_norm_per_head_gains",
    }
    for part, key in absent.items():
        if value := config.get(key, None):
            config.lack(part, f"sequence_mixer.{key}", value)
    _part(config, "qk_norm", lambda norm: _read_norm(norm, norms), ("dtype",))
    is_per_head = config.get("use_head_qk_norm", False)
    fields: Fields = {
        "num_attention_heads": heads,
        "num_query_groups": config.number("n_kv_heads", int, None) or heads,
        "kv_channels": head_dim,
        "attention_bias": config.get("bias", True),
        "attention_dropout": config.number("dropout", float, None) or 0.0,
    }
    if config.get("qk_norm", None) is not None:
        fields |= {
            "qk_layernorm": True,
            "qk_layernorm_scope": "head" if is_per_head else "all-heads",
        }
    windows = _windows(config, model["num_layers"])
    if any(windows):
        sizes = {*filter(None, windows)}
        if len(sizes) > 1:
            config.lack("windows of several sizes", "sequence_mixer.sliding_window", sorted(sizes))
        fields["window_size"] = f"{max(sizes) - 1},0"
        if not all(windows):
            fields["window_attn_skip_freq"] = str([int(bool(size)) for size in windows])
    if config.get("rope", None) is None:
        return {**fields, "position_embedding_type": "none"}
    return fields | _part(config, "rope", lambda rope: _read_rope(rope, head_dim, windows))


def _windows(config: ConfigValues, layers: int) -> list[int]:
    """Tokens of the window of each layer; 0 without one."""
    windows = [0] * layers

    def read(window: ConfigValues) -> Fields:
        pattern = window.get("pattern")
        is_first_full = window.get("force_full_attention_on_first_layer", True)
        is_last_full = window.get("force_full_attention_on_last_layer", True)
        for layer in range(layers):
            is_full = (is_first_full and layer == 0) or (is_last_full and layer == layers - 1)
            size = pattern[(layer - bool(is_first_full)) % len(pattern)]
            windows[layer] = 0 if is_full else max(int(size), 0)
        return {}

    _part(config, "sliding_window", read)
    return windows


def _read_rope(config: ConfigValues, head_dim: int, windows: list[int]) -> Fields:
    name = config.get("name", "default")
    config.get("full_precision", True)
    if name not in ("default", "fused", "complex"):
        config.lack("another rotation", "rope.name", name)
    rotated = int(head_dim * config.number("partial_rotary_factor", float, 1.0))
    if name == "complex" and rotated != head_dim:
        config.lack("a rotation of a part of neighboring dimensions", "rope.name", name)
    fields: Fields = {
        "position_embedding_type": "rope",
        "rotary_base": config.number("theta", float, 500000.0),
        "rotary_percent": rotated / head_dim,
    }
    if config.get("no_global_rope", False):
        fields["no_rope_freq"] = pattern_of([not size for size in windows])
    scaling = config.get("scaling", None)
    if scaling is not None:
        scaled = str(scaling.get(CLASS, "")).rpartition(".")[2]
        base = fields["rotary_base"]
        fields |= _part(
            config, "scaling", lambda values: _read_scaling(values, scaled, rotated, base)
        )
    return fields


def _read_scaling(config: ConfigValues, name: str, rotated: int, base: float) -> Fields:
    rescale = config.number("attention_rescale_factor", float, 1.0)
    if rescale != 1:
        config.lack(
            "another factor of rotated queries", "scaling.attention_rescale_factor", rescale
        )
    if name == "ABFRoPEScalingConfig":
        return {"rotary_base": config.number("new_theta", float, 8e6)}
    if name == "PIRoPEScalingConfig":
        return {LINEAR: config.number("factor", float, 2.0)}
    if name == "StepwiseRoPEScalingConfig":
        for key, value in STEPWISE.items():
            if (other := config.number(key, float, value)) != value:
                config.lack("another scaling than that of Llama 3.1", f"scaling.{key}", other)
        return {
            "use_rope_scaling": True,
            "rope_scaling_factor": config.number("factor", float, 32.0),
        }
    if name != "YaRNRoPEScalingConfig":
        config.lack("another scaling of rotary positions", "rope.scaling", name)
        config.used.update(config.values)
        return {}
    length = config.number("old_context_len", int, 8192)
    slow = config.number("beta_slow", float, 1.0)
    last = rotated * math.log(length / (slow * 2 * math.pi)) / (2 * math.log(base))
    if math.ceil(last) > rotated // 2 - 1:
        config.lack("YaRN whose last dimension is limited", "scaling.old_context_len", length)
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": config.number("factor", float, 8.0),
        "yarn_original_max_position_embeddings": length,
        "yarn_beta_fast": config.number("beta_fast", float, 32.0),
        "yarn_beta_slow": slow,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }


def _read_feed_forward(config: ConfigValues) -> Fields:
    if (name := config.get("name", "default")) != "default":
        config.lack("another MLP", "feed_forward.name", name)
    activation = config.get("activation", "silu")
    if activation not in ACTIVATIONS:
        config.lack("another activation function", "feed_forward.activation", activation)
    return {
        "ffn_hidden_size": config.number("hidden_size", int),
        "mlp_bias": config.get("bias", True),
        **ACTIVATIONS.get(activation, {}),
    }


def _read_head(config: ConfigValues, norms: list[tuple[Any, Any]]) -> Fields:
    if (name := config.get("name", "default")) != "default":
        config.lack("another output layer", "lm_head.name", name)
    if config.get("layer_norm", None) is None:
        config.lack("an output layer without a norm", "lm_head.layer_norm", None)
    _part(config, "layer_norm", lambda norm: _read_norm(norm, norms), ("dtype",))
    return {"output_layer_bias": config.get("bias", True)}
