"""The arguments of Megatron and the options of our model that they mean, read and written.

Owns `ROWS`, over the versions and forks of Megatron. An argument that asks for a part that our
model lacks sets no field; a value that Megatron's models lack is not written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.data_files import read_table
from megatron_ds.config.model.attention import ROTARY
from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.config.options.tokenizer import TOKENIZERS
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.conversion.huggingface.config_rows import (
    EXPERT_FIELDS,
    ConfigValues,
    Fields,
    Row,
    ignored,
    values_of,
)
from megatron_ds.conversion.megatron.names import QkvOrder, RowOrders
from megatron_ds.conversion.model_settings import ModelSettings, resolved
from megatron_ds.conversion.safe_unpickle import StandIn
from megatron_ds.model.declaration.architecture import DENSE

GATED = ("swiglu", "geglu", "quick-geglu", "reglu", "liglu")
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
TABLES = read_table(__file__)


def _value(names: str) -> Row:
    """The field of the first name; read from the first argument that is set, and written to all."""
    keys = names.split()

    def read(args: ConfigValues) -> Fields:
        values = (value for key in keys if (value := args.values.get(key)) is not None)
        return {keys[0]: next(values, TABLES["defaults"].get(keys[0]))}

    def write(options: ModelConfig | MoEConfig) -> dict[str, Any]:
        return dict.fromkeys(keys, values_of(options)[keys[0]])

    return Row(read, write, keys[0] in EXPERT_FIELDS)


def _read_parts(args: ConfigValues) -> Fields:
    """No field: our model lacks what these arguments ask for."""
    for name, part in TABLES["unsupported"].items():
        value = args.values.get(name)
        chosen = value if isinstance(value, list | tuple) else [value]
        if any(item and item not in TABLES["harmless"].get(name, ()) for item in chosen):
            args.lacking.append(f"{part} ({name} {value})")
    return {}


def _read_experts(args: ConfigValues) -> Fields:
    """Experts of Megatron-LM; the files of the forks have others."""
    values = args.values
    experts = values.get("num_experts")
    layers = values.get("moe_layer_freq") or 1
    if experts == 1 or (isinstance(experts, list | tuple) and max(experts, default=1) > 1):
        args.lacking.append(f"experts (num_experts {experts})")
    if not isinstance(experts, int):
        return {}
    return {
        "num_experts": (experts,),
        "moe_layer_freq": None if layers == 1 else str(layers),
        "moe_router_bias": bool(values.get("add_bias_linear", True)),
    }


def _write_experts(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    layers = [int(moe.has_experts(layer)) for layer in range(model.num_layers)]
    is_mixed = moe.is_used and not all(layers)
    return {
        "num_experts": moe.experts if moe.is_used else None,
        "moe_layer_freq": layers if is_mixed else 1,
        "moe_grouped_gemm": False,
    }


def _read_activation(args: ConfigValues) -> Fields:
    values = args.values
    gated = values.get("glu_activation")
    if values.get("swiglu") and gated:
        args.lacking.append(f"two gated activations (swiglu and glu_activation {gated})")
    if name := "swiglu" if values.get("swiglu") else gated:
        return {"activation": name}
    for name in ("squared-relu", "openai-gelu", "quick-geglu"):
        if values.get(name.replace("-", "_")):
            return {"activation": name}
    # Only the kernel that adds the bias approximates gelu by tanh.
    approximation = "tanh" if values.get("bias_gelu_fusion") else "none"
    return {"activation": "gelu", "gelu_approximation": approximation}


def _write_activation(model: ModelConfig) -> dict[str, Any]:
    switches = ("swiglu", "squared-relu", "openai-gelu", "quick-geglu")
    return {
        **{name.replace("-", "_"): model.activation == name for name in switches},
        "bias_gelu_fusion": model.activation == "gelu" and model.gelu_kind == "tanh",
    }


def _read_mup(args: ConfigValues) -> Fields:
    if not args.values.get("use_mup"):
        return {}
    names = [name for name in TABLES["mup"] if args.values.get(name) is not None]
    return {"use_mup": True, **{name: args.values[name] for name in names}}


def _write_mup(model: ModelConfig) -> dict[str, Any]:
    """Megatron's arguments of muP; other models have none."""
    if not model.use_mup:
        return {}
    return {"use_mup": True, **{name: getattr(model, name) for name in TABLES["mup"]}}


