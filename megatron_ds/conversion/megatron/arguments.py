"""The model that the saved arguments of a Megatron checkpoint describe.

Owns which argument means which of our model's options, over the versions and forks of Megatron, and
which arguments name parts that our model lacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config.data_files import read_table
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.config.tokenizer import TOKENIZERS
from megatron_ds.conversion.megatron.names import QkvOrder, RowOrders
from megatron_ds.conversion.safe_unpickle import StandIn

POSITION_TYPES = {1: "rope", 2: "learned_absolute", 3: "alibi"}
"""Members of PositionEmbeddingType in bigscience's fork, by value."""
GATED = ("swiglu", "geglu", "reglu", "liglu")
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
TABLES = read_table(__file__)
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
NEOX_POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "none": "none", "alibi": "alibi"}
NEOX_OPTIONAL = (
    *("seq_length", "max_position_embeddings", "attention_dropout", "hidden_dropout"),
    "bias_gelu_fusion",
)
"""Settings of gpt-neox with the names of arguments."""


def arguments_of(value: Any) -> dict[str, Any]:
    """The attributes of a pickled namespace; none if the file has no arguments."""
    if isinstance(value, StandIn) and isinstance(value.state, dict):
        return dict(value.state)
    return dict(value) if isinstance(value, dict) else {}


def model_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Our model's options, as far as the arguments determine them.

    Returns:
        Values of fields of `ModelConfig`.
    """
    if not args:
        return {}
    heads = args["num_attention_heads"]
    settings = {
        **{name: args[name] for name in REQUIRED},
        "num_query_groups": _query_groups(args, heads),
        "kv_channels": args.get("kv_channels") or args["hidden_size"] // heads,
        "seq_length": args.get("seq_length") or args.get("encoder_seq_length"),
        "normalization": NORMS[str(args.get("normalization") or "LayerNorm").lower()],
        "norm_epsilon": args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5,
        "add_bias_linear": bool(args.get("add_bias_linear", True)),
        "untie_embeddings_and_output_weights": bool(
            args.get("untie_embeddings_and_output_weights", False)
        ),
        "embed_layernorm": bool(args.get("embed_layernorm", False)),
        "ffn_hidden_size": args.get("ffn_hidden_size") or 4 * args["hidden_size"],
        **_activation(args),
        **_positions(args),
    }
    if not settings["add_bias_linear"]:
        settings["add_qkv_bias"] = bool(args.get("add_qkv_bias", False))
    for name in ("attention_dropout", "hidden_dropout", "init_method_std"):
        settings[name] = args.get(name)
    return {name: value for name, value in settings.items() if value is not None}


def is_neox(state: Mapping[str, Any]) -> bool:
    """Whether gpt-neox saved a checkpoint: its arguments are a plain dict."""
    return isinstance(state.get("args"), dict) and "checkpoint_version" not in state


def neox_arguments(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The arguments of Megatron with the meaning of the settings of a run of gpt-neox.

    A checkpoint of gpt-neox has few arguments in its files, and the settings beside them.

    Returns:
        Nothing without the settings of the run: the saved arguments do not determine the model.

    Raises:
        UserError: If the settings cannot be read, or our model lacks a part.
    """
    import yaml

    settings: dict[str, Any] = {}
    for text in state.get("configs", ()):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise user_error(
                "tensor-file-unreadable", path=path / "configs", error=error
            ) from error
        settings |= {str(key).replace("-", "_"): value for key, value in (values or {}).items()}
    if not settings:
        return {}
    values = {**state["args"], **settings}
    kind, norm = values.get("pos_emb", "learned"), values.get("norm", "layernorm")
    activation = values.get("activation", "gelu")
    lacking = {
        f"positions {kind}": kind not in NEOX_POSITIONS,
        f"norm {norm}": norm not in NORMS,
        f"activation {activation}": activation != "gelu",
        "attention and MLP in parallel (gpt_j_residual)": bool(values.get("gpt_j_residual")),
    }
    for part, is_lacking in lacking.items():
        if is_lacking:
            raise user_error("megatron-part-unsupported", path=path, part=part)
    return {
        **{name: values[name] for name in REQUIRED},
        **{name: values.get(name) for name in NEOX_OPTIONAL},
        "num_key_value_heads": values.get("num_kv_heads"),
        "ffn_hidden_size": values.get("intermediate_size"),
        "position_embedding_type": NEOX_POSITIONS[kind],
        "rotary_percent": values.get("rotary_pct"),
        "rotary_base": values.get("rotary_emb_base"),
        "normalization": NORMS[norm],
        "layernorm_epsilon": values.get(
            "rms_norm_epsilon" if norm == "rmsnorm" else "layernorm_epsilon"
        ),
        "untie_embeddings_and_output_weights": values.get("no_weight_tying"),
    }


