"""The optimizer in a checkpoint of torch.distributed, as torch's state dicts name its entries.

    PREFIX.state.WEIGHT.exp_avg           states, of both forms
    PREFIX.param_groups.WEIGHT.lr         settings of a flattened state dict
    PREFIX.param_groups.0.lr, .params     settings of the other form

Facts: torch 2.13, `distributed/checkpoint/state_dict.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.model_settings import malformed_values
from megatron_ds.conversion.trainers.runs.adam_states import TheirAdam
from megatron_ds.engine.states.state_reader import TensorReader

MEMBERS = "params"
SETTINGS = (
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
)
"""Settings of groups that are read."""


def read_adam(folder: DcpFolder, prefix: str) -> TheirAdam | None:
    """The states and settings of an optimizer; None if the checkpoint has none.

    Args:
        folder: The checkpoint.
        prefix: Start of the names of the optimizer's entries, such as `optimizer`.

    Raises:
        UserError: If entries are damaged.
    """
    states = defaultdict[str, dict[str, TensorReader]](dict)
    groups = defaultdict[str, dict[str, Any]](dict)
    start = f"{prefix}.state."
    for key, tensor in folder.tensors.items():
        if key.startswith(start):
            name, _, state = key.removeprefix(start).rpartition(".")
            states[name][state] = tensor
    start = f"{prefix}.param_groups."
    for key in folder.metadata.state_dict_metadata:
        if not key.startswith(start):
            continue
        name, _, setting = key.removeprefix(start).rpartition(".")
        if setting == MEMBERS or setting in SETTINGS:
            groups[name][setting] = entry_of(folder, key)
    if not states:
        return None
    with malformed_values(folder.path):
        by_weight: dict[str, dict[str, Any]] = {}
        for name, settings in groups.items():
            for member in _members(name, settings.pop(MEMBERS, None)):
                by_weight[member] = settings
        return TheirAdam(states, by_weight)


def entry_of(folder: DcpFolder, key: str) -> Any:
    """A value that is an entry of its own, or a tensor with one element; None if it is missing."""
    if key in folder.tensors:
        return folder.tensors[key].read().item()
    value = folder.read_object(key)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _members(name: str, members: Iterable[str] | None) -> Iterable[str]:
    """The weights of a group, which has their names or is the one of a single weight."""
    return [name] if members is None else members
