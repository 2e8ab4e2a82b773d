"""The families of Hugging Face models that the model has the parts of: keys and tensor names.

families.toml lists them; the rows of keys that no table can describe are here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.data_files import read_table
from megatron_ds.conversion.huggingface.config_rows import (
    FULL,
    WINDOWED,
    ConfigValues,
    Row,
    choice,
    ignored,
    layer_types,
    number,
)
from megatron_ds.conversion.huggingface.rope_parameters import ORIGINAL, RopeKeys
from megatron_ds.conversion.huggingface.rope_rows import (
    LATENT_SIZES,
    ROPE_LAYERS,
    latent_scale,
    rope,
    write_scaling,
)

TABLES = read_table(__file__)
ACTIVATIONS: dict[str, dict[str, dict[str, Any]]] = TABLES.pop("activations")
LACKING: dict[str, list[str]] = TABLES.pop("lacking")
"""Known families that need parts which the model does not have, with these parts."""


@dataclass(frozen=True)
class Family:
    """One `model_type`; families.toml explains what it has."""

    architecture: str
    prefix: str
    names: Mapping[str, str]
    layer: str
    inner: Mapping[str, str]
    rows: tuple[Row, ...]
    grouped_qkv: bool = False
    is_transposed: bool = False
    buffers: Sequence[str] = ()
    is_prefixed: bool = True
    renamed: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    null_is_false: Sequence[str] = ()
    unused: Mapping[str, Sequence[Any]] = field(default_factory=dict)


LayerTypes = Callable[[ConfigValues], list[str]]
"""The type of each layer."""


def _read_positions(config: ConfigValues) -> dict[str, Any]:
    """Learned positions: as many as the longest sequence."""
    positions = config.number("n_positions", int, 1024)
    return {"max_position_embeddings": positions, "seq_length": positions}


def _read_biases(config: ConfigValues) -> dict[str, Any]:
    biases = [config.get(key, False) for key in ("attention_bias", "mlp_bias")]
    if biases[0] is not biases[1]:
        part = "biases in only some of the linear layers"
        config.lack(part, "attention_bias, mlp_bias", biases)
    return {"add_bias_linear": biases[0]}


def _write_biases(model: ModelConfig) -> dict[str, Any]:
    return dict.fromkeys(("attention_bias", "mlp_bias"), model.add_bias_linear)


def _read_window(config: ConfigValues, default: int | None = 4096) -> dict[str, Any]:
    """The tokens that a position attends to, its own included; null: all."""
    window = config.number("sliding_window", int, default)
    if window is not None and window < 1:
        config.lack("attention to no token", "sliding_window", window)
    return {} if window is None else {"window_size": f"{window - 1},0"}


def _read_windows(config: ConfigValues) -> dict[str, Any]:
    """A window in the layers that `layer_types` names or, without it, from a layer on."""
    is_used = config.get("use_sliding_window", False)
    types = config.get("layer_types", None)
    if is_used is not False and is_used is not True:
        config.lack("another kind of window", "use_sliding_window", is_used)
    layers = config.number("num_hidden_layers", int)
    first = min(config.number("max_window_layers", int, 28) or 0, layers)
    pattern = f"[0] * {first} + [1] * {layers - first}"
    if types is not None:
        pattern = _pattern_of(layer_types(config, layers), config)
    window = _read_window(config)
    return window | {"window_attn_skip_freq": pattern} if window and is_used is True else {}


def _pattern_of(types: Sequence[str], config: ConfigValues) -> str:
    """Pattern of the layers whose attention has a window, such as `[0, 1]`."""
    if not {*types} <= {WINDOWED, FULL}:
        config.lack("other kinds of attention", "layer_types", list(types))
    return str([int(name == WINDOWED) for name in types])


def _windows(types: LayerTypes, size: int = 4096) -> Row:
    """A window in the layers of a type."""

    def read(config: ConfigValues) -> dict[str, Any]:
        pattern = _pattern_of(types(config), config)
        fields = _read_window(config, size)
        return fields | {"window_attn_skip_freq": pattern} if fields else {}

    def write(model: ModelConfig) -> dict[str, Any]:
        types = [FULL if window is None else WINDOWED for window in model.windows]
        return {"sliding_window": model.window, "layer_types": types}

    return Row(read, write)


def _write_pattern(model: ModelConfig) -> dict[str, Any]:
    """The interval of the layers without a window, if they have one; `layer_types` decides."""
    has_window = [window is not None for window in model.windows]
    every = [*has_window, False].index(False) + 1
    regular = [bool((layer + 1) % every) for layer in range(model.num_layers)]
    return {"sliding_window_pattern": every} if has_window == regular else {}


def _write_topk(moe: MoEConfig) -> dict[str, Any]:
    return {"experts_per_token": moe.moe_router_topk}


def _write_full_attention(model: ModelConfig) -> dict[str, Any]:
    layers = model.num_layers
    return {"sliding_window": None, "max_window_layers": layers, "layer_types": [FULL] * layers}


def _write_original_positions(model: ModelConfig) -> dict[str, Any]:
    scaling = write_scaling(model) or {}
    return {ORIGINAL: scaling.get(ORIGINAL, model.seq_length)}


def _write_initial_positions(model: ModelConfig) -> dict[str, Any]:
    original = (write_scaling(model) or {}).get(ORIGINAL)
    return {} if original is None else {"initial_context_length": original}


def _read_full_attention(config: ConfigValues) -> dict[str, Any]:
    """No window in any layer, whatever `sliding_window` is."""
    if {*layer_types(config, 1)} != {FULL}:
        config.lack("a sliding window", "layer_types", config.get("layer_types"))
    return {}


def _inverse(factor: float) -> float:
    """The shortest number whose inverse is a factor, or the nearest one."""
    rounded = 1 / factor
    near = (math.nextafter(rounded, 0.0), math.nextafter(rounded, math.inf))
    candidates = (float(f"{rounded:.12g}"), rounded, *near)
    return next((value for value in candidates if 1 / value == factor), rounded)


def _write_query_scale(model: ModelConfig) -> dict[str, Any]:
    """The inverse square of the scale, which is an integer."""
    scale = model.softmax_scale or model.head_dim**-0.5
    return {"query_pre_attn_scalar": round(scale**-2)}


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    has_window = [window is not None for window in model.windows]
    return {
        "use_sliding_window": any(has_window),
        "sliding_window": model.window if any(has_window) else None,
        # Versions of transformers that do not read `layer_types` need windows in the last layers.
        "max_window_layers": [*has_window, True].index(True),
        "layer_types": [WINDOWED if has else FULL for has in has_window],
    }


def _read_scale(config: ConfigValues) -> dict[str, Any]:
    """Embeddings are multiplied by the root of the hidden size."""
    return {"embedding_multiplier": config.number("hidden_size", int) ** 0.5}


def _experts(keys: str, default: int) -> Row:
    """The number of experts, of whose probabilities one alone would not be normalized."""

    def read(config: ConfigValues) -> dict[str, Any]:
        if config.get("num_experts_per_tok", 2) == 1 and config.get("norm_topk_prob", True):
            config.lack("a weight of 1 for one expert", "num_experts_per_tok", 1)
        if dense := config.get("mlp_only_layers", None):
            config.lack("other layers without experts", "mlp_only_layers", dense)
        return {"num_experts": (config.number(keys, int, default),)}

    return Row(read, lambda moe: {keys.split()[0]: moe.experts}, is_of_experts=True)


def _read_rotated(config: ConfigValues) -> dict[str, Any]:
    """The dimensions of a head that are rotated; null: all."""
    keys = ("n_embd hidden_size", 4096), ("n_head num_attention_heads", 16)
    hidden, heads = (config.number(key, int, default) for key, default in keys)
    rotated = config.number("rotary_dim", int, 64)
    return {} if rotated is None else {"rotary_percent": rotated / (hidden // heads)}


def _read_shared(
    config: ConfigValues,
    dense: int = 1,
    groups: int = 1,
    chosen: int = 1,
    scale: float = 1.0,
    width: int = 1408,
) -> dict[str, Any]:
    """First dense layers, shared experts, groups and the scale of the weights."""
    names = "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"
    defaults = zip(names, (1, dense, groups, chosen), strict=True)
    shared, dense, groups, chosen = (config.number(name, int, value) for name, value in defaults)
    layers = config.number("num_hidden_layers", int)
    if not shared:
        config.lack("a layer without shared experts", "n_shared_experts", shared)
    # The score of a group is the sum of its best two.
    if groups > 1 and config.number("num_experts_per_tok", int, 8) // chosen != 2:
        config.lack("groups of which a token has other than two experts", "topk_group", chosen)
    grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    size = config.number("moe_intermediate_size", int, width)
    return {
        **({"moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}"} if dense else {}),
        **(grouped if groups > 1 else {}),
        "moe_shared_expert_intermediate_size": shared * (size or 0) or None,
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor", float, scale),
    }


def _write_shared(moe: MoEConfig) -> dict[str, Any]:
    shared = moe.moe_shared_expert_intermediate_size
    width = moe.moe_ffn_hidden_size
    layers = filter(moe.has_experts, itertools.count())
    return {
        "n_shared_experts": (shared or 0) // (width or 1),
        "first_k_dense_replace": next(layers) if moe.is_used else 0,
        "n_group": moe.moe_router_num_groups or 1,
        "topk_group": moe.moe_router_group_topk or 1,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
    }


def _read_longrope(config: ConfigValues) -> dict[str, Any]:
    """The family takes YaRN for LongRoPE."""
    scaling = config.get("rope_scaling", None) or config.get("rope_parameters", None) or {}
    if "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        config.lack("scaling of rotary positions by LongRoPE", "rope_type", "yarn")
    return {}


def _read_latent_sizes(config: ConfigValues) -> dict[str, Any]:
    """Sizes of a head that follow from others, where a file has them, too."""
    plain, rotated = (config.number(key, int, size) for key, size in LATENT_SIZES.items())
    for key, size in (("head_dim", rotated), ("qk_head_dim", rotated + plain)):
        if (other := config.number(key, int, None)) not in (None, size):
            config.lack("another size of a head", key, other)
    return {}


def _read_epsilon(config: ConfigValues) -> dict[str, Any]:
    """The norms of latent vectors have transformers' default, whatever the other norms have."""
    if (epsilon := config.number("rms_norm_eps", float, 1e-6)) != 1e-6:
        config.lack("another epsilon than of the latent vectors' norms", "rms_norm_eps", epsilon)
    return {}


