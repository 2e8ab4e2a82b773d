"""DeepSpeed's activation checkpointing, with the random stream that DeepSpeed does not know."""

from __future__ import annotations

import deepspeed
from torch import Tensor

from megatron_ds.config import RecomputeConfig
from megatron_ds.config.fields import in_effect
from megatron_ds.parallel.activation_checkpointing import Function
from megatron_ds.parallel.mesh import Mpu
from megatron_ds.parallel.rng import RngStreams


def configure_checkpointing(
    config: RecomputeConfig, layers: int, mpu: Mpu, rng: RngStreams
) -> Function:
    """Configure DeepSpeed's activation checkpointing, whose settings are global to the process.

    Inputs are partitioned, on the host, or in contiguous buffers. Our sharded random stream, which
    DeepSpeed does not know, is restored here.

    Args:
        config: Options of recomputation, and of the storage of inputs.
        layers: Layers of the model.
        mpu: Names the group over which inputs are partitioned.
        rng: Random streams that a recomputation restores.

    Returns:
        The implementation for `ActivationCheckpointing`.
    """
    config = in_effect(config)
    deepspeed.checkpointing.configure(
        mpu,
        partition_activations=config.partition_activations,
        contiguous_checkpointing=config.contiguous_checkpointing,
        num_checkpoints=-(-layers // config.checkpoint_num_layers),
        checkpoint_in_cpu=config.checkpoint_in_cpu,
        synchronize=config.synchronize_each_layer,
        profile=config.profile_backward,
    )

    def checkpoint(function: Function, *inputs: Tensor) -> Tensor:
        before = rng.sharded_state
        recomputing = False

        def run(*values: Tensor) -> Tensor:
            nonlocal recomputing
            if recomputing:
                with rng.restore_tp_rng(before):
                    return function(*values)
            recomputing = True
            return function(*values)

        output: Tensor = deepspeed.checkpointing.checkpoint(run, *inputs)
        return output

    return checkpoint