def _read_positions(args: ConfigValues) -> Fields:
    values = args.values
    position_type = values.get("position_embedding_type")
    if values.get("multi_latent_attention"):
        position_type = values.get("rope_type") or "yarn"
        values = {**values, **{key: values.get(name) for key, name in TABLES["latent"].items()}}
    is_rotary = values.get("use_rotary_position_embeddings")
    has_table = values.get("add_position_embedding", True)
    if isinstance(position_type, StandIn):
        value = position_type.arguments[-1] if position_type.arguments else None
        position_type = TABLES["positions"].get(str(value))
    elif position_type is None and is_rotary:
        position_type = "rope"
        if values.get("add_position_embedding") and "position_embedding_type" not in values:
            args.lacking.append("learned positions together with rotary ones")
    elif position_type in (None, "learned_absolute"):
        position_type = "learned_absolute" if has_table else "none"
    fields = {"position_embedding_type": position_type, "rope_scaling_layers": "1"}
    if position_type == "learned_absolute":
        return {**fields, **_value("max_position_embeddings").read(args)}
    if position_type in ROTARY:
        return {**fields, **_read_rope(values, position_type)}
    if position_type not in ("alibi", "none"):
        args.lacking.append(f"positions of the type {values['position_embedding_type']}")
    return fields


def _read_rope(values: Mapping[str, Any], position_type: str) -> Fields:
    skipped = values.get("no_rope_freq") or 0
    if isinstance(skipped, list | tuple):
        skipped = pattern_of([bool(is_skipped) for is_skipped in skipped])
    fields: Fields = {
        "rotary_base": float(values.get("rotary_base") or values.get("rope_theta") or 10000.0),
        "rotary_base_per_layer": tuple(map(float, values.get("rotary_base_per_layer") or ())),
        "no_rope_freq": str(skipped),
    }
    for names in TABLES[position_type]:
        keys = names.split()
        present = (value for key in reversed(keys) if (value := values.get(key)) is not None)
        fields[keys[0]] = next(present, None)
    return fields


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    bases = [int(base) if base.is_integer() else base for base in model.rotary_bases]
    skipped = list(map(int, model.rope_layers["no_rope_freq"]))
    written = {
        key: getattr(model, names.split()[0])
        for names in TABLES[model.position_embedding_type]
        for key in names.split()
    }
    if model.multi_latent_attention:
        written |= {name: written[key] for key, name in TABLES["latent"].items() if key in written}
    return {
        **written,
        "rotary_base": bases[0],
        "rotary_base_per_layer": bases if len(set(bases)) > 1 else None,
        "no_rope_freq": skipped if any(skipped) else None,
    }


def _write_positions(model: ModelConfig) -> dict[str, Any]:
    position_type = model.position_embedding_type
    rope_type = None
    if model.multi_latent_attention:
        rope_type = position_type
        position_type = "rope"
    return {
        "rope_type": rope_type,
        "position_embedding_type": position_type if model.is_rotary else "learned_absolute",
        "add_position_embedding": position_type == "learned_absolute",
        "use_rotary_position_embeddings": position_type == "rope",
        "max_position_embeddings": model.num_positions,
        **(_write_rope(model) if model.is_rotary else {}),
    }


def _read_norm(args: ConfigValues) -> Fields:
    norm = args.values.get("normalization") or "LayerNorm"
    if str(norm).lower() not in NORMS:
        args.lacking.append(f"the norm {norm}")
    return {"normalization": NORMS.get(str(norm).lower())}


def _read_sizes(args: ConfigValues) -> Fields:
    values = args.values
    groups: Any = values.get("num_query_groups") or values.get("num_key_value_heads")
    is_grouped = groups and values.get("group_query_attention", True)
    return {
        "num_query_groups": int(groups if is_grouped else values["num_attention_heads"]),
        "ffn_hidden_size": values.get("ffn_hidden_size") or 4 * values["hidden_size"],
    }


def _write_sizes(model: ModelConfig) -> dict[str, Any]:
    return {
        "group_query_attention": model.kv_heads != model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "ffn_hidden_size": model.mlp_hidden_size,
    }


def _read_qkv_bias(args: ConfigValues) -> Fields:
    has_biases = args.values.get("add_bias_linear", True)
    return {} if has_biases else {"add_qkv_bias": bool(args.values.get("add_qkv_bias"))}


def _read_windows(args: ConfigValues) -> Fields:
    size, pattern = (args.values.get(name) for name in ("window_size", "window_attn_skip_freq"))
    return {
        "window_size": ",".join(map(str, size)) if size else None,
        "window_attn_skip_freq": str(pattern) if pattern else None,
    }


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    pattern = model.window_attn_skip_freq and [int(window is not None) for window in model.windows]
    size = None if model.window is None else (model.window - 1, 0)
    return {"window_size": size, "window_attn_skip_freq": pattern}


ROWS = (
    Row(_read_windows, _write_windows),
    Row(_read_parts, ignored(**TABLES["constant"]).write),
    Row(_read_experts, ignored().write),
    Row(_read_activation, _write_activation),
    Row(_read_positions, _write_positions),
    Row(_read_mup, _write_mup),
    Row(_read_norm, _value("normalization").write),
    Row(_read_sizes, _write_sizes),
    Row(_read_qkv_bias, _value("add_qkv_bias").write),
    *(Row(_value(name).read, ignored().write) for name in ("embed_layernorm", "parallel_residual")),
    *map(_value, TABLES["values"]),
)