EMBEDDING_DROPOUT = Row(lambda config: {}, lambda model: {"embd_pdrop": model.hidden_dropout})
OLDER_ACTIVATION = choice("hidden_act", "activation", "gelu_pytorch_tanh", ACTIVATIONS["gated"])
"""Key of the activation in older versions, whose value has no effect now."""
ROUTER_LOGITS = ignored(is_of_experts=True, output_router_logits=False)
SCALED_EMBEDDING = Row(_read_scale, lambda model: {})
BIASES = Row(_read_biases, _write_biases)
QUERY_SCALE = Row(
    lambda config: {"softmax_scale": config.number("query_pre_attn_scalar", float, 256.0) ** -0.5},
    _write_query_scale,
)
LOGITS_SCALE = Row(
    lambda config: {"logits_multiplier": 1 / config.number("logits_scaling", float, 1.0)},
    lambda model: {"logits_scaling": _inverse(model.logits_multiplier)},
)
OPTIONAL_WINDOW = Row(
    partial(_read_window, default=None), lambda model: {"sliding_window": model.window}
)
TYPES: dict[str, LayerTypes] = {
    "gemma2": partial(layer_types, every=2),
    "gemma3_text": partial(layer_types, every=6, pattern_key="sliding_window_pattern"),
    "gpt_oss": partial(layer_types, every=2),
    "olmo3": partial(layer_types, every=4),
}
"""The type of each layer by `model_type`, for families with windows in some layers."""
SPECIAL_ROWS = {
    "gpt2": (
        Row(
            _read_positions,
            lambda model: dict.fromkeys(("n_positions", "n_ctx"), model.num_positions),
        ),
        EMBEDDING_DROPOUT,
    ),
    "phi": (EMBEDDING_DROPOUT,),
    "gptj": (
        Row(_read_rotated, lambda model: {"rotary_dim": model.rotated_size}),
        EMBEDDING_DROPOUT,
        ignored(rotary=True, scale_attn_weights=True),
    ),
    "falcon": (Row(lambda config: {}, lambda model: {"num_kv_heads": model.kv_heads}),),
    "llama": (BIASES, ignored(pretraining_tp=1)),
    "qwen2": (Row(_read_windows, _write_windows),),
    "qwen3": (Row(_read_windows, _write_windows),),
    "gemma": (SCALED_EMBEDDING,),
    "gemma2": (
        SCALED_EMBEDDING,
        QUERY_SCALE,
        _windows(TYPES["gemma2"]),
        Row(lambda config: {}, OLDER_ACTIVATION.write),
    ),
    "gemma3_text": (
        SCALED_EMBEDDING,
        QUERY_SCALE,
        _windows(TYPES["gemma3_text"]),
        Row(lambda config: {}, _write_pattern),
        ignored(attn_logit_softcapping=None),
    ),
    "olmo3": (_windows(TYPES["olmo3"]),),
    "granite": (BIASES, LOGITS_SCALE),
    "mistral": (Row(_read_window, lambda model: {"sliding_window": model.window}),),
    "mixtral": (OPTIONAL_WINDOW, _experts("num_local_experts", 8), ROUTER_LOGITS),
    "gpt_oss": (
        _windows(TYPES["gpt_oss"], 128),
        _experts("num_local_experts", 128),
        ROUTER_LOGITS,
        Row(lambda config: {}, _write_topk, is_of_experts=True),
        Row(lambda config: {}, _write_initial_positions),
    ),
    "phi3": (
        EMBEDDING_DROPOUT,
        OPTIONAL_WINDOW,
        Row(_read_longrope, _write_original_positions),
        ignored(attention_bias=False),
    ),
    "qwen3_moe": (
        _experts("num_experts", 128),
        Row(lambda config: {}, lambda model: {"max_window_layers": model.num_layers}),
        ROUTER_LOGITS,
        ignored(is_of_experts=True, mlp_only_layers=[], sliding_window=None),
    ),
    "glm4_moe": (
        _experts("n_routed_experts", 128),
        Row(_read_shared, _write_shared, is_of_experts=True),
    ),
    "deepseek_v3": (
        Row(_read_epsilon, lambda model: {"head_dim": model.qk_pos_emb_head_dim}),
        Row(_read_latent_sizes, lambda model: {}),
        latent_scale(RopeKeys()),
        _experts("n_routed_experts", 256),
        Row(
            partial(_read_shared, dense=3, groups=8, chosen=4, scale=2.5, width=2048),
            _write_shared,
            is_of_experts=True,
        ),
        ignored(is_of_experts=True, topk_method="noaux_tc", scoring_func="sigmoid"),
        ignored(is_of_experts=True, moe_layer_freq=1, ep_size=1),
    ),
    "smollm3": (
        BIASES,
        ROPE_LAYERS,
        Row(_read_full_attention, _write_full_attention),
        ignored(pretraining_tp=1),
    ),
}
"""Rows by `model_type`, in addition to families.toml."""


