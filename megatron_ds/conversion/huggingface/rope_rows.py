"""Rotary positions in config.json of Hugging Face models: base, scaling, and layers without them.

Versions before 5 of transformers have a key for each value and `rope_scaling`, later ones have all
of them in `rope_parameters`, which may have an object for each type of layers. The former are
written, which both read. The values are those that transformers takes from a file with both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ds.config import ModelConfig
from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields, Row

FULL, WINDOWED = "full_attention", "sliding_attention"
"""Types of layers."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of Llama 3.1, which no option changes."""
LINEAR = "rotary_seq_len_interpolation_factor"


def rope(
    theta_key: str = "rope_theta",
    fraction_key: str | None = None,
    fraction: float = 0.25,
    theta: float = 10000.0,
    window_theta: tuple[str, float] | None = None,
    every: int = 6,
    scaling: Mapping[str, Any] | None = None,
) -> Row:
    """Rotary position embeddings.

    Args:
        theta_key: Key of the base.
        fraction_key: Key of the fraction that is rotated. None: the family rotates everything,
            whatever a file has as `partial_rotary_factor`.
        fraction: Its default.
        theta: Default of the base.
        window_theta: Key and default of the base in layers with a window, which are not scaled.
            None: all layers have the same base.
        every: Every how many layers one has no window, by default.
        scaling: Default of the scaling. None: no scaling.
    """

    def read(config: ConfigValues) -> Fields:
        value = config.get("rope_scaling", None) or config.get("rope_parameters", None)
        value = value or scaling or {}
        entries = value.items() if isinstance(value, dict) else ()
        by_type = {key: entry for key, entry in entries if isinstance(entry, dict)}
        if not isinstance(value, dict) or (by_type and FULL not in by_type):
            raise config.unusable("rope_scaling", value, "an object")
        full = ConfigValues(config.path, by_type.get(FULL, value), config.lacking)
        base = full.number("rope_theta", float, config.get(theta_key, theta))
        fields = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": 1.0}
        if fraction_key is not None:
            default = config.get(fraction_key, fraction)
            fields["rotary_percent"] = full.number("partial_rotary_factor", float, default)
        fields |= _read_scaling(full, config)
        if window_theta is not None:
            key, default = window_theta
            windowed = ConfigValues(config.path, by_type.get(WINDOWED, {}), config.lacking)
            if (rope_type := windowed.get("rope_type", "default")) != "default":
                config.lack("scaling of rotary positions with a window", "rope_type", rope_type)
            other = windowed.number("rope_theta", float, config.get(key, default))
            fields |= _fields_by_type(layer_types(config, every), base, other)
        elif by_type:
            config.lack("rotary positions that depend on the type of the layer", "rope", by_type)
        return fields

    def write(model: ModelConfig) -> dict[str, Any]:
        written: dict[str, Any] = {theta_key: model.rotary_base}
        plain = None if scaling is None else {"rope_type": "default"}
        written["rope_scaling"] = write_scaling(model) or plain
        if fraction_key is not None:
            written[fraction_key] = model.rotary_percent
        if window_theta is not None:
            written |= _write_bases(model, theta_key, window_theta[0])
        return written

    return Row(read, write)


def _fields_by_type(types: Sequence[str], base: float, other: float) -> Fields:
    """Fields of positions of layers without and with a window, of which the latter are not scaled.

    Args:
        types: Type of each layer.
        base: Base of those without a window.
        other: Base of those with one.
    """
    is_full = [layer_type == FULL for layer_type in types]
    bases = tuple(base if chosen else other for chosen in is_full)
    per_layer = {} if other == base else {"rotary_base_per_layer": bases}
    return {**per_layer, "rope_scaling_layers": pattern_of(is_full)}


def _write_bases(model: ModelConfig, theta_key: str, window_key: str) -> dict[str, Any]:
    """The bases of layers with and without a window, and their parameters by type of layer."""
    bases = dict(zip(model.windows, model.rotary_bases, strict=True))
    base = bases.pop(None, model.rotary_base)
    other = next(iter(bases.values()), model.rotary_base)
    full = {"rope_type": "default", "rope_theta": base, **(write_scaling(model) or {})}
    by_type = {FULL: full, WINDOWED: {"rope_type": "default", "rope_theta": other}}
    return {theta_key: base, window_key: other, "rope_parameters": by_type}


