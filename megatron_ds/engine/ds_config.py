"""The DeepSpeed JSON: generated whole from the configuration, with the user's file filled in.

`complete` carries the file's keys into the configuration where a flag was left at its default, and
names each contradiction between a flag and a key. `generate` writes every key that matters, even at
its default, and passes the user's remaining keys on. Pure functions; deepspeed is not imported, so
that a wrong file is an error within the second. How a file is read stands in `ds_file`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.engine import ds_curriculum, ds_scheduler
from megatron_ds.engine.ds_config_file import (
    PASSED_KEYS,
    DeepSpeedFile,
    Json,
    as_device,
    as_dtype,
    as_flag,
    as_number,
    as_whole,
    read_file,
)
from megatron_ds.model.flops import parameters_per_rank

STEPS_PER_PRINT_OFF = 1 << 30
"""steps_per_print that keeps DeepSpeed's own progress line silent: the loop prints its own."""

OPTIMIZERS = {
    "adam": "adam",
    "adamw": "adam",
    "fusedadam": "adam",
    "cpuadam": "adam",
    "deepspeedcpuadam": "adam",
    "sgd": "sgd",
}
"""Optimizer types of files, in small letters, and what they are called here."""


@dataclass(frozen=True)
class KeyFieldMapping:
    """A key of the file that says the same as a field of the configuration."""

    key: str
    field: str
    read: Callable[[Any], Any] = as_flag
    """The field's value out of the key's."""


def _optimizer(value: Any) -> str:
    kind = OPTIMIZERS.get(str(value).lower())
    if kind is None:
        raise ValueError("must be Adam, AdamW or SGD")
    return kind


LINKS = (
    KeyFieldMapping("train_batch_size", "global_batch_size", as_whole),
    KeyFieldMapping("train_micro_batch_size_per_gpu", "micro_batch_size", as_whole),
    KeyFieldMapping("gradient_clipping", "clip_grad", as_number),
    KeyFieldMapping("zero_optimization.stage", "zero_stage", as_whole),
    KeyFieldMapping(
        "zero_optimization.offload_optimizer.device",
        "cpu_optimizer",
        lambda value: as_device(value) != "none",
    ),
    KeyFieldMapping("zero_optimization.offload_param.device", "remote_device", as_device),
    KeyFieldMapping("fp16.enabled", "fp16"),
    KeyFieldMapping("fp16.loss_scale", "loss_scale", lambda value: as_number(value) or None),
    KeyFieldMapping(
        "fp16.initial_scale_power", "initial_loss_scale", lambda value: 2.0 ** as_number(value)
    ),
    KeyFieldMapping("fp16.min_loss_scale", "min_loss_scale", as_number),
    KeyFieldMapping("fp16.loss_scale_window", "loss_scale_window", as_whole),
    KeyFieldMapping("fp16.hysteresis", "hysteresis", as_whole),
    KeyFieldMapping("bf16.enabled", "bf16"),
    KeyFieldMapping(
        "data_types.grad_accum_dtype",
        "accumulate_allreduce_grads_in_fp32",
        lambda value: as_dtype(value) == "fp32",
    ),
    KeyFieldMapping("optimizer.type", "optimizer", _optimizer),
    KeyFieldMapping("optimizer.params.lr", "lr", as_number),
    KeyFieldMapping("optimizer.params.eps", "adam_eps", as_number),
    KeyFieldMapping("optimizer.params.weight_decay", "weight_decay", as_number),
    KeyFieldMapping("optimizer.params.momentum", "sgd_momentum", as_number),
    KeyFieldMapping("activation_checkpointing.partition_activations", "partition_activations"),
    KeyFieldMapping("activation_checkpointing.cpu_checkpointing", "checkpoint_in_cpu"),
    KeyFieldMapping(
        "activation_checkpointing.contiguous_memory_optimization", "contiguous_checkpointing"
    ),
    KeyFieldMapping(
        "activation_checkpointing.synchronize_checkpoint_boundary", "synchronize_each_layer"
    ),
    KeyFieldMapping("activation_checkpointing.profile", "profile_backward"),
)

