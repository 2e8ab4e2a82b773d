"""The model of a gpt-neox checkpoint, in the arguments of Megatron.

A gpt-neox checkpoint has a few arguments in its files, and the settings of its run beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.megatron.arguments import NORMS

POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "none": "none", "alibi": "alibi"}
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
OPTIONAL = (
    *("seq_length", "max_position_embeddings", "attention_dropout", "hidden_dropout"),
    "bias_gelu_fusion",
)
"""Arguments of the same name."""


def is_neox(state: Mapping[str, Any]) -> bool:
    """Whether gpt-neox saved a checkpoint: its arguments are a plain dict."""
    return isinstance(state.get("args"), dict) and "checkpoint_version" not in state


def arguments(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The arguments of Megatron with the same meaning.

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
        f"positions {kind}": kind not in POSITIONS,
        f"norm {norm}": norm not in NORMS,
        f"activation {activation}": activation != "gelu",
        "attention and MLP in parallel (gpt_j_residual)": bool(values.get("gpt_j_residual")),
    }
    for part, is_lacking in lacking.items():
        if is_lacking:
            raise user_error("megatron-part-unsupported", path=path, part=part)
    return {
        **{name: values[name] for name in REQUIRED},
        **{name: values.get(name) for name in OPTIONAL},
        "num_key_value_heads": values.get("num_kv_heads"),
        "ffn_hidden_size": values.get("intermediate_size"),
        "position_embedding_type": POSITIONS[kind],
        "rotary_percent": values.get("rotary_pct"),
        "rotary_base": values.get("rotary_emb_base"),
        "normalization": NORMS[norm],
        "layernorm_epsilon": values.get(
            "rms_norm_epsilon" if norm == "rmsnorm" else "layernorm_epsilon"
        ),
        "untie_embeddings_and_output_weights": values.get("no_weight_tying"),
    }
