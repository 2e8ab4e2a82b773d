"""Adam's states in Megatron's files: which state belongs to which weight.

Megatron numbers its parameters by group, those with weight decay first, in the order of the model's
state dict. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_ds.engine.deepspeed.tensor_files import OPTIMIZER_KEYS
from megatron_ds.engine.states.state_reader import MASTER

MOMENTS = ("exp_avg", "exp_avg_sq")

PARTITIONED = "its optimizer states are partitioned by Megatron's distributed optimizer"

Chunks = list[dict[str, Tensor]]
"""Tensors by name, for each chunk of a pipeline stage."""


@dataclass
class OptimizerStates:
    """States of one rank's parameters."""

    steps: int | None = None
    by_kind: dict[str, Chunks] = field(default_factory=dict)
    """Moments and, if the model is in half precision, master weights."""
    unread: str = ""
    """Reason that there are none."""


def assign_states(chunks: Chunks, saved: Any) -> OptimizerStates:
    """The states of a rank by the names of its weights.

    Args:
        chunks: Parameters in the order of the state dict.
        saved: The optimizer's state dict; None if the file has none.
    """
    if not isinstance(saved, Mapping):
        return OptimizerStates(unread="it has no optimizer states")
    inner = saved.get("optimizer", saved)
    groups = inner.get("param_groups")
    states = inner.get("state")
    if not groups or not isinstance(states, Mapping) or not states:
        return OptimizerStates(unread=PARTITIONED)
    masters = saved.get("fp32_from_fp16_params")
    if masters is None and any(
        tensor.dtype.itemsize < 4 for chunk in chunks for tensor in chunk.values()
    ):
        return OptimizerStates(unread="its master weights are not where they are expected")
    kinds = (*MOMENTS, MASTER) if masters is not None else MOMENTS
    assigned = OptimizerStates(by_kind={key: [{} for _ in chunks] for key in kinds})
    left = [
        [
            (chunk, name)
            for chunk, name, value in _parameters(chunks)
            if _is_decayed(name, value) == decayed
        ]
        for decayed in (True, False)
    ]
    for group_index, group in enumerate(groups):
        group_states = [states.get(index, {}) for index in group["params"]]
        if not group_states:
            continue
        names = next((entry for entry in left if _fits(chunks, entry, group_states)), None)
        if names is None:
            return OptimizerStates(
                unread="the shapes of its optimizer states are not those of its weights"
            )
        left.remove(names)
        for position, ((chunk, name), state) in enumerate(zip(names, group_states, strict=True)):
            for key in MOMENTS:
                assigned.by_kind[key][chunk][name] = state[key]
            if masters is not None:
                assigned.by_kind[MASTER][chunk][name] = masters[group_index][position]
            assigned.steps = steps_of(group, state) or assigned.steps
    if any(left) or assigned.steps is None:
        return OptimizerStates(
            unread="the optimizer states of some weights, or the number of steps, are missing"
        )
    return assigned


def steps_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> int | None:
    """Steps of Adam, which are in the group or in the state; None if in neither."""
    for source, key in ((group, "step"), (state, "step"), (state, "common_step")):
        if key in source:
            return int(source[key])
    return None


def has_coupled_decay(saved: Any) -> bool:
    """Whether a state dict has groups of an Adam that adds the weight decay to the gradient."""
    if not isinstance(saved, Mapping):
        return False
    return any(has_coupled_decay(saved.get(key)) for key in OPTIMIZER_KEYS) or any(
        group.get("decoupled_weight_decay") is False and group.get("weight_decay")
        for group in saved.get("param_groups") or ()
    )


def _parameters(chunks: Chunks) -> list[tuple[int, str, Tensor]]:
    return [
        (index, name, value) for index, chunk in enumerate(chunks) for name, value in chunk.items()
    ]


def _is_decayed(name: str, value: Tensor) -> bool:
    return value.dim() > 1 and not name.endswith(".bias")


def _fits(
    chunks: Chunks, names: Sequence[tuple[int, str]], states: Sequence[Mapping[str, Any]]
) -> bool:
    return len(names) == len(states) and all(
        isinstance(state.get(key), Tensor) and state[key].shape == chunks[chunk][name].shape
        for (chunk, name), state in zip(names, states, strict=True)
        for key in MOMENTS
    )
