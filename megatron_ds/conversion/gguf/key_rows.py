"""Keys of GGUF files, and presence of tensors, that set several fields of the model.

A row reads keys without the architecture's name, and `True` by the name of each tensor of a file;
it writes both. Keys that start with `OWN` are ignored by llama.cpp and tell spellings of the same
model apart. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields, Row

OWN = "megatron_ds."
"""Start of keys of this program."""
OUTPUT = "output.weight"
FACTORS = "rope_freqs.weight"
TIED = f"{OWN}tie_word_embeddings"
BIASES = ("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias")
"""Tensors that show which linear layers have biases."""
BIAS_FIELDS: dict[tuple[bool, ...], Fields] = {
    (False, False, False): {"add_bias_linear": False},
    (True, False, False): {"add_bias_linear": False, "add_qkv_bias": True},
    (True, True, True): {"add_bias_linear": True},
    (False, False, True): {"add_bias_linear": True, "add_attention_bias": False},
}
PATTERN = "attention.sliding_window_pattern"
LLAMA3_LENGTH = 8192
"""Sequence length before the scaling of Llama 3.1, with wavelengths relative to it."""
LLAMA3_LOW = 1.0
LLAMA3_HIGH = 4.0
SIGMOID = 2
"""Value of `expert_gating_func`."""
FACTOR_ERROR = 1e-5
"""Relative difference of divisors of the rotation that rounding explains."""
YARN_SCALE = 0.1


def stated(field: str, default: Any) -> Row:
    """A field that llama.cpp need not know, in a key of this program.

    Args:
        field: The field.
        default: Its value in a file of another program.
    """
    key = f"{OWN}{field}"
    return Row(
        lambda config: {field: config.get(key, default)},
        lambda model: {key: model.gelu_kind if "gelu" in field else getattr(model, field)},
    )


def output(presence: str) -> Row:
    """Whether the output layer has weights of its own.

    Args:
        presence: Whether the tensor may be in the file, must be, or never is.
    """

    def read(config: ConfigValues) -> Fields:
        is_tied = config.get(TIED, False) or not config.get(OUTPUT, False)
        return {"untie_embeddings_and_output_weights": not is_tied}

    def write(model: ModelConfig) -> dict[str, Any]:
        is_tied = not model.untie_embeddings_and_output_weights
        is_there = presence == "required" or (presence == "optional" and not is_tied)
        return {OUTPUT: True if is_there else None, TIED: True if is_there and is_tied else None}

    return Row(read, write)


def biases(layers: str) -> Row:
    """Biases of the linear layers that an architecture may have."""

    def read(config: ConfigValues) -> Fields:
        if layers in ("none", "all"):
            return {"add_bias_linear": layers == "all"}
        presence = tuple(bool(config.get(name, False)) for name in BIASES)
        if layers == "qkv":
            presence = (presence[0], False, False)
        if presence not in BIAS_FIELDS:
            config.lack("biases in only some of the linear layers", BIASES[0], presence)
        return BIAS_FIELDS.get(presence, {})

    def write(model: ModelConfig) -> dict[str, Any]:
        presence = (model.qkv_bias, model.attention_bias, model.add_bias_linear)
        return {
            name: True if is_there else None
            for name, is_there in zip(BIASES, presence, strict=True)
        }

    return Row(read, write)


def _read_head_sizes(config: ConfigValues) -> Fields:
    size = config.number("attention.key_length", int, None)
    values = config.number("attention.value_length", int, size)
    if values != size:
        config.lack("values of another size than keys", "attention.value_length", values)
    return {} if size is None else {"kv_channels": size}


HEAD_SIZES = Row(
    _read_head_sizes,
    lambda model: dict.fromkeys(("attention.key_length", "attention.value_length"), model.head_dim),
)


def _read_positions(config: ConfigValues) -> Fields:
    return {"max_position_embeddings": config.number("context_length", int)}


POSITIONS = Row(_read_positions, lambda model: {"context_length": model.num_positions})
"""Learned positions: as many as the longest sequence."""


def rope(name: str, *, rotates_part: bool, reads_factors: bool) -> Row:
    """Rotary position embeddings.

    Args:
        name: Name of the architecture.
        rotates_part: Whether it may rotate a part of a head.
        reads_factors: Whether it reads divisors of the rotation.
    """

    def read(config: ConfigValues) -> Fields:
        base = config.number("rope.freq_base", float, 10000.0)
        if base is None or base <= 1:
            raise config.unusable("rope.freq_base", base, "a number above 1")
        fields: Fields = {"position_embedding_type": "rope", "rotary_base": base}
        if name != "deepseek2":
            fields["rotary_percent"] = _read_part(config, rotates_part)
        scaling = config.get("rope.scaling.type", "none")
        factor = config.number("rope.scaling.factor", float, 1.0)
        if scaling == "linear":
            fields["rotary_seq_len_interpolation_factor"] = factor
        elif scaling == "yarn":
            length = config.number("rope.scaling.original_context_length", int)
            fields |= {
                "position_embedding_type": "yarn",
                "rotary_scaling_factor": factor,
                "yarn_original_max_position_embeddings": length,
            }
            fields |= _read_latent_yarn(config) if name == "deepseek2" else {}
        elif scaling != "none":
            config.lack("another scaling of rotary positions", "rope.scaling.type", scaling)
        if reads_factors and (factors := config.get(FACTORS, None)) is not None:
            fields |= _read_factors(config, factors, base)
        return fields

    def write(model: ModelConfig) -> dict[str, Any]:
        written: dict[str, Any] = {
            "rope.freq_base": float(model.rotary_base),
            "rope.dimension_count": model.rotated_size,
        }
        factor = model.rotary_seq_len_interpolation_factor
        if model.position_embedding_type == "yarn":
            written |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(model.rotary_scaling_factor),
                "rope.scaling.original_context_length": model.yarn_original_max_position_embeddings,
            }
            if name == "deepseek2":
                written["rope.scaling.yarn_log_multiplier"] = YARN_SCALE * model.mscale_all_dim
        elif factor != 1:
            written |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        if reads_factors and model.use_rope_scaling:
            written[FACTORS] = llama3_factors(model)
        return written

    return Row(read, write)


def _read_part(config: ConfigValues, rotates_part: bool) -> float:
    """The fraction of a head that is rotated."""
    hidden, heads = (
        config.number(key, int) for key in ("embedding_length", "attention.head_count")
    )
    size = config.number("attention.key_length", int, hidden // heads)
    rotated = config.number("rope.dimension_count", int, size)
    if rotated != size and not rotates_part:
        config.lack("rotation of a part of a head", "rope.dimension_count", rotated)
    return float(rotated / size)


def _read_latent_yarn(config: ConfigValues) -> Fields:
    """The factors of scores, which leave queries and keys as they are."""
    scale = config.number("rope.scaling.yarn_log_multiplier", float, 0.0) / YARN_SCALE
    return {"mscale": scale, "mscale_all_dim": scale}


def llama3_factors(model: ModelConfig) -> list[float]:
    """The divisors of the rotation of Llama 3.1, of each pair of dimensions."""
    return _factors(model.rotated_size, model.rotary_base, model.rope_scaling_factor)


def _factors(size: int, base: float, factor: float) -> list[float]:
    factors = []
    for at in range(0, size, 2):
        length = 2 * math.pi * base ** (at / size)
        smooth = (LLAMA3_LENGTH / length - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _read_factors(config: ConfigValues, factors: Sequence[float], base: float) -> Fields:
    """The factor of Llama 3.1's scaling: the divisor of the slowest rotation, or a solution."""
    size = 2 * len(factors)
    slowest = 2 * math.pi * base ** ((size - 2) / size)
    smooth = (LLAMA3_LENGTH / slowest - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = max(smooth, 0.0)
    factor = 1.0
    if smooth < 1 and 1 / factors[-1] > smooth:
        factor = (1 - smooth) / (1 / factors[-1] - smooth)
    factor = float(f"{factor:.5g}")
    expected = _factors(size, base, factor) if factor >= 1 else [math.nan] * len(factors)
    pairs = zip(factors, expected, strict=True)
    if not all(math.isclose(*pair, rel_tol=FACTOR_ERROR) for pair in pairs):
        part = "another scaling of rotary positions than that of Llama 3.1"
        config.lack(part, FACTORS, [min(factors), max(factors)])
    return {"use_rope_scaling": True, "rope_scaling_factor": factor}


def _read_no_rope(config: ConfigValues) -> Fields:
    return {"no_rope_freq": "4"}


EVERY_FOURTH_WITHOUT_POSITIONS = Row(_read_no_rope, lambda model: {})


def windows(
    *, is_required: bool = True, scales_windows: bool = True, window_base: float | None = None
) -> Row:
    """A window in some layers.

    Args:
        is_required: Whether the runtime needs a layer with a window.
        scales_windows: Whether the scaling of rotary positions holds in these layers, too.
        window_base: Base of their rotary positions in a file without one. None: that of all layers.
    """

    def read(config: ConfigValues) -> Fields:
        size = config.number("attention.sliding_window", int, 0)
        layers = config.number("block_count", int)
        if not size and is_required:
            config.lack("a window in no layer", "attention.sliding_window", size)
        if not size:
            return {}
        pattern = config.get(PATTERN, None)
        if not isinstance(pattern, list) or len(pattern) != layers:
            raise config.unusable(PATTERN, pattern, "a list with a value for each layer")
        if not any(pattern):
            return {}
        fields: Fields = {
            "window_size": f"{size - 1},0",
            "window_attn_skip_freq": str([int(has_window) for has_window in pattern]),
        }
        base = config.number("rope.freq_base", float, 10000.0)
        other = config.number("rope.freq_base_swa", float, window_base or base)
        if other != base:
            fields["rotary_base_per_layer"] = tuple(
                other if has_window else base for has_window in pattern
            )
        if not scales_windows:
            fields["rope_scaling_layers"] = pattern_of([not has for has in pattern])
        return fields

    def write(model: ModelConfig) -> dict[str, Any]:
        pattern = [window is not None for window in model.windows]
        if not any(pattern):
            return {}
        written: dict[str, Any] = {
            "attention.sliding_window": model.window,
            PATTERN: pattern,
        }
        bases = dict(zip(pattern, model.rotary_bases, strict=True))
        written["rope.freq_base"] = float(bases.get(False, model.rotary_base))
        if window_base is not None or bases[True] != written["rope.freq_base"]:
            written["rope.freq_base_swa"] = float(bases[True])
        return written

    return Row(read, write)


def query_scale(layers: int) -> Row:
    """Gemma's scale of the scores, which the runtime knows by the number of layers.

    Args:
        layers: Layers of the model whose scale is that of hidden size / heads.
    """

    def read(config: ConfigValues) -> Fields:
        hidden, heads = (
            config.number(key, int) for key in ("embedding_length", "attention.head_count")
        )
        size = config.number("attention.key_length", int, hidden // heads)
        is_large = config.number("block_count", int) == layers
        return {"softmax_scale": (hidden // heads if is_large else size) ** -0.5}

    return Row(read, lambda model: {})


SCALED_EMBEDDING = Row(
    lambda config: {"embedding_multiplier": config.number("embedding_length", int) ** 0.5},
    lambda model: {},
)


def _read_granite(config: ConfigValues) -> Fields:
    scale = config.number("attention.scale", float, 0.0)
    return {
        "logits_multiplier": 1 / config.number("logit_scale", float),
        **({"softmax_scale": scale} if scale else {}),
    }


GRANITE = Row(
    _read_granite,
    lambda model: {
        "logit_scale": float(f"{1 / model.logits_multiplier:.12g}"),
        "attention.scale": model.softmax_scale,
    },
)
PARALLEL_RESIDUAL = Row(
    lambda config: (
        {"parallel_residual": "separate"} if config.get("use_parallel_residual", True) else {}
    ),
    lambda model: {"use_parallel_residual": model.parallel_residual == "separate"},
)
NORM_OF_QUERIES = "blk.0.attn_q_norm.weight"
QUERY_NORMS = Row(
    lambda config: {"qk_layernorm": bool(config.get(NORM_OF_QUERIES, False))},
    lambda model: {NORM_OF_QUERIES: True if model.qk_layernorm else None},
)


def _read_latent_sizes(config: ConfigValues) -> Fields:
    size = config.number("attention.key_length_mla", int)
    rank = config.number("attention.q_lora_rank", int, None)
    if rank is None:
        config.lack("queries that are no products of a latent vector", "q_lora_rank", rank)
    qk_head_dim = size - config.number("rope.dimension_count", int)
    return {"qk_head_dim": qk_head_dim, "q_lora_rank": rank}


LATENT_SIZES = Row(
    _read_latent_sizes,
    lambda model: {
        # Keys and values of all heads are the latent vector.
        "attention.head_count_kv": 1,
        "attention.key_length": model.kv_lora_rank + model.qk_pos_emb_head_dim,
        "attention.value_length": model.kv_lora_rank,
        "attention.key_length_mla": model.head_dim,
        "attention.q_lora_rank": model.q_lora_rank,
    },
)


def experts(name: str) -> Row:
    """Mixture of experts.

    Args:
        name: Name of the architecture, which decides how experts are weighed.
    """
    is_sigmoid = name in ("glm4moe", "deepseek2")

    def read(config: ConfigValues) -> Fields:
        count = config.number("expert_count", int, 0)
        if not count:
            return {}
        chosen = config.number("expert_used_count", int)
        if chosen == 1 and not is_sigmoid:
            config.lack("a weight of 1 for one expert", "expert_used_count", chosen)
        key = "feed_forward_length" if name == "llama" else "expert_feed_forward_length"
        width = config.number(key, int)
        fields: Fields = {
            "num_experts": (count,),
            "moe_router_topk": chosen,
            "moe_ffn_hidden_size": width,
            "moe_router_bias": name == "gpt-oss",
        }
        return fields | (_read_sigmoid(config, width) if is_sigmoid else {})

    def write(moe: MoEConfig) -> dict[str, Any]:
        if not moe.is_used:
            return {}
        written: dict[str, Any] = {
            "expert_count": moe.experts,
            "expert_used_count": moe.moe_router_topk,
        }
        # Without layers that have none, the size of the MLP is that of an expert.
        key = "feed_forward_length" if name == "llama" else "expert_feed_forward_length"
        written[key] = moe.moe_ffn_hidden_size
        return written | (_write_sigmoid(moe) if is_sigmoid else {})

    return Row(read, write, is_of_experts=True)


def _read_sigmoid(config: ConfigValues, width: int) -> Fields:
    """Sigmoid scores that are selected with a bias, shared experts, first dense layers, groups."""
    gating = config.number("expert_gating_func", int, SIGMOID)
    if gating != SIGMOID or not config.get("expert_weights_norm", False):
        part = "experts that are weighed by other than sigmoid scores, divided by their sum"
        config.lack(part, "expert_gating_func", gating)
    dense = config.number("leading_dense_block_count", int, 0)
    layers = config.number("block_count", int)
    groups = config.number("expert_group_count", int, 1)
    chosen = config.number("expert_group_used_count", int, 1)
    # The score of a group is the sum of its best two.
    if groups > 1 and config.number("expert_used_count", int) // chosen != 2:
        config.lack("groups with other than two experts of a token", "expert_group_count", groups)
    grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.number("expert_weights_scale", float, 1.0),
        "moe_shared_expert_intermediate_size": width * config.number("expert_shared_count", int),
        **({"moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}"} if dense else {}),
        **(grouped if groups > 1 else {}),
    }


def _write_sigmoid(moe: MoEConfig) -> dict[str, Any]:
    shared = moe.moe_shared_expert_intermediate_size or 0
    groups = moe.moe_router_num_groups or 1
    grouped = {
        "expert_group_count": groups,
        "expert_group_used_count": moe.moe_router_group_topk or 1,
    }
    return {
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
        "expert_weights_scale": float(moe.moe_router_topk_scaling_factor or 1.0),
        "expert_shared_count": shared // (moe.moe_ffn_hidden_size or 1),
        "leading_dense_block_count": next(filter(moe.has_experts, itertools.count())),
        **(grouped if groups > 1 else {}),
    }
