"""DeepSpeed's activation checkpointing: partitioned, on the host, or in contiguous buffers.

Owns the configuration of DeepSpeed's checkpointing module, whose settings are global to the
process, and restores our sharded random stream, which DeepSpeed does not know.
"""

from __future__ import annotations

import deepspeed
import torch

from megatron_ds.config import RecomputeConfig
from megatron_ds.parallel.activation_checkpointing import CheckpointFunction, Function
from megatron_ds.parallel.mesh import Mpu
from megatron_ds.parallel.rng import RngStreams


def configure_checkpointing(
    config: RecomputeConfig, layers: int, mpu: Mpu, rng: RngStreams
) -> CheckpointFunction:
    """Configure DeepSpeed's activation checkpointing for this process.

    Args:
        config: What is recomputed, and where inputs are kept.
        layers: Layers of the model.
        mpu: Names the group over which inputs are partitioned.
        rng: Random streams that a recomputation restores.
    """
    deepspeed.checkpointing.configure(
        mpu,
        partition_activations=config.partition_activations,
        contiguous_checkpointing=config.contiguous_checkpointing,
        num_checkpoints=-(-layers // config.checkpoint_num_layers),
        checkpoint_in_cpu=config.checkpoint_in_cpu,
        synchronize=config.synchronize_each_layer,
        profile=config.profile_backward,
    )

    def checkpoint(function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        before = rng.sharded_state()
        recomputing = False

        def run(*values: torch.Tensor) -> torch.Tensor:
            nonlocal recomputing
            if recomputing:
                with rng.restore_tp_rng(before):
                    return function(*values)
            recomputing = True
            return function(*values)

        output: torch.Tensor = deepspeed.checkpointing.checkpoint(run, *inputs)
        return output

    return checkpoint
