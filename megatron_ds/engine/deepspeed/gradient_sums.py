"""How DeepSpeed's ZeRO optimizers sum gradients over the replicas.

Owns that gradients are not copied without need, that a single replica sums nothing, and that gloo
sends each rank its slice of the sums only. Written for DeepSpeed 0.19.x, as `patches.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron_ds.config.devices import is_host

GLOO = "gloo"
_reduce_scatter = coalesced_collectives._torch_reduce_scatter_fn


def leave_gradients_in_place(optimizer: Any, device: torch.device) -> None:
    """Keep a ZeRO optimizer from copying gradients to buckets where that serves nothing.

    At stages 1 and 2 DeepSpeed copies the gradients of a single replica to a bucket, divides them
    by 1, reduces them over one rank, and copies them again. The norm and the step read gradients by
    the parameters that have them, and find the same values there. At stage 3 it copies them to a
    bucket against fragmentation, which host memory does not have, and then to a message.

    Args:
        optimizer: Optimizer of a DeepSpeed engine. Offloaded ones of stages 1 and 2, those that add
            gradients to sums of another type, and others than ZeRO's are left as they are.
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