def arguments_of(value: Any) -> dict[str, Any]:
    """The attributes of a pickled namespace; none if the file has no arguments."""
    if isinstance(value, StandIn) and isinstance(value.state, dict):
        return dict(value.state)
    return dict(value) if isinstance(value, dict) else {}


def model_settings(args: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Our model's options, as far as the arguments of a checkpoint determine them.

    Returns:
        Values of fields of `ModelConfig` and of `MoEConfig`.

    Raises:
        UserError: If the arguments ask for a part that our model lacks.
    """
    fields: Fields = {}
    config = ConfigValues(path, args)
    for row in ROWS if args else ():
        fields |= row.read(config)
        for part in config.lacking:
            raise user_error("megatron-part-unsupported", path=path, part=part)
    return {name: value for name, value in fields.items() if value is not None}


def model_arguments(model: ModelConfig, moe: MoEConfig = DENSE) -> dict[str, Any]:
    """The arguments of a model."""
    arguments = _write_experts(model, moe)
    for row in ROWS:
        arguments |= row.write(moe if row.is_of_experts else model)
    return arguments


def lacking_parts(model: ModelConfig, moe: MoEConfig = DENSE) -> Iterator[str]:
    """Parts of our model that its arguments do not describe, since Megatron's models lack them."""
    read = ModelSettings(model_settings(model_arguments(model, moe), Path()))
    described, wanted = (
        resolved(ModelSettings.of(settings.model, settings.moe, None, None))
        for settings in (read, ModelSettings.of(model, moe, None, None))
    )
    defaults = {**vars(ModelConfig()), **vars(DENSE)}
    for name in sorted({*described, *wanted} - {*TABLES["expressed"]}):
        value = wanted.get(name, defaults[name])
        if value != described.get(name, defaults[name]):
            yield TABLES["exported"].get(name, f"{name} {{}}").format(value)
    if moe.moe_shared_expert_intermediate_size and moe.is_used and model.add_bias_linear:
        yield "biases of shared experts"


def is_neox(state: Mapping[str, Any]) -> bool:
    """Whether gpt-neox saved a checkpoint: its arguments are a plain dict."""
    return isinstance(state.get("args"), dict) and "checkpoint_version" not in state


def neox_arguments(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The arguments of Megatron with the meaning of the settings of a run of gpt-neox.

    A checkpoint of gpt-neox has few arguments in its files, and the settings next to them.

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
    positions = TABLES["positions"]
    position_type = values.get("pos_emb", "learned")
    norm = values.get("norm", "layernorm")
    activation = values.get("activation", "gelu")
    lacking = {
        f"positions {position_type}": position_type not in positions,
        f"norm {norm}": norm not in NORMS,
        f"activation {activation}": activation != "gelu",
        "one norm of attention and MLP (gpt_j_tied)": bool(values.get("gpt_j_tied")),
    }
    if parts := [part for part, is_lacking in lacking.items() if is_lacking]:
        raise user_error("megatron-part-unsupported", path=path, part="; ".join(parts))
    epsilon = "rms_norm_epsilon" if norm == "rmsnorm" else "layernorm_epsilon"
    return {
        **{name: values[theirs] for name, theirs in TABLES["neox"].items() if theirs in values},
        "position_embedding_type": positions[position_type],
        "normalization": NORMS[norm],
        "layernorm_epsilon": values.get(epsilon),
        "parallel_residual": "separate" if values.get("gpt_j_residual") else None,
    }


def tokenizer_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TokenizerConfig`; empty if a file of the tokenizer is not on this machine."""
    tokenizer = args.get("tokenizer_type")
    if tokenizer not in TOKENIZERS:
        return {}
    files = {name: args.get(name) for name in TOKENIZERS[tokenizer]}
    if not all(isinstance(path, str) and os.path.exists(path) for path in files.values()):
        return {}
    return {"tokenizer_type": tokenizer, **files}


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
        has_gate=bool(settings.get("attention_output_gate")),
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
    """Number of tokens without padding; None if the checkpoint does not state it."""
    for key in ("universal_checkpoint_info", "checkpoint_info"):
        if size := (state.get(key) or {}).get("original_vocab_size"):
            return int(size)
    if args.get("tokenizer_type") == "NullTokenizer" and args.get("vocab_size"):
        return int(args["vocab_size"]) + 1  # its end-of-document id is not counted
    return None


def notes(args: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields notes for the user about a checkpoint that can be loaded."""
    rotary = settings.get("position_embedding_type") in ROTARY
    if "ds_sequence_parallel_fpdt" in args and rotary and args.get("sequence_parallel") is False:
        yield Problem("megatron-deepspeed-wrong-rope")