def tokenizer_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TokenizerConfig`; empty if a file of the tokenizer is not on this machine."""
    kind = args.get("tokenizer_type")
    if kind not in TOKENIZERS:
        return {}
    files = {name: args.get(name) for name in TOKENIZERS[kind]}
    if not all(isinstance(path, str) and os.path.exists(path) for path in files.values()):
        return {}
    return {"tokenizer_type": kind, **files}


def unsupported_parts(args: Mapping[str, Any]) -> Iterator[str]:
    """Descriptions of parts that our model lacks, each with the argument that asks for it."""
    for name, part in TABLES["unsupported"].items():
        value = args.get(name)
        if value and value != TABLES["harmless"].get(name):
            yield f"{part} ({name} {value})"
    experts = args.get("num_experts")
    numbers = experts if isinstance(experts, list | tuple) else [experts]
    if any(number and number > 1 for number in numbers):
        yield f"experts (num_experts {experts})"
    if args.get("swiglu") and args.get("glu_activation"):
        yield f"two gated activations (swiglu and glu_activation {args['glu_activation']})"
    if (
        args.get("add_position_embedding")
        and args.get("use_rotary_position_embeddings")
        and ("position_embedding_type" not in args)
    ):
        yield "learned positions together with rotary ones"
    if _positions(args).get("position_embedding_type") is None and args:
        yield f"positions of the type {args.get('position_embedding_type')}"
    if str(args.get("normalization") or "layernorm").lower() not in NORMS:
        yield f"the norm {args['normalization']}"


def row_orders(
    settings: Mapping[str, Any], args: Mapping[str, Any], version: float | None
) -> RowOrders:
    """The orders of rows in a checkpoint of legacy files.

    Args:
        settings: Complete options of the model.
        args: The saved arguments.
        version: `checkpoint_version`; None if the file has none.
    """
    heads = settings["num_attention_heads"]
    return RowOrders(
        heads=heads,
        groups=settings.get("num_query_groups") or heads,
        head_dim=settings.get("kv_channels") or settings["hidden_size"] // heads,
        qkv=qkv_order(args, version),
        gated=settings.get("activation") in GATED,
        up_first=bool(args.get("glu_activation")),
    )


def qkv_order(args: Mapping[str, Any], version: float | None) -> QkvOrder:
    """The order of the rows of a rank's `query_key_value`; for the arguments see `row_orders`."""
    if not version or "ds_sequence_parallel_fpdt" in args:
        # The commit that introduced this argument changed the order and not the version.
        return QkvOrder.BLOCKS
    if version == 1:
        return QkvOrder.INTERLEAVED
    if version in (2, 3):
        return QkvOrder.GROUPED
    raise user_error("megatron-version-unknown", version=version)


def true_vocab_size(state: Mapping[str, Any], args: Mapping[str, Any]) -> int | None:
    """Number of tokens without padding; None if the checkpoint does not tell."""
    for key in ("universal_checkpoint_info", "checkpoint_info"):
        if size := (state.get(key) or {}).get("original_vocab_size"):
            return int(size)
    if args.get("tokenizer_type") == "NullTokenizer" and args.get("vocab_size"):
        return int(args["vocab_size"]) + 1  # its end-of-document id is not counted
    return None


def notes(args: Mapping[str, Any]) -> Iterator[Problem]:
    """What a user should know of a checkpoint that can be loaded."""
    rotary = _positions(args).get("position_embedding_type") == "rope"
    if "ds_sequence_parallel_fpdt" in args and rotary and args.get("sequence_parallel") is False:
        yield Problem("megatron-deepspeed-wrong-rope")


def _query_groups(args: Mapping[str, Any], heads: int) -> int:
    if "group_query_attention" in args:
        return int(args["num_query_groups"]) if args["group_query_attention"] else heads
    return int(args.get("num_query_groups") or args.get("num_key_value_heads") or heads)


def _activation(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("swiglu"):
        return {"activation": "swiglu"}
    if glu := args.get("glu_activation"):
        return {"activation": glu}
    if args.get("squared_relu"):
        return {"activation": "squared-relu"}
    if args.get("openai_gelu"):
        return {"activation": "openai-gelu"}
    # Only the kernel that adds the bias approximates gelu by tanh.
    kind = "tanh" if args.get("bias_gelu_fusion") else "none"
    return {"activation": "gelu", "gelu_approximation": kind}


def _positions(args: Mapping[str, Any]) -> dict[str, Any]:
    kind = args.get("position_embedding_type")
    learned = "learned_absolute" if args.get("add_position_embedding", True) else "none"
    if isinstance(kind, StandIn):
        value = kind.arguments[-1] if kind.arguments else None
        names = {"rotary": "rope", "absolute": "learned_absolute", "alibi": "alibi"}
        kind = POSITION_TYPES.get(value) if isinstance(value, int) else names.get(str(value))
    elif kind is None:
        kind = "rope" if args.get("use_rotary_position_embeddings") else learned
    elif kind == "learned_absolute":
        kind = learned
    if kind == "learned_absolute":
        return {
            "position_embedding_type": kind,
            "max_position_embeddings": args.get("max_position_embeddings"),
        }
    if kind == "rope":
        return {
            "position_embedding_type": kind,
            "rotary_percent": float(args.get("rotary_percent") or 1.0),
            "rotary_base": float(args.get("rotary_base") or args.get("rope_theta") or 10000.0),
        }
    return {"position_embedding_type": kind if kind in ("alibi", "none") else None}
