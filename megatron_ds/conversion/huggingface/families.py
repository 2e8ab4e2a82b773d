"""The families of Hugging Face models that the model has the parts of: keys and tensor names.

Absent keys have the defaults of transformers' configuration classes, which files on the Hub rely
on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import ModelConfig
from megatron_ds.config.data_files import read_table
from megatron_ds.conversion.huggingface.config_rows import (
    ConfigValues,
    Row,
    always,
    choice,
    ignored,
    number,
    only,
    rope,
    tied,
)

PARALLEL = "attention and MLP in parallel"
ACTIVATION = "activation function of the MLP"
ATTENTION_SCALE = "another scale of the attention scores"
POST_NORM = "residual connections that start after the norms"
QUERY_GROUPS = "another kind of query groups"
PART_OF_BIASES = "biases in only some of the linear layers"


@dataclass(frozen=True)
class Family:
    """One `model_type`; families.toml explains what it has besides the keys of config.json."""

    architecture: str
    prefix: str
    names: Mapping[str, str]
    layer: str
    inner: Mapping[str, str]
    rows: tuple[Row, ...]
    grouped_qkv: bool = False
    is_transposed: bool = False
    buffers: Sequence[str] = ()


def _gelu(kind: str) -> dict[str, Any]:
    return {"activation": "gelu", "gelu_approximation": kind}


TANH, EXACT = _gelu("tanh"), _gelu("none")
ACTIVATIONS: dict[Any, Any] = {
    "gelu_new": TANH,
    "gelu": EXACT,
    "gelu_pytorch_tanh": TANH,
    "gelu_fast": TANH,
    "relu2": {"activation": "squared-relu"},
}
GATED: dict[Any, Any] = {
    "silu": {"activation": "swiglu"},
    "swish": {"activation": "swiglu"},
    "gelu": {"activation": "geglu"},
    "relu": {"activation": "reglu"},
}
STD = number("initializer_range", "init_method_std", float, 0.02)
VOCABULARY = number("vocab_size", "vocab_size", int)
SIZES = (
    VOCABULARY,
    number("num_hidden_layers n_layer", "num_layers", int),
    number("hidden_size n_embed", "hidden_size", int),
    number("num_attention_heads n_head", "num_attention_heads", int),
    STD,
)
LENGTH = number("max_position_embeddings", "seq_length", int)
DROPOUTS = (
    number("attention_dropout", "attention_dropout", float, 0.0),
    number("hidden_dropout", "hidden_dropout", float, 0.0),
)
WITHOUT_BIAS = {"add_bias_linear": False}


def _positions(config: ConfigValues) -> dict[str, Any]:
    """Learned positions: as many as the longest sequence."""
    positions = config.number("n_positions n_ctx max_position_embeddings", int, 1024)
    return {"max_position_embeddings": positions, "seq_length": positions}


GPT2 = (
    always(position_embedding_type="learned_absolute", normalization="LayerNorm"),
    always(add_bias_linear=True),
    VOCABULARY,
    number("n_layer num_hidden_layers", "num_layers", int, 12),
    number("n_embd hidden_size", "hidden_size", int, 768),
    number("n_head num_attention_heads", "num_attention_heads", int, 12),
    number("n_inner", "ffn_hidden_size", int, None),
    Row(_positions, lambda model: dict.fromkeys(("n_positions", "n_ctx"), model.num_positions)),
    number("layer_norm_epsilon", "norm_epsilon", float, 1e-5),
    choice("activation_function", ACTIVATION, "gelu_new", ACTIVATIONS),
    number("attn_pdrop", "attention_dropout", float, 0.1),
    number("resid_pdrop", "hidden_dropout", float, 0.1),
    Row(lambda config: {}, lambda model: {"embd_pdrop": model.hidden_dropout}),
    STD,
    tied(True),
    only("scale_attn_weights", ATTENTION_SCALE, True, True),
    only("scale_attn_by_inverse_layer_idx", ATTENTION_SCALE, False, False),
    only("add_cross_attention", "cross attention", False, False),
)

GPT_NEOX = (
    *SIZES,
    *DROPOUTS,
    LENGTH,
    rope("rotary_emb_base", "rotary_pct"),
    always(normalization="LayerNorm", add_bias_linear=True),
    number("intermediate_size", "ffn_hidden_size", int, 24576),
    number("layer_norm_eps", "norm_epsilon", float, 1e-5),
    choice("hidden_act", ACTIVATION, "gelu", ACTIVATIONS),
    tied(False),
    only("use_parallel_residual", PARALLEL, True, False),
    only("attention_bias", PART_OF_BIASES, True, True),
)

BLOOM = (
    VOCABULARY,
    number("n_layer num_hidden_layers", "num_layers", int),
    number("hidden_size n_embed", "hidden_size", int),
    number("n_head num_attention_heads", "num_attention_heads", int),
    STD,
    *DROPOUTS,
    always(normalization="LayerNorm", position_embedding_type="alibi", embed_layernorm=True),
    always(add_bias_linear=True, **TANH),
    number("seq_length", "seq_length", int, 2048),
    number("layer_norm_epsilon", "norm_epsilon", float, 1e-5),
    tied(True),
    only("apply_residual_connection_post_layernorm", POST_NORM, False, False),
)

FALCON = (
    *SIZES,
    *DROPOUTS,
    number("max_position_embeddings", "seq_length", int, 2048),
    rope(),
    always(normalization="LayerNorm"),
    number("ffn_hidden_size", "ffn_hidden_size", int, None),
    number("layer_norm_epsilon", "norm_epsilon", float, 1e-5),
    choice("activation", ACTIVATION, "gelu", ACTIVATIONS),
    tied(True),
    choice("bias", PART_OF_BIASES, False, {on: {"add_bias_linear": on} for on in (True, False)}),
    choice("multi_query", QUERY_GROUPS, True, {True: {"num_query_groups": 1}, False: {}}),
    only("parallel_attn", PARALLEL, True, False),
    only("new_decoder_architecture", PARALLEL, False, False),
    only("alibi", "ALiBi that is scaled with the attention scores", False, False),
    only("apply_residual_connection_post_layernorm", POST_NORM, False, False),
)

LLAMA_ROWS = (
    *SIZES,
    number("attention_dropout", "attention_dropout", float, 0.0),
    always(hidden_dropout=0.0, normalization="RMSNorm"),
    rope(),
    number("intermediate_size", "ffn_hidden_size", int),
    number("head_dim", "kv_channels", int, None),
    number("rms_norm_eps", "norm_epsilon", float, 1e-6),
    choice("hidden_act", ACTIVATION, "silu", GATED),
    tied(False),
)


def _read_biases(config: ConfigValues) -> dict[str, Any]:
    biases = [config.get(key, False) for key in ("attention_bias", "mlp_bias")]
    if biases[0] is not biases[1]:
        config.lack(PART_OF_BIASES, "attention_bias, mlp_bias", biases)
    return {"add_bias_linear": biases[0]}


def _write_biases(model: ModelConfig) -> dict[str, Any]:
    return dict.fromkeys(("attention_bias", "mlp_bias"), model.add_bias_linear)


KV_HEADS = number("num_key_value_heads", "num_query_groups", int)
LLAMA = (
    *LLAMA_ROWS,
    number("num_key_value_heads", "num_query_groups", int, None),
    number("max_position_embeddings", "seq_length", int, 2048),
    Row(_read_biases, _write_biases),
    ignored(pretraining_tp=1),
)


def _read_window(config: ConfigValues) -> dict[str, Any]:
    """The tokens that a position attends to, its own included; null: all."""
    window = config.number("sliding_window", int, 4096)
    if window is not None and window < 1:
        config.lack("attention to no token", "sliding_window", window)
    return {} if window is None else {"window_size": f"{window - 1},0"}


WINDOW = Row(_read_window, lambda model: {"sliding_window": model.window})
MISTRAL = (*LLAMA_ROWS, KV_HEADS, LENGTH, WINDOW, always(**WITHOUT_BIAS))
WITHOUT_WINDOW = only("use_sliding_window", "sliding-window attention in some layers", False, False)
QWEN2 = (
    *LLAMA_ROWS,
    KV_HEADS,
    LENGTH,
    always(**WITHOUT_BIAS, add_qkv_bias=True),
    WITHOUT_WINDOW,
)
QWEN3 = (
    *LLAMA_ROWS,
    KV_HEADS,
    LENGTH,
    number("head_dim", "kv_channels", int, 128),
    always(**WITHOUT_BIAS, qk_layernorm=True),
    only("attention_bias", PART_OF_BIASES, False, False),
    WITHOUT_WINDOW,
)
ROWS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt_neox": GPT_NEOX,
    "bloom": BLOOM,
    "falcon": FALCON,
}
"""Keys of config.json by `model_type`."""


def _families() -> Iterator[tuple[str, Family]]:
    """The families of families.toml."""
    table = read_table(__file__)
    for name, own in table.items():
        like = table.get(own.pop("like", ""), {})
        entry = like | own | {"inner": like.get("inner", {}) | own.get("inner", {})}
        yield name, Family(rows=ROWS[name], **entry)


FAMILIES = dict(_families())
"""By `model_type`, in the order in which an export tries them."""
LACKING = {
    "olmo2": (
        "normalization of queries and keys over all heads",
        "norms after attention and MLP instead of before",
    ),
    "olmo": ("LayerNorm without weights",),
    "gemma": ("scaled embeddings", "norm weights with an offset of 1"),
    "phi": (PARALLEL,),
    "gptj": (PARALLEL,),
}
"""Known families that need parts which the model does not have, with these parts."""