PASSED_BESIDE = {
    "fp16": ("auto_cast", "consecutive_hysteresis"),
    "bf16": ("check_grad_overflow", "immediate_grad_update"),
}
"""Keys of blocks that reach DeepSpeed as they are, beside the linked ones."""

ZERO_DEFAULTS: Json = {
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "contiguous_gradients": True,
    "round_robin_gradients": False,
    "ignore_unused_parameters": True,
    "load_from_fp32_weights": True,
}
ZERO12_DEFAULTS: Json = {
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "use_multi_rank_bucket_allreduce": True,
}
"""What stage 3 does not read."""
ZERO3_DEFAULTS: Json = {
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "memory_efficient_linear": True,
}
"""What stage 3 alone reads."""


def _ignore_warning(line: str) -> None:
    """Takes a warning that nobody wants."""


def merge_file(
    config: Config, world_size: int, warn: Callable[[str], None] = _ignore_warning
) -> tuple[Config, list[str]]:
    """The configuration with the file's keys filled in, and every contradiction found.

    A key fills its field where the flag was not given; `"auto"` and absent keys leave the flags.
    warn is called with a line for each key that was put into other words or has no effect.
    """
    path = config.deepspeed.deepspeed_config
    if path is None or not Path(path).is_file():
        return config, _layout_problems(config)
    try:
        file = read_file(path)
    except ValueError as error:
        return config, [str(error)]
    fill = _ConfigMerger(config, file)
    for link in LINKS:
        value = file.get(link.key)
        if value is not None:
            fill.apply_link(link, value)
    fill.apply_betas()
    fill.accumulation(world_size)
    fill.scheduler(world_size, warn)
    fill.curriculum(warn)
    config = fill.config()
    for line in (*file.warnings, *_ignored_keys(config, file)):
        warn(line)
    problems = [*file.problems, *fill.problems, *_unit_problems(config, file)]
    problems += [*_optimizer_problems(config, file), *_zero_problems(config, file)]
    return config, problems + _layout_problems(config)


