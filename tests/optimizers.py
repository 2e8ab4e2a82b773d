"""Options with which the tests select and train each declared optimizer. Has no tests."""

from __future__ import annotations

from typing import Any

from megatron_ds.config import OptimizerConfig
from megatron_ds.config.options.optimizer_specs import OptimizerSpec

TRAINED: dict[str, dict[str, Any]] = {
    "adam": {
        "lr": 0.01,
        "adam_beta2": 0.95,
        "adam_eps": 1e-3,
        "weight_decay": 0.1,
        "clip_grad": 0.1,
    },
    "sgd": {"lr": 0.5, "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0},
    "lion": {"lr": 0.001, "lion_beta2": 0.95, "weight_decay": 0.1, "clip_grad": 0.1},
    "muon": {"lr": 0.01, "adam_eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.1},
    "soap": {
        "lr": 0.02,
        "adam_beta2": 0.95,
        "adam_eps": 1e-2,
        "soap_precondition_frequency": 1,
        "weight_decay": 0.1,
        "clip_grad": 0.1,
    },
}
"""By value of --optimizer, options of a few steps that layouts can be compared by.

Adam has no elements whose update is the sign of rounding: the slope of its update is at most
lr / eps. A learning rate of 0.01, an epsilon of 1e-3 and gradients that are right to 1e-8 after
clipping keep the error below 1e-7 of a weight, and the elements on both sides of the epsilon, 0.001
against clipped gradients of up to 0.01, still take Adam's nonlinear path.
"""


def flags_of(name: str) -> str:
    """The options of `TRAINED` as flags."""
    options = TRAINED[name].items()
    return " ".join(f"--{option.replace('_', '-')} {value}" for option, value in options)


def options_of(spec: OptimizerSpec, **options: Any) -> OptimizerConfig:
    """Options that select an optimizer, or a variant of one.

    Args:
        spec: The optimizer.
        options: Further options.
    """
    switch = {spec.switch: True} if spec.switch else {}
    return OptimizerConfig(**{"lr": 0.02, "optimizer": spec.name, **switch, **options})
