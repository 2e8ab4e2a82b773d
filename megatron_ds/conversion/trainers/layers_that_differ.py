"""Options of layers that a trainer sets one by one, as options of our model.

Owns what may differ from layer to layer: windows, rotary positions and experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields


def merged_layers(config: ConfigValues, layers: Sequence[Fields]) -> Fields:
    """The options of a model, of those of its layers.

    Args:
        config: The settings; `config.lacking` receives other differences.
        layers: Fields of `ModelConfig` and, besides, `window`, its tokens or 0; `rope`, None or the
            fields of rotary positions with `has_neighbors`, whether neighboring dimensions are
            rotated together; `experts`, None or fields of `MoEConfig`.
    """
    special = ("window", "rope", "experts")
    fields = _merged_windows(config, [layer.get("window", 0) for layer in layers])
    fields |= _merged_ropes(config, [layer.get("rope") for layer in layers])
    fields |= _merged_experts(config, [layer.get("experts") for layer in layers])
    for layer in layers:
        for name, value in layer.items():
            if name not in special and fields.setdefault(name, value) != value:
                config.lack("layers that differ", name, [fields[name], value])
    return fields


def _merged_windows(config: ConfigValues, windows: Sequence[int]) -> Fields:
    """The tokens of each layer's window, 0 without one."""
    if not any(windows):
        return {}
    sizes = {*filter(None, windows)}
    if len(sizes) > 1:
        config.lack("windows of several sizes", "sequence_mixer.sliding_window", sorted(sizes))
    fields: Fields = {"window_size": f"{max(sizes) - 1},0"}
    if not all(windows):
        fields["window_attn_skip_freq"] = str([int(bool(size)) for size in windows])
    return fields


def _merged_ropes(config: ConfigValues, ropes: Sequence[Fields | None]) -> Fields:
    """The rotary positions of each layer: none, or with a base and a scaling of their own."""
    rotary = [rope for rope in ropes if rope is not None]
    if not rotary:
        return {"position_embedding_type": "none"}
    for key in ("rotary_percent", "has_neighbors"):
        if len(values := {rope[key] for rope in rotary}) > 1:
            config.lack("layers that differ", key, sorted(values))
    common = ("rotary_base", "rotary_percent", "has_neighbors")
    scalings = [
        None if rope is None else {key: rope[key] for key in rope if key not in common}
        for rope in ropes
    ]
    plain: Fields = {"position_embedding_type": "rope"}
    scaled = [scaling for scaling in scalings if scaling not in (None, plain)]
    if any(scaling != scaled[0] for scaling in scaled):
        config.lack("several scalings of rotary positions", "rope.scaling", scaled)
    bases = [rotary[0]["rotary_base"] if rope is None else rope["rotary_base"] for rope in ropes]
    fields: Fields = {
        **((scaled[0] if scaled else None) or plain),
        "rotary_percent": rotary[0]["rotary_percent"],
        "rotary_base": bases[0],
    }
    if len({*bases}) > 1:
        fields["rotary_base_per_layer"] = tuple(bases)
    if scaled and len(scaled) < len(rotary):
        fields["rope_scaling_layers"] = pattern_of([scaling in scaled for scaling in scalings])
    if len(rotary) < len(ropes):
        fields["no_rope_freq"] = pattern_of([rope is None for rope in ropes])
    return fields


def _merged_experts(config: ConfigValues, experts: Sequence[Fields | None]) -> Fields:
    """The experts of the layers that have some."""
    used = [fields for fields in experts if fields is not None]
    if not used:
        return {}
    if any(fields != used[0] for fields in used):
        config.lack("layers that differ", "experts", used)
    layers = [int(fields is not None) for fields in experts]
    return {**used[0], "moe_layer_freq": None if all(layers) else str(layers)}
