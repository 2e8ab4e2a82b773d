"""Keys of DeepSpeed files that have the meaning of a field of the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ds.config import GROUP_OF_FIELD, Config
from megatron_ds.config.problems import default_flag, option
from megatron_ds.engine.ds_config import values as kinds

OFFLOAD, CHECKPOINTING = "zero_optimization.offload_optimizer", "activation_checkpointing"
MAPPINGS: tuple[tuple[str, str, kinds.Kind], ...] = (
    ("train_batch_size", "global_batch_size", kinds.as_int),
    ("train_micro_batch_size_per_gpu", "micro_batch_size", kinds.as_int),
    ("gradient_clipping", "clip_grad", kinds.as_float),
    (f"{OFFLOAD}.device", "cpu_optimizer", lambda device: kinds.as_device(device) != "none"),
    (f"{OFFLOAD}.device", "nvme_optimizer", lambda device: kinds.as_device(device) == "nvme"),
    (f"{OFFLOAD}.ratio", "optimizer_offload_fraction", kinds.as_float),
    (f"{OFFLOAD}.nvme_path", "nvme_path", kinds.as_str),
    ("zero_optimization.offload_param.device", "remote_device", kinds.as_device),
    ("zero_optimization.offload_param.nvme_path", "nvme_path", kinds.as_str),
    ("zero_optimization.zero_hpz_partition_size", "zero_hpz_partition_size", kinds.as_int),
    ("fp16.enabled", "fp16", kinds.as_bool),
    ("fp16.loss_scale", "loss_scale", lambda scale: kinds.as_float(scale) or None),
    ("fp16.initial_scale_power", "initial_loss_scale", lambda n: math.pow(2.0, kinds.as_float(n))),
    ("fp16.min_loss_scale", "min_loss_scale", kinds.as_float),
    ("fp16.loss_scale_window", "loss_scale_window", kinds.as_int),
    ("fp16.hysteresis", "hysteresis", kinds.as_int),
    ("bf16.enabled", "bf16", kinds.as_bool),
    ("bf16.bf16_master_weights_and_grads", "bf16_master_weights", kinds.as_bool),
    ("bf16.bf16_optimizer_states", "bf16_master_weights", kinds.as_bool),
    ("zero_optimization.stage", "zero_stage", kinds.as_int),
    (
        "data_types.grad_accum_dtype",
        "accumulate_allreduce_grads_in_fp32",
        lambda dtype: kinds.as_dtype(dtype) == "fp32",
    ),
    ("optimizer.type", "optimizer", kinds.as_optimizer),
    ("optimizer.params.lr", "lr", kinds.as_float),
    ("optimizer.params.betas", "adam_beta1", lambda betas: kinds.as_betas(betas)[0]),
    ("optimizer.params.betas", "adam_beta2", lambda betas: kinds.as_betas(betas)[1]),
    ("optimizer.params.eps", "adam_eps", kinds.as_float),
    ("optimizer.params.weight_decay", "weight_decay", kinds.as_float),
    ("optimizer.params.momentum", "sgd_momentum", kinds.as_float),
    (f"{CHECKPOINTING}.partition_activations", "partition_activations", kinds.as_bool),
    (f"{CHECKPOINTING}.cpu_checkpointing", "checkpoint_in_cpu", kinds.as_bool),
    (f"{CHECKPOINTING}.contiguous_memory_optimization", "contiguous_checkpointing", kinds.as_bool),
    (f"{CHECKPOINTING}.synchronize_checkpoint_boundary", "synchronize_each_layer", kinds.as_bool),
    (f"{CHECKPOINTING}.profile", "profile_backward", kinds.as_bool),
)
"""Key, field with the same meaning, and the function that converts the key's value. The stage is
behind the precision, which decides what stage 0 is."""

OF_OPTIMIZER = {
    "lion": {"adam_beta1": "lion_beta1", "adam_beta2": "lion_beta2"},
    "muon": {"sgd_momentum": "muon_momentum"},
}
"""Fields that keys of `optimizer.params` set instead, by optimizer."""


def mappings(config: Config) -> Iterator[tuple[str, str, kinds.Kind]]:
    """The MAPPINGS for a configuration's optimizer."""
    instead = OF_OPTIMIZER.get(config.optimizer.optimizer, {})
    for key, name, convert in MAPPINGS:
        yield key, instead.get(name, name), convert


def field_value(config: Config, name: str) -> Any:
    """The value of a field, whatever its group."""
    return getattr(getattr(config, GROUP_OF_FIELD[name]), name)


def as_flag(name: str, value: Any, flag_of: Callable[[str], str] = option) -> str:
    """The flag that gives a field a value: `--clip-grad 0.5`, `--bf16`."""
    if isinstance(value, bool):
        # The flag of a switch that is on by default turns it off.
        return default_flag(name) if value else flag_of(name)
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([flag_of(name), *map(str, values)])
