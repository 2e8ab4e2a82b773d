"""Parameter groups: factors of learning rate and weight decay for each parameter, by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn


class Multipliers(NamedTuple):
    """Factors by which a parameter's learning rate and weight decay differ from the schedule's."""

    lr: float = 1.0
    weight_decay: float = 1.0


MultiplierRule = Callable[[str, tuple[int, ...]], Multipliers]
"""Maps a parameter's canonical name and shape (of this tensor-parallel rank) to its factors."""


def decay_matrices_only(name: str, shape: tuple[int, ...]) -> Multipliers:
    """The default rule, as in Megatron: no weight decay for biases and weights of norms."""
    return Multipliers(weight_decay=1.0 if len(shape) > 1 else 0.0)


def parameter_groups(
    model: nn.Module, weight_decay: float, rule: MultiplierRule = decay_matrices_only
) -> tuple[list[dict[str, Any]], tuple[Multipliers, ...]]:
    """Group the parameters of a model by their factors.

    Returns:
        The groups for the optimizer, in the order in which the model has them, and the factors of
        each group.
    """
    groups: dict[Multipliers, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        # ZeRO-3 leaves an empty tensor in place of a partitioned parameter.
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        groups.setdefault(rule(name, shape), []).append(parameter)
    optimizer_groups = [
        {"params": params, "weight_decay": weight_decay * factors.weight_decay}
        for factors, params in groups.items()
    ]
    return optimizer_groups, tuple(groups)


def set_lr_and_weight_decay(
    groups: list[dict[str, Any]], multipliers: Sequence[Multipliers], lr: float, weight_decay: float
) -> None:
    """Set the learning rate and the weight decay of the next step.

    Args:
        groups: `param_groups` of an optimizer.
        multipliers: Factors of each group. They are not read from the groups, since loading a
            checkpoint replaces these by those of the run that saved it.
        lr: Learning rate of the schedule.
        weight_decay: Weight decay of the schedule.
    """
    for group, factors in zip(groups, multipliers, strict=True):
        group["lr"] = lr * factors.lr
        group["weight_decay"] = weight_decay * factors.weight_decay
