"""Generates the complete DeepSpeed configuration of a run.

Writes every key that matters, even at its default, so that nothing depends on DeepSpeed's defaults,
and passes the remaining keys of the user's file on. Pure functions; does not import deepspeed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ds.config import Config, PrecisionConfig, flag_of
from megatron_ds.config.deepspeed_file import Json, leaves
from megatron_ds.config.devices import HOST, is_host
from megatron_ds.config.fields import in_effect
from megatron_ds.config.options.optimizer_specs import ADAM, MOMENT_TYPES, Computed
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.fields import MAPPINGS, as_flag, field_value, mappings
from megatron_ds.engine.ds_config.keys import PASSED_KEYS, TABLES
from megatron_ds.engine.ds_config.values import as_dtype
from megatron_ds.engine.optimizers.adam_kernels import (
    AdamKernel,
    IsAvailable,
    only_torch,
    select_adam_kernel,
)
from megatron_ds.model.declaration.architecture import run_spec

if TYPE_CHECKING:
    from megatron_ds.launch.cpp_ops import CppOp

TOP_DEFAULTS: Json = TABLES["generated"]["top"]
"""Top-level keys of every run, unless the file has them."""
HALF_PRECISION_DEFAULTS: dict[str, Json] = TABLES["generated"]["half_precision"]
"""Keys that no field of the configuration has. With immediate_grad_update, a bf16 gradient is added
to its fp32 accumulator and freed as soon as it is computed."""

BUCKET_BYTES = 10**9
"""Largest message of a gradient reduction: DeepSpeed's 5e8 elements in bf16."""
OVERLAPPED_BUCKET = 40_000_000
"""Elements of a message that is sent during the backward pass, as in Megatron-Core: a bucket as
large as the model would be sent at its end."""
OVERLAPPED_BUCKET_PER_RANK = 1_000_000
"""Elements for each data-parallel rank, so that its share of the message stays large."""

SWAPPED_SUB_GROUP = 100_000_000
"""Elements of a flat tensor of optimizer states on a disk. DeepSpeed keeps buffers for the states
of one in pinned memory."""

ZERO_DEFAULTS: Json = TABLES["generated"]["zero"]
ZERO12_DEFAULTS: Json = TABLES["generated"]["zero12"]
"""Keys that only stages 1 and 2 read."""
ZERO3_DEFAULTS: Json = TABLES["generated"]["zero3"]
"""Keys that only stage 3 reads."""


PIPELINE_BLOCK: Json = TABLES["generated"]["pipeline"]
"""The stages recompute their activations themselves, and send full hidden states."""

PARTITION_KEYS = ("round_robin_gradients", "parameter_alignment", "sub_group_size")
"""Keys of `zero_optimization` that decide where in the optimizer's flat tensors a parameter is."""


def build_ds_config(
    config: Config, dp_size: int, device: str = HOST, is_available: IsAvailable = only_torch
) -> Json:
    """Generate the DeepSpeed configuration.

    Args:
        config: Configuration that `merge_file` has filled.
        dp_size: Data-parallel size.
        device: Kind of device, such as "cpu".
        is_available: Whether a kernel of AdamW can be used on it.
    """
    file = config.deepspeed_file
    assert file is not None or config.deepspeed.deepspeed_config is None, "merge_file comes first"
    user: Json = {} if file is None else file.values
    micro = config.schedule.micro_batch_size
    total = config.final_global_batch_size(dp_size)
    slices = config.parallel.sequence_ranks
    ranks = dp_size * slices
    precision = config.precision
    fp32_accumulation = precision.name == "fp32" or precision.accumulate_allreduce_grads_in_fp32
    accumulation = "fp32" if fp32_accumulation else precision.name
    largest = _largest_parameter(config)
    result: Json = {
        # DeepSpeed counts a slice of a sequence as a sample: see `Mpu`.
        "train_batch_size": total * slices,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": total // (micro * dp_size),
        "gradient_clipping": config.optimizer.clip_grad,
        **copy.deepcopy(TOP_DEFAULTS),
        "zero_force_ds_cpu_optimizer": config.optimizer.spec.name == ADAM.name
        and not config.optimizer.moment_dtypes,
        "communication_data_type": accumulation,
        "data_types": {"grad_accum_dtype": accumulation},
        **_precision_blocks(precision, user),
        "zero_optimization": _zero_block(config, user, ranks, largest, is_cpu=is_host(device)),
        "optimizer": _optimizer_block(config, user, is_available),
        "activation_checkpointing": {
            **_mapped("activation_checkpointing", in_effect(config.recompute)),
            "number_checkpoints": number_of_checkpoints(config),
        },
    }
    if config.parallel.pipeline_model_parallel_size > 1:
        result["pipeline"] = copy.deepcopy(PIPELINE_BLOCK)
    values = _without_auto(user)
    for key in sorted(PASSED_KEYS.keys() & values.keys()):
        result[key] = copy.deepcopy(values[key])
    result["communication_data_type"] = as_dtype(result["communication_data_type"])
    zero = result["zero_optimization"]
    if "reduce_bucket_size" not in zero:
        zero["reduce_bucket_size"] = _bucket_size(config, result, ranks, largest)
    return result