def layer_types(config: ConfigValues, every: int) -> list[str]:
    """The type of each layer: by default every so many layers one has full attention."""
    every = config.number("sliding_window_pattern", int, every)
    layers = range(1, config.number("num_hidden_layers", int) + 1)
    default = [WINDOWED if layer % every else FULL for layer in layers]
    return list(config.get("layer_types", None) or default)


def _read_scaling(scaling: ConfigValues, config: ConfigValues) -> Fields:
    """Fields of the scaling in one object."""
    rope_type = scaling.get("rope_type type", "default")
    length = config.number("max_position_embeddings", int, None)
    if rope_type == "default":
        return {}
    if rope_type == "dynamic":
        return {
            "rope_ntk_factor": scaling.number("factor", float),
            "max_position_embeddings": length,
        }
    if rope_type == "linear":
        return {LINEAR: scaling.number("factor", float)}
    if rope_type == "llama3":
        for key, value in LLAMA3.items():
            if (other := scaling.number(key, float)) != value:
                scaling.lack(
                    "another scaling of rotary positions than that of Llama 3.1", key, other
                )
        return {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor", float)}
    if rope_type != "yarn":
        scaling.lack("scaling of rotary positions", "rope_type", rope_type)
        return {}
    original = scaling.number("original_max_position_embeddings", int, length)
    factor = scaling.number("factor", float, None) or length / original
    scales = [scaling.number(key, float, None) or 0.0 for key in ("mscale", "mscale_all_dim")]
    amplitude = scaling.number("attention_factor", float, None)
    if amplitude is not None:
        # The option that has the same effect, rounded so that it is the same when read back.
        mscale = 10 * (amplitude - 1) / math.log(factor) if factor > 1 else 1.0
        scales = [float(f"{mscale:.12g}"), 0.0]
        if (factor <= 1 and amplitude != 1) or mscale < 0:
            part = "another factor of rotated queries and keys"
            scaling.lack(part, "attention_factor", amplitude)
    elif 0.0 in scales:
        scales = [1.0, 0.0]
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": scaling.number("beta_fast", float, None) or 32.0,
        "yarn_beta_slow": scaling.number("beta_slow", float, None) or 1.0,
        "yarn_correction_range_round_to_int": scaling.get("truncate", True),
        **dict(zip(("mscale", "mscale_all_dim"), scales, strict=True)),
    }


def write_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """The value of `rope_scaling`."""
    if model.position_embedding_type == "yarn":
        scales = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
        if model.mscale_all_dim == 0:
            amplitude = 0.1 * model.mscale * math.log(model.rotary_scaling_factor) + 1
            scales = {"attention_factor": float(f"{amplitude:.15g}")} if model.mscale != 1 else {}
        return {
            "rope_type": "yarn",
            "factor": model.rotary_scaling_factor,
            "original_max_position_embeddings": model.yarn_original_max_position_embeddings,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
            "truncate": model.yarn_correction_range_round_to_int,
            **scales,
        }
    if model.position_embedding_type != "rope":
        return None
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
    if model.rotary_seq_len_interpolation_factor != 1:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if model.rope_ntk_factor is not None:
        return {"rope_type": "dynamic", "factor": model.rope_ntk_factor}
    return None


def _read_rope_layers(config: ConfigValues) -> Fields:
    layers = config.get("no_rope_layers", None)
    if not layers:
        return {"no_rope_freq": str(config.number("no_rope_layer_interval", int, 4))}
    present = layers[: config.number("num_hidden_layers", int)]
    return {"no_rope_freq": pattern_of([not has_rope for has_rope in present])}


def _write_rope_layers(model: ModelConfig) -> dict[str, Any]:
    lacking = model.rope_layers.get("no_rope_freq", ())
    return {"no_rope_layers": [int(not lacks_rope) for lacks_rope in lacking]}


ROPE_LAYERS = Row(_read_rope_layers, _write_rope_layers)
"""Layers that have rotary positions: 1 for these, 0 for the others."""
