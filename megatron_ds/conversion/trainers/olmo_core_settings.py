"""The settings of OLMo-core's models as options of ours.

    block               the settings of every layer, or of named ones that block_pattern repeats
    block_overrides     those of single layers

Layers may differ in windows, rotary positions and experts. Facts: ai2-olmo-core 3.0.0,
`olmo_core/nn`; version 2 calls `sequence_mixer` `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields
from megatron_ds.conversion.huggingface.rope_rows import LINEAR
from megatron_ds.conversion.trainers.layers_that_differ import merged_layers

CLASS = "_CLASS_"
"""Key of the class of an object, which is not imported."""
NORM_POSITIONS = {"default": "before", "reordered_norm": "reordered", "peri_norm": "both"}
EXPERT_BLOCKS = {"moe": "before", "moe_reordered_norm": "reordered"}
"""Position of the norms of blocks with experts."""
GATES = {"headwise": "head_wise_attn_gate", "elementwise": "attention_output_gate"}
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
IGNORED_OF_EXPERTS = (
    "dtype",
    "lb_loss_weight",
    "lb_loss_granularity",
    "z_loss_weight",
    "scale_loss_by_num_layers",
)


def object_of(value: Any) -> dict[str, Any]:
    """The values of an object in the settings that are not null.

    Raises:
        TypeError: If it is none.
    """
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
    return {} if value is None else _read_object(config, key, value, read, ignored)


def _read_object(
    config: ConfigValues,
    key: str,
    value: Any,
    read: Callable[[ConfigValues], Fields],
    ignored: Collection[str] = (),
) -> Fields:
    inner = config.inner(object_of(value))
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
    if (name := config.get("name", "default")) not in ("default", "moe"):
        config.lack("another kind of model", "name", name)
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
    fields |= _read_blocks(config, fields, norms)
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


def blocks_of(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of each layer's block.

    Raises:
        KeyError, TypeError, ValueError: If they are malformed.
    """
    layers = model["n_layers"]
    block = object_of(model["block"])
    if pattern := model.get("block_pattern"):
        return [object_of(block[pattern[layer % len(pattern)]]) for layer in range(layers)]
    blocks = [block] * layers
    for layer, override in object_of(model.get("block_overrides") or {}).items():
        blocks[int(layer)] = object_of(override)
    return blocks


def _read_blocks(config: ConfigValues, model: Fields, norms: list[tuple[Any, Any]]) -> Fields:
    """The options of all layers, which may differ in some."""
    config.used.update(("block", "block_pattern", "block_overrides"))
    layers = []
    for layer, block in enumerate(blocks_of(config.values)):

        def read(values: ConfigValues, layer: int = layer) -> Fields:
            return _read_block(values, layer, model, norms)

        layers.append(_read_object(config, "block", block, read))
    config.lacking[:] = dict.fromkeys(config.lacking)
    fields = merged_layers(config, layers)
    # Without layers that have no experts, nothing has this width.
    if "ffn_hidden_size" not in fields:
        fields["ffn_hidden_size"] = fields.get("moe_ffn_hidden_size")
    return fields


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


def _read_block(
    config: ConfigValues, layer: int, model: Fields, norms: list[tuple[Any, Any]]
) -> Fields:
    name = config.get("name", "default")
    has_experts = config.get("feed_forward_moe", None) is not None
    positions = EXPERT_BLOCKS if has_experts else NORM_POSITIONS
    if name not in positions:
        config.lack("another kind of block", "block.name", name)
    alphas = [
        config.number(f"{part}_residual_alpha", float, None) or 1.0
        for part in ("attention", "feed_forward")
    ]
    if alphas[0] != alphas[1]:
        config.lack("two factors of the residual", "block.attention_residual_alpha", alphas)
    _part(config, "layer_norm", lambda norm: _read_norm(norm, norms), ("dtype",))
    fields: Fields = {
        "norm_position": positions.get(name),
        "hidden_dropout": config.number("dropout", float, None) or 0.0,
        "residual_multiplier": alphas[0],
    }
    key = "sequence_mixer" if config.get("sequence_mixer", None) is not None else "attention"
    if config.get(key, None) is None:
        config.lack("a block without attention", "block.sequence_mixer", None)
    fields |= _part(
        config,
        key,
        lambda mixer: _read_attention(mixer, layer, model, norms),
        IGNORED_OF_ATTENTION,
    )
    if has_experts:
        experts = _part(config, "feed_forward_moe", _read_experts, IGNORED_OF_EXPERTS)
        fields |= {"experts": experts, "mlp_bias": False, "activation": "swiglu"}
    else:
        fields |= _part(config, "feed_forward", _read_feed_forward, ("dtype",))
    attention_bias = fields.pop("attention_bias", None)
    mlp_bias = fields.pop("mlp_bias", None)
    if attention_bias is not mlp_bias:
        biases = [attention_bias, mlp_bias]
        config.lack("biases in only some of the linear layers", "block.*.bias", biases)
    return {**fields, "add_bias_linear": bool(mlp_bias)}


