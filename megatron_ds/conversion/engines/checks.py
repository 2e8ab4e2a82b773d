"""What inference engines make of an exported model, before it is written."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem, UserError, raise_if_any
from megatron_ds.conversion.engines.facts import (
    CLOSE,
    DIFFERS,
    ENGINES,
    REFUSES,
    Fact,
    facts_of,
)
from megatron_ds.conversion.gguf.read_write import architecture_of
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.huggingface.families import TYPES
from megatron_ds.conversion.huggingface.rope_parameters import ORIGINAL, SCALING
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.weights_locations import HF_CONFIG

ACTIVATIONS = ("hidden_activation", "activation_function", "activation", "hidden_act")
"""Keys of the activation function, the first of which decides."""
LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True)
class Export:
    """A model as it is about to be written in the format of Hugging Face."""

    family: str
    config: Mapping[str, Any]
    """Values of its config.json."""
    settings: ModelSettings
    has_prefix: bool
    """Whether names of tensors start with the family's prefix."""
    has_special_tokens: bool
    """Whether tokenizer_config.json names a begin and an unknown token."""

    @functools.cached_property
    def properties(self) -> dict[str, Any]:
        """Values of config.json, and what follows from several of them, by key of the facts."""
        model = self.settings.model
        config = self.config
        scaling = config.get(SCALING) or {}
        return {
            **config,
            "model_type": self.family,
            "activation": next((config[key] for key in ACTIVATIONS if config.get(key)), None),
            "windows": _windows(model),
            "window_rhythm": "own" if self._has_own_rhythm else "other",
            "rope_type": scaling.get("rope_type", "default"),
            "yarn_factor": "other" if self._has_own_factor(scaling) else "usual",
            "yarn_range": "rounded" if scaling.get("truncate", True) else "exact",
            "yarn_start": "below 0" if _starts_below(scaling) else "usual",
            "head_dim": model.head_dim,
            "head_sizes": _usual(model.head_dim * model.num_attention_heads, model.hidden_size),
            "ffn_size": _usual(model.mlp_hidden_size, 4 * model.hidden_size),
            "key_value_heads": _usual(model.kv_heads, model.num_attention_heads),
            "query_scale": _usual(config.get("query_pre_attn_scalar"), model.head_dim),
            "latent_sizes": f"{model.kv_lora_rank}+{model.qk_pos_emb_head_dim}",
            "names": "prefixed" if self.has_prefix else "plain",
            "special_tokens": "present" if self.has_special_tokens else "missing",
        }

    @property
    def _has_own_rhythm(self) -> bool:
        """Whether the layers with a window are the ones of the family's published models."""
        types = TYPES.get(self.family)
        if types is None:
            return True
        layers = {"num_hidden_layers": self.settings.model.num_layers}
        return types(ConfigValues(Path(HF_CONFIG), layers)) == self.config.get("layer_types")

    def _has_own_factor(self, scaling: Mapping[str, Any]) -> bool:
        keys = (
            {"attention_factor"} if self.family == "deepseek_v3" else {"attention_factor", "mscale"}
        )
        return scaling.get("rope_type") == "yarn" and bool(keys & scaling.keys())


def _starts_below(scaling: Mapping[str, Any]) -> bool:
    """Whether YaRN's range begins before the first dimension: with the original length that the
    fastest rotation of the range has."""
    if scaling.get("rope_type") != "yarn":
        return False
    turns = float(scaling.get("beta_fast") or 32)
    return float(scaling[ORIGINAL]) < 2 * math.pi * turns


def _windows(model: ModelConfig) -> str:
    has_window = {window is not None for window in model.windows}
    return "some" if len(has_window) > 1 else "all" if True in has_window else "none"


def _usual(value: Any, expected: Any) -> str:
    return "usual" if value in (None, expected) else "other"


def check_engines(
    export: Export, engines: Sequence[str], warn: Callable[[Problem], None]
) -> set[str]:
    """Checks an export for the engines that a user named, or reports what all of them make of it.

    Args:
        export: The export.
        engines: Names of engines; empty: none was named.
        warn: Called once, if none was named and any would compute another model or refuse it.

    Returns:
        The changes with which the named engines load it.

    Raises:
        UserError: If a named engine would compute another model or refuse it nevertheless.
    """
    if not engines:
        if (problem := _report(export)) is not None:
            warn(problem)
        return set()
    facts = [fact for name in engines for fact in _faults(name, export)]
    raise_if_any(_refusal(fact, export) for fact in facts if not fact.adapt)
    return {fact.adapt for fact in facts}


def _faults(name: str, export: Export) -> list[Fact]:
    facts = facts_of(name, export.family, export.properties)
    return [fact for fact in facts if fact.effect != CLOSE and not fact.only_on]


def _refusal(fact: Fact, export: Export) -> Problem:
    engine = ENGINES[fact.engine]
    values = {
        "engine": f"{engine.title} {engine.version}",
        "family": export.family,
        "key": fact.key,
        "value": export.properties.get(fact.key),
        "why": fact.why,
    }
    if fact.effect == REFUSES:
        return Problem("engine-refuses", **values)
    return Problem("engine-differs", **values)


def _report(export: Export) -> Problem | None:
    """One line on all engines; None if all compute the model."""
    reasons: dict[str, list[str]] = {DIFFERS: [], REFUSES: []}
    for name, engine in ENGINES.items():
        if name == LLAMA_CPP:
            continue
        if faults := _faults(name, export):
            # Another model is worse than an error.
            worst = min(faults, key=lambda fact: (fact.effect != DIFFERS, bool(fact.adapt)))
            hint = "; --for adapts the output" if worst.adapt else ""
            reasons[worst.effect].append(f"{engine.title} ({worst.why}{hint})")
    try:
        architecture_of(export.settings)
    except UserError:
        reasons[REFUSES].append(f"{ENGINES[LLAMA_CPP].title} (--to gguf names the reasons)")
    shown = {effect: ", ".join(entries) or "none" for effect, entries in reasons.items()}
    return Problem("engines-differ", **shown) if any(reasons.values()) else None