def _precision_blocks(precision: PrecisionConfig, user: Json) -> Json:
    return {
        "fp16": {
            **_passed(user, "fp16"),
            **_mapped("fp16", precision),
            "loss_scale": precision.loss_scale or 0,
            "initial_scale_power": int(math.log2(precision.initial_loss_scale)),
            "min_loss_scale": int(precision.min_loss_scale),
        },
        "bf16": {**_passed(user, "bf16"), **_mapped("bf16", in_effect(precision))},
    }


def _mapped(block: str, options: object) -> Json:
    """The keys of a block with the values of their fields."""
    rows = ((*key.rpartition("."), name) for key, name, _ in MAPPINGS)
    return {key: getattr(options, name) for above, _, key, name in rows if above == block}


def value_origins(config: Config) -> dict[str, str]:
    """Returns the origins of the values of `build_ds_config` that are not defaults.

    Returns:
        Dotted key -> flag, or key and location in the file.
    """
    origins: dict[str, str] = {}
    for key, name, _ in mappings(config):
        if name in config.origins:
            origins[key] = config.origins[name]
        elif name in config.given:
            flag = as_flag(name, field_value(config, name), flag_of)
            origins[key] = f"{origins[key]}, {flag}" if key in origins else flag
    file = config.deepspeed_file
    for key in leaves(file.values if file else {}):
        is_translated = key.startswith(("scheduler.", "curriculum_learning."))
        if file and key not in origins and not is_translated and file.get(key) is not None:
            origins[key] = f"{key} of {file.location(key)}"
    return dict(sorted(origins.items()))


def is_read_at(key: str, stage: int) -> bool:
    """Whether a ZeRO stage reads a key of `zero_optimization`."""
    if stage == 3:
        return key not in ZERO12_DEFAULTS
    return key not in ZERO3_DEFAULTS and not key.startswith("stage3_")


def partition_keys(config: Config, dp_size: int) -> dict[str, Any]:
    """The values of PARTITION_KEYS in effect: neutral ones for those that the stage ignores."""
    stage = config.zero_stage
    zero = build_ds_config(config, dp_size)["zero_optimization"]
    in_order = {
        key: stage in (1, 2) and bool(zero.get(key, False))
        for key in ("round_robin_gradients", "parameter_alignment")
    }
    if stage != 3:
        return {**in_order, "sub_group_size": 0}
    largest = run_spec(config).elements()
    return {**in_order, "sub_group_size": min(int(zero["sub_group_size"]), largest)}


def cpp_ops(ds_config: Json) -> list[CppOp]:
    """DeepSpeed's C++ ops that an engine of a generated configuration uses."""
    from megatron_ds.launch.cpp_ops import ASYNC_IO, CPU_ADAM, FUSED_ADAM

    zero = ds_config["zero_optimization"]
    optimizer = ds_config["optimizer"]
    ops = []
    if optimizer["type"] == "AdamW" and not optimizer["params"]["torch_adam"]:
        ops.append(CPU_ADAM if "offload_optimizer" in zero else FUSED_ADAM)
    if any(
        zero.get(f"offload_{what}", {}).get("device") == "nvme" for what in ("optimizer", "param")
    ):
        ops.append(ASYNC_IO)
    return ops


