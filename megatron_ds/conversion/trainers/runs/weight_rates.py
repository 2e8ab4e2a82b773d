"""Learning rates and weight decays of single weights, as another trainer's run has them.

Owns how they are compared with the options of a run, and become values of --param-group.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_ds.config import ModelConfig, MoEConfig, OptimizerConfig
from megatron_ds.conversion.source import declared_weights
from megatron_ds.conversion.step_settings import StepSettings
from megatron_ds.model.declaration.architecture import is_state
from megatron_ds.model.declaration.rates import multiplier_rule

TOLERANCE = 1e-6
"""Relative difference of settings that are equal: some files have them in fp32."""
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class WeightRates(NamedTuple):
    """Maximum learning rate and weight decay of a weight."""

    lr: float
    weight_decay: float

    def is_close(self, other: WeightRates) -> bool:
        """Whether both are equal up to the rounding of files."""
        pairs = zip(self, other, strict=True)
        return all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs)


def options_differ(saved: Any, now: Any) -> bool:
    """Whether two values of an option are different."""
    if isinstance(saved, float) and isinstance(now, int | float):
        return not math.isclose(saved, now, rel_tol=TOLERANCE)
    return bool(saved != now)


def differing_weights(
    saved: StepSettings, model: ModelConfig, moe: MoEConfig, options: OptimizerConfig
) -> Iterator[tuple[str, WeightRates, WeightRates]]:
    """The weights that a run with these options would step otherwise: name, saved and new rates.

    The saved ones are in proportion to `options.lr` and `options.weight_decay`, so that only the
    differences between weights count.
    """
    rule = multiplier_rule(options, model)
    for name, weight in declared_weights(model, moe).items():
        if is_state(weight):
            continue
        factors = rule(weight)
        now = WeightRates(options.lr * factors.lr, options.weight_decay * factors.weight_decay)
        if factors.is_decoupled and options.decoupled_lr is not None:
            now = now._replace(lr=options.decoupled_lr)
        wanted = WeightRates(
            _scaled(saved.lr, name, options.lr, now.lr),
            _scaled(saved.weight_decay, name, options.weight_decay, now.weight_decay),
        )
        if not wanted.is_close(now):
            yield name, wanted, now


def _scaled(values: Mapping[str, float], name: str, base: float, unknown: float) -> float:
    """The value of a weight if the largest one is `base`."""
    if not values:
        return unknown
    largest = max(values.values())
    return values[name] / largest * base if largest else 0.0


def param_groups(
    saved: StepSettings, model: ModelConfig, moe: MoEConfig, options: OptimizerConfig
) -> tuple[str, ...]:
    """Values of --param-group with which the weights have the saved rates; empty if they do."""
    differing = {name: rates for name, rates, _ in differing_weights(saved, model, moe, options)}
    if not differing:
        return ()
    every = {
        name: WeightRates(
            _scaled(saved.lr, name, options.lr, options.lr),
            _scaled(saved.weight_decay, name, options.weight_decay, options.weight_decay),
        )
        for name, weight in declared_weights(model, moe).items()
        if not is_state(weight)
    }
    if saved.weight_decay and len({*every.values()}) == 1:
        return (_group("*", next(iter(every.values())), saved),)
    patterns = defaultdict[str, dict[str, WeightRates]](dict)
    for name, rates in every.items():
        patterns[LAYER.sub("*", name)][name] = rates
    groups = []
    for pattern, weights in patterns.items():
        if differing.keys().isdisjoint(weights):
            continue
        if len({*weights.values()}) == 1:
            groups.append(_group(pattern, next(iter(weights.values())), saved))
        else:
            groups += [_group(name, rates, saved) for name, rates in weights.items()]
    return tuple(groups)


def _group(pattern: str, rates: WeightRates, saved: StepSettings) -> str:
    texts = [f"pattern={pattern}"]
    if len({*saved.lr.values()}) > 1:
        texts.append(f"lr={rates.lr:.9g}")
    if saved.weight_decay:
        texts.append(f"wd={rates.weight_decay:.9g}")
    return ",".join(texts)
