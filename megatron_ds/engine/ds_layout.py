"""Combinations of options that the pinned DeepSpeed computes wrongly or does not support."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, option
from megatron_ds.engine.ds_config import zero_stage


def layout_problems(config: Config) -> Iterator[Problem]:
    """Find unsupported combinations of ZeRO stage, precision, offloading and optimizer."""
    stage, precision, deepspeed = zero_stage(config), config.precision, config.deepspeed
    if stage == 0 and precision.name != "fp32":
        yield Problem(
            "zero0-with-half-precision", "zero_stage", precision.name, flag=option(precision.name)
        )
    if stage == 0 and deepspeed.cpu_optimizer:
        yield Problem("zero0-with-offload")
    if stage != 3 and deepspeed.remote_device != "none":
        yield Problem(
            "param-offload-without-zero3", remote_device=deepspeed.remote_device, stage=stage
        )
    if deepspeed.remote_device == "nvme" and config.logging.log_params_norm:
        yield Problem("params-norm-with-nvme")
    if deepspeed.remote_device == "nvme" and deepspeed.deepspeed_config is None:
        yield Problem("remote-device-without-nvme-path")
    scale = precision.initial_loss_scale
    if precision.fp16 and not (scale > 0 and math.log2(scale).is_integer()):
        yield Problem("initial-loss-scale-not-power-of-two", scale=scale)
    if deepspeed.cpu_optimizer and config.optimizer.optimizer == "sgd":
        yield Problem("sgd-with-offload")