class _ConfigMerger:
    """Carries a file's keys into a configuration, one at a time."""

    def __init__(self, config: Config, file: DeepSpeedFile) -> None:
        self._config = config
        self._file = file
        self._values: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self.problems: list[str] = []

    def config(self) -> Config:
        """The filled configuration, which knows where its values came from."""
        origins = {
            name: f"{key} of {self._file.location(key)}"
            for name, key in self._keys.items()
            if name not in self._config.given
        }
        filled = _replace(self._config, self._values)
        return dataclasses.replace(filled, origins={**self._config.origins, **origins})

    def apply_link(self, link: KeyFieldMapping, value: Any) -> None:
        try:
            wanted = link.read(value)
        except (ValueError, OverflowError) as error:
            place = self._file.location(link.key)
            self.problems.append(f"{place}: {link.key} {json.dumps(value)}: {error}")
            return
        self.set_field(link.key, link.field, wanted, value)

    def set_field(self, key: str, name: str, wanted: Any, value: Any) -> None:
        """Notes what a key says of a field, or how that contradicts a flag or another key.

        value: the key's own, for the message; wanted: the field's.
        """
        file = self._file
        said = f"{key} {json.dumps(value)} of {file.location(key)}"
        if name in self._config.given:
            current = _field(self._config, name)
            if current != wanted:
                self.problems.append(
                    f"{_as_flag(name, current)} contradicts {said}: "
                    'make them equal, or write "auto" in the file'
                )
            return
        other = self._keys.get(name)
        if other is None:
            self._values[name], self._keys[name] = wanted, key
        elif self._values[name] != wanted:
            self.problems.append(
                f"{said} contradicts {other} {json.dumps(file.get(other))}: both say "
                f"{flag_of(name)}; leave one out"
            )

    def apply_betas(self) -> None:
        key = "optimizer.params.betas"
        betas = self._file.get(key)
        if betas is None:
            return
        try:
            first, second = (as_number(beta) for beta in betas)
        except (TypeError, ValueError):
            place = self._file.location(key)
            self.problems.append(f"{place}: {key} {json.dumps(betas)}: must be two numbers")
            return
        self.set_field(key, "adam_beta1", first, betas)
        self.set_field(key, "adam_beta2", second, betas)

    def accumulation(self, world_size: int) -> None:
        """Checks the file's gradient_accumulation_steps, or takes the global batch from it."""
        key = "gradient_accumulation_steps"
        steps, config = self._file.get(key), _replace(self._config, self._values)
        micro = config.schedule.micro_batch_size
        model_ranks = (
            config.parallel.tensor_model_parallel_size
            * config.parallel.pipeline_model_parallel_size
        )
        if steps is not None and steps < 1:
            self.problems.append(f"{self._file.location(key)}: {key} {steps}: must be positive")
            return
        if steps is None or not micro or model_ranks < 1 or world_size % model_ranks:
            return
        dp_size = world_size // model_ranks
        product = int(steps) * micro * dp_size
        total = config.schedule.global_batch_size
        if total is None:
            self.set_field(key, "global_batch_size", product, steps)
        elif total != product:
            self.problems.append(
                f"{key} {steps} of {self._file.location(key)} x micro-batch {micro} x "
                f"data-parallel size {dp_size} = {product}, but the global batch is "
                f'{total}: make them equal, or write "auto" in the file'
            )

    def scheduler(self, world_size: int, warn: Callable[[str], None]) -> None:
        """Takes a scheduler block for the flags that say the same."""
        config = _replace(self._config, self._values)
        problems = list(ds_scheduler.problems(config, self._file))
        self.problems += problems
        model_ranks = (
            config.parallel.tensor_model_parallel_size,
            config.parallel.pipeline_model_parallel_size,
        )
        micro = config.schedule.micro_batch_size
        if not micro or micro < 1 or min(model_ranks) < 1:
            return
        batch_size = config.final_global_batch_size(config.parallel.data_parallel_size(world_size))
        words = []
        for meaning in ds_scheduler.translate(config, self._file, batch_size):
            self.set_field(meaning.key, meaning.field, meaning.value, self._file.get(meaning.key))
            words.append(f"{flag_of(meaning.field)} {meaning.value}")
        if words and not problems:
            place = self._file.location("scheduler.type")
            warn(f"{place}: scheduler is taken as {', '.join(words)}")

    def curriculum(self, warn: Callable[[str], None]) -> None:
        """Takes a curriculum block for the flags that say the same."""
        self.problems += ds_curriculum.problems(self._file)
        lengths = ds_curriculum.lengths(self._file)
        if lengths is None:
            return
        step, before = int(self._file.get(ds_curriculum.STEP)), len(self.problems)
        self.set_field(ds_curriculum.BLOCK, "curriculum_seqlen", lengths, lengths)
        self.set_field(ds_curriculum.STEP, "curriculum_seqlen_step", step, step)
        if len(self.problems) > before:
            return
        place = self._file.location(ds_curriculum.BLOCK)
        words = " ".join(map(str, lengths))
        warn(
            f"{place}: {ds_curriculum.BLOCK} is taken as --curriculum-seqlen {words} "
            f"--curriculum-seqlen-step {step}"
        )


def _as_flag(name: str, value: Any) -> str:
    """A given flag with its value, as the user wrote it."""
    if isinstance(value, tuple):
        return f"{flag_of(name)} {' '.join(map(str, value))}"
    if not isinstance(value, bool):
        return f"{flag_of(name)} {value}"
    flag = flag_of(name)
    return f"--{name.replace('_', '-')}" if value and flag.startswith("--no-") else flag


def _optimizer_problems(config: Config, file: DeepSpeedFile) -> Iterator[str]:
    kind = str(file.get("optimizer.type")).lower()
    place = file.location("optimizer.type")
    if kind.endswith("cpuadam") and not config.deepspeed.cpu_optimizer:
        yield (
            f"{place}: optimizer.type {file.get('optimizer.type')}: the CPU's Adam is the "
            "optimizer of offloaded states; give offload_optimizer (or --cpu-optimizer), or AdamW"
        )
    params = "optimizer.params"
    if file.get(f"{params}.adam_w_mode") is False:
        key = f"{params}.adam_w_mode"
        yield f"{file.location(key)}: {key} false: adam is always AdamW here"
    if file.get(f"{params}.torch_adam") and config.deepspeed.cpu_optimizer:
        key = f"{params}.torch_adam"
        yield f"{file.location(key)}: {key} true: offloaded states need DeepSpeed's CPU Adam"
    if config.optimizer.optimizer == "sgd" and file.get("zero_allow_untested_optimizer") is False:
        key = "zero_allow_untested_optimizer"
        yield f"{file.location(key)}: {key} false: DeepSpeed then refuses --optimizer sgd"