def adam_kernel(
    config: Config, user: Mapping[str, Any], is_available: IsAvailable = only_torch
) -> AdamKernel:
    """The implementation of AdamW, by the user's file or else by the rule."""
    block = user.get("optimizer") or {}
    params = _without_auto(block.get("params") or {})
    return select_adam_kernel(
        str(block.get("type")),
        params.get("torch_adam"),
        params.get("fused"),
        offloaded=config.deepspeed.optimizer_offload != "none",
        is_available=is_available,
    )


def number_of_checkpoints(config: Config) -> int:
    """Chunks of layers whose inputs activation checkpointing keeps."""
    return -(-config.model.num_layers // max(1, in_effect(config.recompute).checkpoint_num_layers))


def _passed(user: Json, block: str) -> Json:
    """Values of the keys of a block that no field of the configuration has."""
    values = _without_auto(user.get(block) or {})
    return {key: values.get(key, value) for key, value in HALF_PRECISION_DEFAULTS[block].items()}


def _without_auto(values: Mapping[str, Any]) -> Json:
    """The keys that are not left to the flags."""
    return {key: value for key, value in values.items() if value not in (None, "auto")}


def compiles_efficient_linear() -> bool:
    """Whether the installed torch compiles DeepSpeed's `memory_efficient_linear` correctly.

    Compiled by torch 2.11, it gives wrong gradients for inputs [S, B, H].
    """
    from importlib.metadata import version  # slow to import, and few programs need it

    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def _zero_block(config: Config, user: Json, dp_size: int, largest: int, *, is_cpu: bool) -> Json:
    """All keys but a reduce_bucket_size that the file leaves open."""
    stage = config.zero_stage
    result: Json = {"stage": stage, **ZERO_DEFAULTS}
    result |= ZERO3_DEFAULTS if stage == 3 else ZERO12_DEFAULTS
    if stage == 3 and config.runtime.compile:
        result["memory_efficient_linear"] = compiles_efficient_linear()
    values = _without_auto(user.get("zero_optimization") or {})
    # Stage 1 reduces after the last backward pass only. Offloaded gradients are copied to the host
    # from the buckets, and stage 2 would keep twice as many of them.
    is_overlapping = (
        stage == 2 and dp_size > 1 and not (is_cpu or config.deepspeed.optimizer_offload != "none")
    )
    fits = values.get("reduce_bucket_size", math.inf) >= largest
    result["overlap_comm"] = stage == 3 or (is_overlapping and fits)
    if stage == 3:
        result["zero_hpz_partition_size"] = config.deepspeed.zero_hpz_partition_size
        if config.deepspeed.nvme_optimizer:
            result["sub_group_size"] = SWAPPED_SUB_GROUP
        if config.deepspeed.param_offload == "nvme":
            # A gathered parameter occupies one of few buffers until it is released.
            result["stage3_max_reuse_distance"] = 0
    for key, value in values.items():
        if key != "stage" and is_read_at(key, stage):
            result[key] = copy.deepcopy(value)
    for key, device in (
        ("offload_optimizer", config.deepspeed.optimizer_offload),
        ("offload_param", config.deepspeed.param_offload),
    ):
        block = _without_auto(result.pop(key, None) or {})
        if device != "none":
            # Copies of pageable memory are slow, and the device waits for them.
            block = {"pin_memory": not is_cpu} | block | {"device": device}
            result[key] = _offload_defaults(config, key, device, block, dp_size, largest) | block
    return result


def _offload_defaults(
    config: Config, key: str, device: str, block: Json, dp_size: int, largest: int
) -> Json:
    """Keys of an offload block that the file leaves open."""
    result: Json = {"nvme_path": config.deepspeed.nvme_path} if device == "nvme" else {}
    if key == "offload_optimizer":
        if config.zero_stage == 3:
            result["ratio"] = config.deepspeed.optimizer_offload_fraction
        if device == "nvme":
            # Weights, gradient and two moments of a flat tensor, of the next one and of the last.
            at_once = 1 + sum(block.get(f"pipeline_{way}", False) for way in ("read", "write"))
            result["buffer_count"] = 4 * at_once
    elif device == "nvme":
        # A buffer holds a rank's part of a parameter.
        part = -(-largest // dp_size) if dp_size else 0
        result |= {"buffer_size": part or 100_000_000, "max_in_cpu": 10**9}
    return result


def bucket_warnings(config: Config) -> Iterator[Problem]:
    """An overlapped reduction that the file makes with too small a bucket.

    Args:
        config: Configuration whose vocabulary size is known.
    """
    file = config.deepspeed_file
    key = "zero_optimization.reduce_bucket_size"
    if file is None or config.zero_stage != 2 or not file.get("zero_optimization.overlap_comm"):
        return
    bucket = file.get(key)
    largest = _largest_parameter(config)
    if bucket is not None and bucket < largest:
        yield file.at(key, Problem("ds-bucket-too-small", bucket=bucket, largest=largest))


def swap_buffer_problems(config: Config, dp_size: int) -> Iterator[Problem]:
    """Swap buffers in the file that are too small; DeepSpeed would fail later.

    Args:
        config: Complete configuration whose vocabulary size is known.
        dp_size: Data-parallel size.
    """
    file = config.deepspeed_file
    ranks = dp_size * config.parallel.sequence_ranks
    if file is None:
        return
    for name, key, device in (
        ("offload_optimizer", "buffer_count", config.deepspeed.optimizer_offload),
        ("offload_param", "buffer_size", config.deepspeed.param_offload),
    ):
        value = file.get(f"zero_optimization.{name}.{key}")
        if device == "nvme" and value is not None:
            block = _without_auto(file.get(f"zero_optimization.{name}"))
            largest = _largest_parameter(config)
            least = _offload_defaults(config, name, device, block, ranks, largest)[key]
            if value < least:
                yield file.invalid(f"zero_optimization.{name}.{key}", f"must be at least {least}")


def _bucket_size(config: Config, generated: Json, dp_size: int, largest: int) -> int:
    """Elements of a reduction, at most the model's size: the bucket is allocated at once."""
    bucket = BUCKET_BYTES // (4 if generated["communication_data_type"] == "fp32" else 2)
    zero = generated["zero_optimization"]
    # Stage 1 in bf16 sends during the last backward pass: see `FlatGradients`.
    if zero["overlap_comm"] or (zero["stage"] == 1 and generated["bf16"]["enabled"]):
        bucket = min(bucket, max(OVERLAPPED_BUCKET, OVERLAPPED_BUCKET_PER_RANK * dp_size))
        if zero["stage"] == 2:
            bucket = max(bucket, largest)
    if not config.model.vocab_size:
        return bucket
    return min(bucket, run_spec(config).elements())


def _largest_parameter(config: Config) -> int:
    """Elements of this rank's largest parameter; 0 while the vocabulary is unknown.

    Stage 2 does not copy a gradient that exceeds the bucket. If it overlaps, it frees such a
    gradient on ranks that own no part of it while another stream still reads it.
    """
    if not config.model.vocab_size:
        return 0
    return max(run_spec(config).sizes())


def _optimizer_block(config: Config, user: Json, is_available: IsAvailable) -> Json:
    options = config.optimizer
    spec = options.spec
    params: Json = {"lr": options.lr, "weight_decay": options.weight_decay}
    for key, param in spec.params.items():
        if param is Computed.FUSED:
            params[key] = is_available(AdamKernel.TORCH_FUSED)
        elif isinstance(param, tuple):
            params[key] = [getattr(options, name) for name in param]
        elif param not in MOMENT_TYPES or options.moment_dtypes:
            params[key] = None if param is None else getattr(options, param)
    if not spec.has_kernels or options.moment_dtypes:
        return {"type": spec.type, "params": params}
    kernel = adam_kernel(config, user, is_available)
    params.pop("fused")
    params["torch_adam"] = kernel in (AdamKernel.TORCH, AdamKernel.TORCH_FUSED)
    if params["torch_adam"]:
        params["fused"] = kernel is AdamKernel.TORCH_FUSED
    # DeepSpeed does not know apex: `build_engine` passes its optimizer.
    name = "ApexFusedAdam" if kernel is AdamKernel.APEX else "AdamW"
    return {"type": name, "params": params}
