"""Flags of other programs whose counterpart here has another form, which other flags decide.

pretrain_gpt.py refuses these flags and names the counterpart; here it is computed. Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ds.cli.doctor.trainers.settings import text_of
from megatron_ds.cli.flags import dashed, training_flags
from megatron_ds.cli.scan import scan

Values = Mapping[str, Any]
"""Values by field of the flags that this program has."""
SWITCHES = {
    "fix-router": ["--moe-router-force-load-balancing"],
    "gelu-tanh": ["--activation", "geglu", "--gelu-approximation", "tanh"],
    "o2-gradient": ["--no-accumulate-allreduce-grads-in-fp32"],
    "use-glm-rope": ["--rotary-percent", "0.5", "--rotary-interleaved"],
}
"""Switches of MindSpeed-LLM, with flags of the same meaning."""
FOLDER_TOKENIZERS = (
    "DeepSeekV2Tokenizer",
    "DeepSeekV3Tokenizer",
    "DeepSeekV4Tokenizer",
    "KimiK2Tokenizer",
    "Lfm2Tokenizer",
    "Llama3Tokenizer",
    "Llama4Tokenizer",
    "MistralTokenizer",
    "MixtralTokenizer",
)
"""Values of --tokenizer-type that read the folder in --tokenizer-model, as HFTokenizer does."""


def with_counterparts(flags: Sequence[str]) -> list[str]:
    """The flags of a command, with counterparts in the place of flags that this program refuses.

    A flag whose counterpart cannot be computed stays as it is.
    """
    values: Values = scan(list(flags), training_flags()).values
    kept: list[str] = []
    added: list[str] = []
    position = 0
    while position < len(flags):
        name, equals, value = flags[position].partition("=")
        key = dashed(name)
        length = 1
        counterpart: list[str] | None = None
        if name.startswith("--") and key in SWITCHES:
            counterpart = SWITCHES[key]
        elif name == "--input-embeds-norm" and "hidden_size" in values:
            counterpart = ["--embedding-multiplier", text_of(math.sqrt(values["hidden_size"]))]
        elif name.startswith("--") and key in (*VALUED, "tokenizer-type"):
            length = 1 if equals else 2
            argument = value if equals else "".join(flags[position + 1 : position + 2])
            if key in VALUED:
                counterpart = _computed(VALUED[key], argument, values)
            elif argument in FOLDER_TOKENIZERS and "tokenizer_model" in values:
                counterpart = ["--tokenizer-type", "HFTokenizer"]
        if counterpart is None:
            kept += flags[position : position + length]
        else:
            added += counterpart
        position += length
    return _without(kept, [word for word in added if word.startswith("--")]) + added


def _computed(
    rule: Callable[[float, Values], list[str] | None], argument: str, values: Values
) -> list[str] | None:
    """The flags for a number; None if it is not a number, or a value that the rule needs is
    absent."""
    try:
        return rule(float(argument), values)
    except (ValueError, KeyError):
        return None


def _without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Flags without the ones of some names, which have at most one value."""
    kept: list[str] = []
    is_removed = False
    for word in flags:
        if word.startswith("--"):
            is_removed = f"--{dashed(word.partition('=')[0])}" in names
        if not is_removed:
            kept.append(word)
    return kept


def _dense_layers(count: float, values: Values) -> list[str] | None:
    """The first layers have no experts; of the rest, every N-th if --moe-layer-freq is N."""
    layers = values["num_layers"]
    frequency = str(values.get("moe_layer_freq", "1"))
    step = int(frequency)
    if step == 1:
        return ["--moe-layer-freq", f"[0]*{count:g}+[1]*{layers - int(count)}"]
    pattern = [int(layer >= count and layer % step == 0) for layer in range(layers)]
    return ["--moe-layer-freq", str(pattern).replace(" ", "")]


def _shared_experts(count: float, values: Values) -> list[str] | None:
    width = values.get("moe_ffn_hidden_size") or values["ffn_hidden_size"]
    return ["--moe-shared-expert-intermediate-size", text_of(count * width)]


def _window(tokens: float, _: Values) -> list[str]:
    return ["--window-size", f"{tokens - 1:g},0"]


def _window_in_half(tokens: float, values: Values) -> list[str]:
    return [*_window(tokens, values), "--window-attn-skip-freq", "2"]


def _logits_multiplier(size: float, values: Values) -> list[str]:
    return ["--logits-multiplier", text_of(size / values["hidden_size"])]


def _softmax_scale(size: float, _: Values) -> list[str]:
    return ["--softmax-scale", text_of(1 / math.sqrt(size))]


def _residual_multiplier(depth: float, values: Values) -> list[str]:
    return ["--residual-multiplier", text_of(depth / math.sqrt(values["num_layers"]))]


VALUED: Mapping[str, Callable[[float, Values], list[str] | None]] = {
    "dim-model-base": _logits_multiplier,
    "first-k-dense-replace": _dense_layers,
    "interleave-sliding-window": _window_in_half,
    "n-shared-experts": _shared_experts,
    "query-pre-attn-scalar": _softmax_scale,
    "scale-depth": _residual_multiplier,
    "sliding-window": _window,
}
"""Flags of MindSpeed-LLM with a number, and the flags that have the same meaning."""