def _zero_problems(config: Config, file: DeepSpeedFile) -> Iterator[str]:
    for name in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{name}"
        block = file.get(key)
        if block is None:
            continue
        if block.get("device") is None:
            yield f'{file.location(key)}: {key}: give the device, "cpu", "nvme" or "none"'
        if block.get("device") == "nvme" and not block.get("nvme_path"):
            yield f"{file.location(key)}: {key}: the device nvme needs an nvme_path"
    stage = zero_stage(config)
    if stage < 2 or file.get("zero_optimization.reduce_scatter") is False:
        return
    for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        value = file.get(key)
        if value not in (None, plain):
            yield (
                f"{file.location(key)}: {key} {json.dumps(value)}: ZeRO stage {stage} cannot, as "
                f"its reduce_scatter takes the mean by itself; write {json.dumps(plain)}"
            )


def _ignored_keys(config: Config, file: DeepSpeedFile) -> Iterator[str]:
    """Keys of the file that the stage or the optimizer in force does not read."""
    stage = zero_stage(config)
    unread = [key for key in file.values.get("zero_optimization", {}) if not _read_at(key, stage)]
    if unread:
        key = f"zero_optimization.{unread[0]}"
        yield f"{file.location(key)}: no effect at ZeRO stage {stage}: {', '.join(unread)}"
    if file.get("optimizer.params.fused") and not _torch_adam(config, file.values):
        key = "optimizer.params.fused"
        yield f"{file.location(key)}: {key} has no effect: it is an option of torch_adam"
    if str(file.get("optimizer.type")).lower() in ("fusedadam", "cpuadam", "deepspeedcpuadam"):
        key = "optimizer.type"
        yield f"{file.location(key)}: {key} {file.get(key)} is the name of a class: taken as AdamW"


def _read_at(key: str, stage: int) -> bool:
    """Whether ZeRO looks at a key of its block at a stage."""
    if stage == 3:
        return key not in ZERO12_DEFAULTS
    return key not in ZERO3_DEFAULTS and not key.startswith("stage3_")


def _unit_problems(config: Config, file: DeepSpeedFile) -> Iterator[str]:
    """The file may repeat the number of recomputed units, which the flags decide."""
    key = "activation_checkpointing.number_checkpoints"
    given = file.get(key)
    if given is None or not config.model.num_layers:
        return
    if config.recompute.checkpoint_num_layers > 0 and given != _recomputed_units(config):
        yield (
            f"{file.location(key)}: {key} {json.dumps(given)}: --num-layers "
            f"{config.model.num_layers} in units of "
            f"--checkpoint-num-layers {config.recompute.checkpoint_num_layers} are "
            f"{_recomputed_units(config)}; leave it out"
        )


