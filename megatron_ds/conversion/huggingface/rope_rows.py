"""Rotary positions in config.json of Hugging Face models: base, scaling, and layers without them.

The keys of versions before 5 of transformers are written, which later versions read, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ds.config import ModelConfig
from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.conversion.huggingface.config_rows import FULL, WINDOWED, ConfigValues, Fields, Row
from megatron_ds.conversion.huggingface.rope_parameters import (
    FRACTION,
    ORIGINAL,
    PARAMETERS,
    SCALING,
    RopeKeys,
)

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
"""Parameters of Llama 3.1, which no option changes."""
LINEAR = "rotary_seq_len_interpolation_factor"
LATENT_SIZES = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
"""Keys of the sizes of a latent head, and their defaults."""


def rope(keys: RopeKeys, types: Callable[[ConfigValues], list[str]] | None = None) -> Row:
    """Rotary position embeddings.

    Args:
        keys: Where the family has its parameters.
        types: The type of each layer, for families whose layers with a window have a base of their
            own.
    """

    def read(config: ConfigValues) -> Fields:
        config.used.update(keys.names)
        try:
            parameters = keys.parameters(config.values)
        except (TypeError, LookupError) as error:
            value = config.values.get(SCALING) or config.values.get(PARAMETERS)
            raise config.unusable(SCALING, value, "an object") from error
        full = config.inner(parameters[FULL] if types is not None else parameters)
        base = _base(full)
        fields = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": 1.0}
        fields |= _read_scaling(full, config)
        if keys.fraction is not None:
            fields["rotary_percent"] = full.number(FRACTION, float)
        elif full.get(FRACTION, 1.0) != 1 and full.get("rope_type") != "default":
            config.lack("scaling of a part of the head's dimensions", FRACTION, full.get(FRACTION))
        if types is not None:
            _check_type_key(config)
            windowed = config.inner(parameters[WINDOWED])
            if (rope_type := windowed.get("rope_type")) != "default":
                config.lack("scaling of rotary positions with a window", "rope_type", rope_type)
            fields |= _fields_by_type(types(config), base, _base(windowed))
        elif by_type := {
            key: value for key, value in parameters.items() if isinstance(value, dict)
        }:
            config.lack("rotary positions that depend on the type of the layer", "rope", by_type)
        return fields

    def write(model: ModelConfig) -> dict[str, Any]:
        written: dict[str, Any] = {keys.theta_key: model.rotary_base}
        plain = None if keys.scaling is None else {"rope_type": "default"}
        written[SCALING] = write_scaling(model) or plain
        if keys.fraction is not None:
            written[keys.fraction_key] = model.rotary_percent
        if keys.window_theta is not None:
            written |= _write_bases(model, keys)
        return written

    return Row(read, write)


def _check_type_key(config: ConfigValues) -> None:
    """Version 5 of transformers ignores the older `type` of families with a base for each type of
    layers, whose positions are then not scaled; version 4 does not."""
    scaling = config.values.get(SCALING)
    if isinstance(scaling, dict) and "type" in scaling and "rope_type" not in scaling:
        part = "scaling that versions of transformers read differently: write rope_type for type"
        config.lack(part, "type", scaling["type"])


def _base(parameters: ConfigValues) -> float:
    """The base.

    Raises:
        UserError: If it is not a number above 1, with which no rotation is slower than another.
    """
    base = parameters.number("rope_theta", float)
    if base is None or base <= 1:
        raise parameters.unusable("rope_theta", base, "a number above 1")
    return float(base)


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


def _write_bases(model: ModelConfig, keys: RopeKeys) -> dict[str, Any]:
    """The bases of layers with and without a window, and their parameters by type of layer."""
    bases = dict(zip(model.windows, model.rotary_bases, strict=True))
    base = bases.pop(None, model.rotary_base)
    other = next(iter(bases.values()), model.rotary_base)
    scaling = write_scaling(model)
    full = {"rope_type": "default", "rope_theta": base, **(scaling or {})}
    by_type: dict[str, Any] = {FULL: full, WINDOWED: {"rope_type": "default", "rope_theta": other}}
    if scaling is not None and not scaling.get("truncate", True):
        # transformers reads it here, and not from the object of a type. True is the default and is
        # left out: vLLM refuses an object with any other key beside the types of layers.
        by_type["truncate"] = False
    written = {keys.theta_key: base, PARAMETERS: by_type}
    if keys.window_theta is not None and (key := keys.window_theta[0]):
        written[key] = other
    return written


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
    original = scaling.number(ORIGINAL, int, length)
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
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
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
            ORIGINAL: model.yarn_original_max_position_embeddings,
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


def latent_scale(keys: RopeKeys) -> Row:
    """The scale of the scores of multi-latent attention with scaled positions.

    DeepSeek-V3 multiplies it by (0.1 mscale_all_dim ln(factor) + 1)^2 for every type of scaling and
    whatever the factor of queries and keys is. The options of YaRN have both factors only if
    `mscale` is there and `attention_factor` is not.

    Args:
        keys: Where the family has its rotary parameters.
    """

    def read(config: ConfigValues) -> Fields:
        parameters = config.inner(keys.parameters(config.values))
        rope_type = parameters.get("rope_type")
        exponent = parameters.number("mscale_all_dim", float, None)
        if rope_type == "default" or not exponent:
            return {}
        has_options = (
            parameters.get("mscale", None) and parameters.get("attention_factor", None) is None
        )
        if rope_type == "yarn" and has_options:
            return {}
        factor = parameters.number("factor", float)
        if factor is None:
            raise parameters.unusable("factor", factor, "a number")
        scale = (0.1 * exponent * math.log(max(factor, 1.0)) + 1) ** 2
        sizes = (config.number(key, int, default) for key, default in LATENT_SIZES.items())
        # Rounded so that it is the same when read back.
        return {"softmax_scale": float(f"{scale * sum(sizes) ** -0.5:.12g}")}

    def write(model: ModelConfig) -> dict[str, Any]:
        scaling = write_scaling(model)
        if scaling is None:
            return {}
        # Published files have the older spelling alone, which some programs require.
        scaling["type"] = scaling["rope_type"]
        if model.softmax_scale is not None and scaling["factor"] > 1:
            root = math.sqrt(model.softmax_scale * model.head_dim**0.5)
            scaling["mscale_all_dim"] = 10 * (root - 1) / math.log(scaling["factor"])
        return {SCALING: scaling}

    return Row(read, write)


def _read_rope_layers(config: ConfigValues) -> Fields:
    layers = config.get("no_rope_layers", None)
    interval = config.number("no_rope_layer_interval", int, 4)
    if layers is None:
        return {"no_rope_freq": str(interval)}
    present = layers[: config.number("num_hidden_layers", int)]
    return {"no_rope_freq": pattern_of([not has_rope for has_rope in present])}


def _write_rope_layers(model: ModelConfig) -> dict[str, Any]:
    """Both the layers and the interval, which is not read next to them, as in published files."""
    lacking = model.rope_layers.get("no_rope_freq", ())
    interval = [*lacking, True].index(True) + 1
    layers = [int(not lacks_rope) for lacks_rope in lacking]
    return {"no_rope_layers": layers, "no_rope_layer_interval": interval}


ROPE_LAYERS = Row(_read_rope_layers, _write_rope_layers)
"""1 for each layer with rotary positions, 0 otherwise."""
