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
            "zero0-with-half-precision",
            f"{option('zero_stage')} 0 with {option(precision.name)}: DeepSpeed computes gradient "
            f"norm and clipping wrongly; use {option('zero_stage')} 1, which also runs on one "
            "process",
            "zero_stage",
            precision.name,
        )
    if stage == 0 and deepspeed.cpu_optimizer:
        yield Problem(
            "zero0-with-offload",
            f"{option('zero_stage')} 0 cannot offload the optimizer; use {option('zero_stage')} 1, "
            "2 or 3",
            "zero_stage",
            "cpu_optimizer",
        )
    if stage != 3 and deepspeed.remote_device != "none":
        yield Problem(
            "param-offload-without-zero3",
            f"{option('remote_device')} {deepspeed.remote_device} (offload_param) needs "
            f"{option('zero_stage')} 3, but the stage is {stage}",
            "remote_device",
            "zero_stage",
        )
    if deepspeed.remote_device == "nvme" and config.logging.log_params_norm:
        yield Problem(
            "params-norm-with-nvme",
            f"{option('log_params_norm')} cannot read parameters that are offloaded to nvme",
            "log_params_norm",
            "remote_device",
        )
    if deepspeed.remote_device == "nvme" and deepspeed.deepspeed_config is None:
        yield Problem(
            "remote-device-without-nvme-path",
            f"{option('remote_device')} nvme needs a {option('deepspeed_config')} file whose "
            "zero_optimization.offload_param has an nvme_path",
            "remote_device",
            "deepspeed_config",
        )
    scale = precision.initial_loss_scale
    if precision.fp16 and not (scale > 0 and math.log2(scale).is_integer()):
        yield Problem(
            "initial-loss-scale-not-power-of-two",
            f"{option('initial_loss_scale')} {scale}: must be a power of two",
            "initial_loss_scale",
        )
    if deepspeed.cpu_optimizer and config.optimizer.optimizer == "sgd":
        yield Problem(
            "sgd-with-offload",
            f"{option('optimizer')} sgd cannot be offloaded: DeepSpeed's CPU optimizer is Adam",
            "optimizer",
            "cpu_optimizer",
        )