def build_ds_config(config: Config, dp_size: int) -> Json:
    """The complete DeepSpeed dictionary of a run whose configuration `complete` has filled.

    dp_size: data-parallel size. The file's remaining keys are overlaid.
    """
    user: Json = {}
    if config.deepspeed.deepspeed_config is not None:
        user = read_file(config.deepspeed.deepspeed_config).values
    micro = config.schedule.micro_batch_size
    total = config.final_global_batch_size(dp_size)
    precision = config.precision
    fp32_accumulation = precision.name == "fp32" or precision.accumulate_allreduce_grads_in_fp32
    accumulation = "fp32" if fp32_accumulation else precision.name
    result: Json = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": total // (micro * dp_size),
        "gradient_clipping": config.optimizer.clip_grad,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "steps_per_print": STEPS_PER_PRINT_OFF,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "disable_allgather": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": config.optimizer.optimizer == "adam",
        "communication_data_type": accumulation,
        "data_types": {"grad_accum_dtype": accumulation},
        "fp16": {
            "auto_cast": False,
            "consecutive_hysteresis": False,
            **_passed(user, "fp16"),
            "enabled": precision.fp16,
            "loss_scale": precision.loss_scale or 0,
            "initial_scale_power": int(math.log2(precision.initial_loss_scale)),
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": precision.hysteresis,
            "min_loss_scale": int(precision.min_loss_scale),
        },
        "bf16": {
            "check_grad_overflow": True,
            "immediate_grad_update": False,
            **_passed(user, "bf16"),
            "enabled": precision.bf16,
        },
        "zero_optimization": _zero(config, user.get("zero_optimization") or {}),
        "optimizer": _optimizer_block(config, user),
        "activation_checkpointing": _recompute_block(config),
    }
    for key in sorted(PASSED_KEYS.keys() & user.keys()):
        if user[key] not in (None, "auto"):
            result[key] = copy.deepcopy(user[key])
    result["communication_data_type"] = as_dtype(result["communication_data_type"])
    return result


def value_origins(config: Config) -> dict[str, str]:
    """Where values of `generate` that are no defaults come from: dotted key -> flag or place."""
    told: dict[str, str] = {}
    beta = (
        KeyFieldMapping("optimizer.params.betas", name) for name in ("adam_beta1", "adam_beta2")
    )
    for link in (*LINKS, *beta):
        if link.field in config.origins:
            told[link.key] = config.origins[link.field]
        elif link.field in config.given:
            flag = _as_flag(link.field, _field(config, link.field))
            told[link.key] = f"{told[link.key]}, {flag}" if link.key in told else flag
    if config.deepspeed.deepspeed_config is not None:
        file = read_file(config.deepspeed.deepspeed_config)
        for key in _leaves(file.values):
            elsewhere = key.startswith(("scheduler.", "curriculum_learning."))
            if key not in told and not elsewhere and file.get(key) is not None:
                told[key] = f"{key} of {file.location(key)}"
    return dict(sorted(told.items()))