def _take_rows(entry: dict[str, Any], layers: LayerTypes | None) -> Iterator[Row]:
    """The rows of a family's keys, which are removed from its entry in families.toml.

    Args:
        entry: The entry.
        layers: The type of each layer, if layers with a window have a rotary base of their own.
    """
    fields = entry.pop("always")
    yield Row(lambda config: fields, lambda model: {})
    options = (*dataclasses.fields(ModelConfig), *dataclasses.fields(MoEConfig))
    types = {item.name: item.type for item in options}
    for name, column in entry.pop("numbers").items():
        cls = float if "float" in types[name] else int
        if isinstance(column, str):
            yield number(column, name, cls)
        else:
            keys, *default = column
            yield number(keys, name, cls, *default or [None])
    if "activation" in entry:
        key, default, values = entry.pop("activation")
        yield choice(key, "activation function of the MLP", default, ACTIVATIONS[values])
    if "rope" in entry:
        yield rope(RopeKeys(**entry.pop("rope")), layers)
    for key, (default, if_true, if_false, part) in entry.pop("switches", {}).items():
        yield choice(key, part, default, {True: if_true, False: if_false})
    for key, (default, supported, part) in entry.pop("only", {}).items():
        yield choice(key, part, default, {supported: {}})


def _families() -> Iterator[tuple[str, Family]]:
    """The families of families.toml."""
    for name, values in TABLES.items():
        like = TABLES.get(values.pop("like", ""), {})
        inner = {
            key: like.get(key, {}) | value for key, value in values.items() if type(value) is dict
        }
        entry = like | values | inner
        has_bases = "window_theta" in entry.get("rope", {})
        rows = _take_rows(entry, TYPES[name] if has_bases else None)
        yield name, Family(rows=(*rows, *SPECIAL_ROWS.get(name, ())), **entry)


FAMILIES = dict(_families())
"""Families by `model_type`, in the order in which an export tries them."""
