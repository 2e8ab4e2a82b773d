"""Makes master weights in bf16 the weights themselves.

DeepSpeed's optimizers of ZeRO step a copy of their partition and copy the result back, which does
nothing in the same memory. Written for DeepSpeed 0.19.x, as `deepspeed/patches.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


def share_masters(optimizer: Any) -> None:
    """Let the flat tensors that an optimizer steps have the memory of the parameters.

    Args:
        optimizer: Optimizer of a DeepSpeed engine. Others than those of ZeRO, offloaded ones, and
            masters of other types are left as they are.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if not optimizer.offload_optimizer:
            _share(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat)
        return
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    partitions = optimizer.parallel_partitioned_bit16_groups
    ranks = [dist.get_rank(group) for group in optimizer.real_dp_process_group]
    of_rank = [parts[rank] for parts, rank in zip(partitions, ranks, strict=True)]
    if not _share(optimizer.single_partition_of_fp32_groups, of_rank):
        return
    optimizer._link_all_hp_params()  # its views of the copies would keep them
    without_padding = optimizer._get_groups_without_padding

    def copies_without_padding(tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a checkpoint has: a file of a view would have the weights of all ranks."""
        return [tensor.detach().clone() for tensor in without_padding(tensors)]

    optimizer._get_groups_without_padding = copies_without_padding


def _share(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Let masters in bf16 have the memory of the parameters; whether they are in bf16."""
    if any(master.dtype != torch.bfloat16 for master in masters):
        return False
    for master, values in zip(masters, parameters, strict=True):
        master.data = values.data
    return True