def _leaves(values: Json, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def zero_stage(config: Config) -> int:
    """The ZeRO stage in force; 1 where neither flag nor file names one."""
    stage = config.deepspeed.zero_stage
    return 1 if stage is None else stage


def _layout_problems(config: Config) -> list[str]:
    """Combinations that the pinned DeepSpeed computes wrongly or cannot run."""
    problems = []
    stage, precision = zero_stage(config), config.precision
    if stage == 0 and precision.name != "fp32":
        problems.append(
            f"ZeRO stage 0 with --{precision.name} is computed wrongly by DeepSpeed (gradient norm "
            "and clipping): take --zero-stage 1, which also runs on one process"
        )
    if stage == 0 and config.deepspeed.cpu_optimizer:
        problems.append("ZeRO stage 0 cannot offload the optimizer: take --zero-stage 1, 2 or 3")
    if stage != 3 and config.deepspeed.remote_device != "none":
        problems.append(
            f"parameters are offloaded (--remote-device {config.deepspeed.remote_device}, "
            f"offload_param) by ZeRO stage 3 alone, but the stage is {stage}"
        )
    if config.deepspeed.remote_device == "nvme" and config.logging.log_params_norm:
        problems.append("--log-params-norm cannot see parameters that are offloaded to nvme")
    if config.deepspeed.remote_device == "nvme" and config.deepspeed.deepspeed_config is None:
        problems.append(
            "--remote-device nvme needs a --deepspeed_config file whose "
            "zero_optimization.offload_param gives the nvme_path"
        )
    if precision.fp16:
        power = math.log2(precision.initial_loss_scale) if precision.initial_loss_scale > 0 else 0.5
        if power != int(power):
            problems.append(
                f"--initial-loss-scale {precision.initial_loss_scale}: must be a power of two"
            )
    if config.deepspeed.cpu_optimizer and config.optimizer.optimizer == "sgd":
        problems.append("--optimizer sgd cannot be offloaded: DeepSpeed's CPU optimizer is Adam")
    return problems


def _passed(user: Json, block: str) -> Json:
    """What a block of the file says beside the keys that are fields of the configuration."""
    given = user.get(block) or {}
    chosen = {key: given.get(key) for key in PASSED_BESIDE[block]}
    return {key: value for key, value in chosen.items() if value not in (None, "auto")}


def _zero(config: Config, user: Json) -> Json:
    stage = zero_stage(config)
    result: Json = {"stage": stage, **ZERO_DEFAULTS}
    result |= ZERO3_DEFAULTS if stage == 3 else ZERO12_DEFAULTS
    result["overlap_comm"] = stage == 3
    result["reduce_bucket_size"] = _bucket_size(config)
    for key, value in user.items():
        if key != "stage" and value not in (None, "auto") and _read_at(key, stage):
            result[key] = copy.deepcopy(value)
    for key, wanted in (
        ("offload_optimizer", "cpu" if config.deepspeed.cpu_optimizer else "none"),
        ("offload_param", config.deepspeed.remote_device),
    ):
        block = result.pop(key, None) or {}
        if wanted != "none":
            device = block.get("device")
            chosen = device if device in ("cpu", "nvme") else wanted
            result[key] = {**block, "device": chosen}
    return result


def _bucket_size(config: Config) -> int:
    """DeepSpeed's default, but no more than the model has: the bucket is memory that it takes."""
    largest: int = ZERO_DEFAULTS["reduce_bucket_size"]
    if not config.model.vocab_size:
        return largest
    tp_size = config.parallel.tensor_model_parallel_size
    return min(largest, parameters_per_rank(config.model, tp_size))


def _optimizer_block(config: Config, user: Json) -> Json:
    options = config.optimizer
    if options.optimizer == "sgd":
        params: Json = {
            "lr": options.lr,
            "momentum": options.sgd_momentum,
            "weight_decay": options.weight_decay,
        }
        return {"type": "SGD", "params": params}
    params = {
        "lr": options.lr,
        "betas": [options.adam_beta1, options.adam_beta2],
        "eps": options.adam_eps,
        "weight_decay": options.weight_decay,
        "torch_adam": _torch_adam(config, user),
    }
    if params["torch_adam"]:
        # One pass over the flat fp32 parameters in place of eight, on CPUs as on accelerators.
        fused = _chosen(user, "fused")
        params["fused"] = True if fused is None else fused
    return {"type": "AdamW", "params": params}


def _torch_adam(config: Config, user: Json) -> bool:
    """Whether torch's AdamW steps, which needs no compiler; an offloaded state is
    DeepSpeedCPUAdam's, and FusedAdam is taken where the file asks for it."""
    chosen = _chosen(user, "torch_adam")
    if chosen is not None:
        return bool(chosen)
    kind = (user.get("optimizer") or {}).get("type")
    return not config.deepspeed.cpu_optimizer and str(kind).lower() != "fusedadam"


def _chosen(user: Json, name: str) -> Any:
    """An option of the file's optimizer; None if it is absent or "auto"."""
    value = ((user.get("optimizer") or {}).get("params") or {}).get(name)
    return None if value == "auto" else value


def _recompute_block(config: Config) -> Json:
    recompute = config.recompute
    return {
        "partition_activations": recompute.partition_activations,
        "cpu_checkpointing": recompute.checkpoint_in_cpu,
        "contiguous_memory_optimization": recompute.contiguous_checkpointing,
        "number_checkpoints": _recomputed_units(config),
        "synchronize_checkpoint_boundary": recompute.synchronize_each_layer,
        "profile": recompute.profile_backward,
    }


def _recomputed_units(config: Config) -> int:
    return -(-config.model.num_layers // config.recompute.checkpoint_num_layers)


def _field(config: Config, name: str) -> Any:
    return getattr(getattr(config, _group_of(name)), name)


def _group_of(name: str) -> str:
    for group, kind in GROUPS.items():
        if any(item.name == name for item in dataclasses.fields(kind)):
            return group
    raise KeyError(name)


def _replace(config: Config, values: dict[str, Any]) -> Config:
    """The configuration with some fields changed; fields are named without their group."""
    for name, value in values.items():
        group = _group_of(name)
        changed = dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{group: changed})
    return config
