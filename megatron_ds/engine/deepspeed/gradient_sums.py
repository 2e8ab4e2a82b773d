"""How DeepSpeed's ZeRO optimizers sum gradients over the replicas.

Owns that gradients are not copied without need, that a single replica sums nothing, that experts
write their gradients where the optimizer reads them, and that gloo sends each rank its slice of the
sums only. Written for DeepSpeed 0.19.x, as `patches.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron_ds.config.devices import is_host
from megatron_ds.model.experts.grouped import StackedLinear
from megatron_ds.parallel.mesh import GLOO

_reduce_scatter = coalesced_collectives._torch_reduce_scatter_fn


def leave_gradients_in_place(optimizer: Any, module: nn.Module, device: torch.device) -> None:
    """Keep a ZeRO optimizer from copying gradients where that serves nothing.

    At stages 1 and 2 DeepSpeed copies the gradients of a single replica to a bucket, divides them
    by 1, reduces them over one rank, and copies them again. The norm and the step read gradients by
    the parameters that have them, and find the same values there. At stage 3 it copies them to a
    bucket against fragmentation, which host memory does not have, and then to a message. Before the
    step of stages 1 and 2 it copies all gradients into a flat tensor. On a host those of experts,
    most of them, are computed there.

    Args:
        optimizer: Optimizer of a DeepSpeed engine. Offloaded ones of stages 1 and 2, those that add
            gradients to sums of another type, and others than ZeRO's are left as they are.
        module: The engine's model.
        device: Device of the gradients.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if is_host(device.type) and optimizer.reduce_scatter:
            optimizer.contiguous_gradients = False
        return
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    groups = optimizer.real_dp_process_group
    if any(dist.get_world_size(group) > 1 for group in groups):
        return
    if any(map(optimizer._use_compact_grad_partition_buffer, range(len(groups)))):
        return
    optimizer.reduce_independent_p_g_buckets_and_remove_grads = _leave
    masters = optimizer.single_partition_of_fp32_groups
    is_of_type = all(master.dtype == optimizer.dtype for master in masters)
    is_padded = any(any(padding) for padding in optimizer.round_robin_bit16_padding)
    # Memory of a host is taken when it is written: a flat tensor grows with the gradients in it.
    if is_host(device.type) and is_of_type and not is_padded:
        _compute_in_flats(optimizer, module)


def _compute_in_flats(optimizer: Any, module: nn.Module) -> None:
    """Let experts compute gradients in flat tensors, which the optimizer then steps with."""
    experts = {
        layer.weight: layer for layer in module.modules() if isinstance(layer, StackedLinear)
    }
    flats: dict[int, _FlatGradient] = {}
    for group, parameters in enumerate(optimizer.params_in_partition):
        if any(parameter in experts for parameter in parameters):
            flats[group] = _FlatGradient(parameters, optimizer.partition_size[group])
        for parameter in parameters:
            if parameter in experts:
                experts[parameter].gradient_memory = partial(flats[group].take, parameter)
    by_deepspeed = optimizer.get_flat_partition

    def get_flat_partition(*arguments: Any, param_group_idx: int, **options: Any) -> Any:
        gradients = by_deepspeed(*arguments, param_group_idx=param_group_idx, **options)
        flat = flats.get(param_group_idx)
        return gradients if flat is None else flat.complete(gradients)

    optimizer.get_flat_partition = get_flat_partition


class _FlatGradient:
    """The gradient of a parameter group of a single replica, one tensor from a step's first
    gradient of experts to its end.

    Args:
        parameters: The group.
        size: Elements of the group with padding.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], size: int) -> None:
        self._size = int(size)
        self._like = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self._starts = {parameter: sum(sizes[:index]) for index, parameter in enumerate(parameters)}
        self._flat: Tensor | None = None
        self._taken: set[nn.Parameter] = set()

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Memory for a step's first gradient of a parameter; None for further ones, which are
        added to it."""
        if parameter in self._taken:
            return None
        self._taken.add(parameter)
        start = self._starts[parameter]
        return self._tensor()[start : start + parameter.numel()].view(parameter.shape)

    def complete(self, gradients: Sequence[Tensor]) -> _Flattened:
        """The gradients of a step in the flat tensor, which begins again afterwards.

        Args:
            gradients: In the order of the group, and zeros for the padding. Those that are not in
                the flat tensor are copied.
        """
        flat = self._tensor()
        views = flat.split([gradient.numel() for gradient in gradients])
        for view, gradient in zip(views, gradients, strict=True):
            if view.data_ptr() != gradient.data_ptr():
                view.copy_(gradient.view(-1))
        self._flat = None
        self._taken.clear()
        pairs = zip(views, gradients, strict=True)
        return _Flattened(flat, [view.view(gradient.shape) for view, gradient in pairs])

    def _tensor(self) -> Tensor:
        if self._flat is None:
            self._flat = torch.empty(self._size, dtype=self._like.dtype, device=self._like.device)
        return self._flat


class _Flattened(list[Tensor]):
    """Gradients of a group, which DeepSpeed does not flatten since they already are."""

    def __init__(self, flat: Tensor, gradients: list[Tensor]) -> None:
        super().__init__(gradients)
        self.flat_partition = flat


def _leave(parameter: nn.Parameter, group: int) -> None:
    """Replaces `reduce_independent_p_g_buckets_and_remove_grads`."""


def exchange_slices_by_gloo() -> None:
    """Make stage 3 send each rank its slice of the gradients, where gloo communicates.

    gloo has no reduce-scatter: torch all-reduces a copy of everything with it, twice as many bytes.
    """
    coalesced_collectives._torch_reduce_scatter_fn = _sum_slices


def _sum_slices(
    gradients: Tensor, output: Tensor, group: dist.ProcessGroup | None = None, **options: Any
) -> Any:
    """Replaces the reduce-scatter of `reduce_scatter_coalesced`.

    Args:
        gradients: The slices of all ranks, one after the other.
        output: This rank's slice of the sums; it may be a part of `gradients`.
        group: The group; None for all ranks.
        **options: Passed on with other backends.
    """
    if dist.get_backend(group) != GLOO:
        return _reduce_scatter(gradients, output, group=group, **options)
    slices = torch.empty_like(gradients)
    dist.all_to_all_single(slices, gradients, group=group)
    first, *others = slices.chunk(dist.get_world_size(group))
    output.copy_(first)
    for other in others:  # in the order of the ranks
        output.add_(other)
    return None