def _read_experts(config: ConfigValues) -> Fields:
    """Experts that accept all of their tokens."""
    if (name := config.get("name", "default")) != "dropless":
        config.lack("experts with a capacity", "feed_forward_moe.name", name)
    if (capacity := config.get("capacity_factor", None)) is not None:
        config.lack("experts with a capacity", "feed_forward_moe.capacity_factor", capacity)
    if config.get("shared_mlp", None) is not None:
        part = "shared experts, whose output is averaged with that of the others"
        config.lack(part, "feed_forward_moe.shared_mlp", "...")
    fields: Fields = {
        "num_experts": (config.number("num_experts", int, 1),),
        "moe_ffn_hidden_size": config.number("hidden_size", int, 256),
        **_part(config, "latent_moe", _read_latent),
    }
    return fields | _part(config, "router", _read_router, ("dtype", "jitter_eps"))


def _read_latent(config: ConfigValues) -> Fields:
    if config.get("bias", False):
        config.lack("biases of projections", "latent_moe.bias", True)
    if config.get("up_proj_input_norm_enabled", False):
        config.lack("a norm of latent features", "latent_moe.up_proj_input_norm_enabled", True)
    config.get("up_proj_input_norm", None)
    return {"moe_latent_size": config.number("latent_dim", int)}


def _read_router(config: ConfigValues) -> Fields:
    """A router whose weights sum to one, or are the probabilities among all experts."""
    chosen = config.number("top_k", int, 1)
    function = config.get("gating_function", "softmax")
    normalized = config.number("normalize_expert_weights", float, None)
    has_bias = config.number("bias_gamma", float, None) is not None
    if (name := config.get("name", "default")) != "default":
        config.lack("another router", "router.name", name)
    for key in ("uniform_expert_assignment", "random_expert_assignment"):
        if config.get(key, False):
            config.lack("experts that are not chosen", f"router.{key}", True)
    if function not in ("softmax", "sigmoid"):
        config.lack("another score", "router.gating_function", function)
    if normalized not in (None, 1.0):
        config.lack("another norm of the weights", "router.normalize_expert_weights", normalized)
    is_normalized = normalized is not None
    if is_normalized and chosen == 1:
        config.lack("a weight of 1 for one expert", "router.normalize_expert_weights", normalized)
    if function == "sigmoid" and not is_normalized and chosen > 1:
        config.lack("weights that are not divided by their sum", "router.gating_function", function)
    if has_bias and function != "sigmoid":
        config.lack("a bias of the selection by softmax scores", "router.bias_gamma", "...")
    return {
        "moe_router_topk": chosen,
        "moe_router_score_function": function,
        "moe_router_pre_softmax": function == "softmax" and not is_normalized,
        "moe_router_enable_expert_bias": has_bias,
    }


def _read_attention(
    config: ConfigValues, layer: int, model: Fields, norms: list[tuple[Any, Any]]
) -> Fields:
    heads = config.number("n_heads", int, 16)
    head_dim = config.number("head_dim", int, None) or model["hidden_size"] // heads
    mixer = config.values.get("type", "attention")
    name = config.get("name", "default")
    if name != "default" or mixer != "attention":
        config.lack("another kind of attention", "sequence_mixer.name", f"{mixer}, {name}")
    absent = {
        "clipped queries, keys and values": "clip_qkv",
        "softmax that depends on the length": "scalable_softmax",
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
    if config.get("attention_sinks", False):
        fields["softmax_type"] = "learnable"
    fields |= _part(config, "gate", _read_gate)
    window = _windows(config, model["num_layers"])[layer]
    rope = _part(config, "rope", lambda rope: _read_rope(rope, head_dim, window))
    return {**fields, "window": window, "rope": rope or None}


def _read_gate(config: ConfigValues) -> Fields:
    config.get("full_precision", True)
    granularity = config.get("granularity", "headwise")
    if granularity not in GATES:
        config.lack("another gate", "gate.granularity", granularity)
        return {}
    return {GATES[granularity]: True}


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


def _read_rope(config: ConfigValues, head_dim: int, window: int) -> Fields:
    """The rotary positions of a layer; nothing if it has none."""
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
        "has_neighbors": name == "complex",
    }
    scaling = config.get("scaling", None)
    if scaling is not None:
        scaled = str(scaling.get(CLASS, "")).rpartition(".")[2]
        base = fields["rotary_base"]
        fields |= _part(
            config, "scaling", lambda values: _read_scaling(values, scaled, rotated, base)
        )
    return {} if config.get("no_global_rope", False) and not window else fields


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
