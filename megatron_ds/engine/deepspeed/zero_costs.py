"""What DeepSpeed's ZeRO optimizers spend on parameters in each step, and need not.

At the end of a step, stages 1 and 2 make each parameter a view of the flat weights, which it is
already. Stage 3 asks for its rank before each of hundreds of messages that it does not print, walks
over the modules to find their parameters, and gathers the small parameters one by one. Nothing here
changes a number. Written for DeepSpeed 0.19.x, as `patches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
)
from torch import nn

GLOO = "gloo"
SMALL = 2**17
"""Elements of a parameter that shares a message with others, which copies it once more."""
PARAMETERS = "ds_all_parameters"
"""Attribute of a module with the parameters of it and of its submodules."""
_gather_one_by_one = partition_parameters.Init._allgather_params_coalesced


def spare_work_on_parameters() -> None:
    """Change the modules of stage 3."""
    readers = parameter_offload, partitioned_param_coordinator
    for module in readers:
        module.iter_params = _parameters
    for module in (*readers, partition_parameters, stage3):
        module.print_rank_0 = _print_forced
    partition_parameters.Init._allgather_params_coalesced = _gather_together


def keep_views(optimizer: Any) -> None:
    """Keep an optimizer of stages 1 and 2 from making views of what are views already.

    Args:
        optimizer: DeepSpeedZeroOptimizer; others are left as they are.
    """
    update = getattr(optimizer, "_update_model_bit16_weights", None)
    if update is not None:
        optimizer._update_model_bit16_weights = partial(_update_views, optimizer, update)


def _update_views(optimizer: Any, update: Callable[[int], None], group: int) -> None:
    """Replaces `_update_model_bit16_weights`."""
    flat = optimizer.bit16_groups_flat[group]
    parameters = optimizer.round_robin_bit16_groups[group]
    offsets = optimizer.round_robin_bit16_offsets[group]
    start = flat.data_ptr()
    size = flat.element_size()
    places = zip(parameters, offsets, strict=True)
    if any(parameter.data_ptr() != start + size * offset for parameter, offset in places):
        update(group)


def _print_forced(message: object, debug: bool = False, force: bool = False) -> None:
    """Replaces `print_rank_0`."""
    if (debug or force) and dist.get_rank() == 0:
        print(message)


def _parameters(module: nn.Module, recurse: bool = False) -> Iterator[nn.Parameter]:
    """Replaces `iter_params`, for a model whose modules keep their parameters."""
    known: tuple[nn.Parameter, ...] | None = vars(module).get(PARAMETERS) if recurse else None
    if known is None:
        known = tuple(module.parameters(recurse))
        if recurse:
            vars(module)[PARAMETERS] = known
    yield from known
    for _, parameter in module.ds_external_parameters():  # type: ignore[operator]
        yield parameter


def _gather_together(
    init: Any, parameters: Sequence[Any], hierarchy: Any = 0, quantize: bool = False
) -> None:
    """Replaces `Init._allgather_params_coalesced`: one message of gloo for all small parameters.

    Args:
        init: What partitions the parameters.
        parameters: Parameters of one group of ranks.
        hierarchy: Passed on.
        quantize: Whether they are sent as integers.
    """
    small = [parameter for parameter in parameters if parameter.ds_numel <= SMALL]
    groups = {init.get_partition_dp_group(parameter) for parameter in small}
    types = {parameter.ds_tensor.dtype for parameter in small}
    is_one_message = len(small) > 1 and len(groups) == len(types) == 1 and not quantize
    if not is_one_message or dist.get_backend(group := groups.pop()) != GLOO:
        _gather_one_by_one(init, parameters, hierarchy, quantize)
        return
    large = [parameter for parameter in parameters if parameter.ds_numel > SMALL]
    _gather_one_by_one(init, large, hierarchy, quantize)
    parts = [parameter.ds_tensor.to(init.local_device).flatten() for parameter in small]
    local = torch.cat(parts)
    gathered = local.new_empty(dist.get_world_size(group) * local.numel())
    dist.all_gather_into_tensor(gathered, local, group=group)
    columns = gathered.view(-1, local.numel()).split([part.numel() for part in parts], dim=1)
    for parameter, slices in zip(small, columns, strict=True):
        full = slices.flatten()[: parameter.ds_numel].view(parameter.ds_shape)
        parameter.data = full.detach()
