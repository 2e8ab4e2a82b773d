"""The DeepSpeed JSON: generated whole from the configuration, with the user's file filled in.

`complete` carries the file's keys into the configuration where a flag was left at its default, and
names each contradiction between a flag and a key. `generate` writes every key that matters, even at
its default, and passes the user's remaining keys on. Pure functions; deepspeed is not imported, so
that a wrong file is an error within the second. Key names: https://www.deepspeed.ai/docs/config-json
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.model.flops import parameters_per_rank

Json = dict[str, Any]

NEVER = 1 << 30
"""steps_per_print that keeps DeepSpeed's own progress line silent: the loop prints its own."""


@dataclass(frozen=True)
class Link:
    """A key of the file that says the same as a field of the configuration."""

    key: str
    field: str
    read: Callable[[Any], Any] = lambda value: value
    """The field's value out of the key's."""


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError("must be a whole number")
    return int(value)


def _optimizer(value: Any) -> str:
    known = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}
    if str(value).lower() not in known:
        raise ValueError("must be Adam, AdamW or SGD")
    return known[str(value).lower()]


def _is_fp32(value: Any) -> bool:
    if str(value) not in ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16"):
        raise ValueError("must be fp32, fp16 or bf16")
    return str(value) in ("fp32", "float32")


def _device(value: Any) -> str:
    if value not in ("none", "cpu", "nvme"):
        raise ValueError('must be "none", "cpu" or "nvme"')
    return str(value)


LINKS = (
    Link("train_batch_size", "global_batch_size", _whole),
    Link("train_micro_batch_size_per_gpu", "micro_batch_size", _whole),
    Link("gradient_clipping", "clip_grad", _number),
    Link("zero_optimization.stage", "zero_stage", _whole),
    Link(
        "zero_optimization.offload_optimizer.device",
        "cpu_optimizer",
        lambda value: _device(value) != "none",
    ),
    Link("zero_optimization.offload_param.device", "remote_device", _device),
    Link("fp16.enabled", "fp16", _flag),
    Link("fp16.loss_scale", "loss_scale", lambda value: _number(value) or None),
    Link("fp16.initial_scale_power", "initial_loss_scale", lambda value: 2.0 ** _number(value)),
    Link("fp16.min_loss_scale", "min_loss_scale", _number),
    Link("fp16.loss_scale_window", "loss_scale_window", _whole),
    Link("fp16.hysteresis", "hysteresis", _whole),
    Link("bf16.enabled", "bf16", _flag),
    Link("data_types.grad_accum_dtype", "accumulate_allreduce_grads_in_fp32", _is_fp32),
    Link("optimizer.type", "optimizer", _optimizer),
    Link("optimizer.params.lr", "lr", _number),
    Link("optimizer.params.eps", "adam_eps", _number),
    Link("optimizer.params.weight_decay", "weight_decay", _number),
    Link("optimizer.params.momentum", "sgd_momentum", _number),
    Link("activation_checkpointing.partition_activations", "partition_activations", _flag),
    Link("activation_checkpointing.cpu_checkpointing", "checkpoint_in_cpu", _flag),
    Link(
        "activation_checkpointing.contiguous_memory_optimization", "contigious_checkpointing", _flag
    ),
    Link(
        "activation_checkpointing.synchronize_checkpoint_boundary", "synchronize_each_layer", _flag
    ),
    Link("activation_checkpointing.profile", "profile_backward", _flag),
)

BLOCK_PASSED = {
    "fp16": {"auto_cast", "consecutive_hysteresis"},
    "bf16": {"check_grad_overflow", "immediate_grad_update"},
    "data_types": set(),
    "activation_checkpointing": {"number_checkpoints"},
    "optimizer": {"type", "params"},
    "optimizer.params": {"betas", "adam_w_mode", "torch_adam", "fused"},
}
"""Keys within a block, beside the linked ones, that are checked or reach DeepSpeed as they are."""

OWN_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_optimization",
        "fp16",
        "bf16",
        "bfloat16",
        "data_types",
        "optimizer",
        "activation_checkpointing",
        "scheduler",
    }
)
"""Top-level keys that `complete` reads."""

PASSED_KEYS = frozenset(
    {
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "disable_python_gc",
        "memory_breakdown",
        "prescale_gradients",
        "gradient_predivide_factor",
        "communication_data_type",
        "disable_allgather",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "comms_logger",
        "flops_profiler",
        "aio",
        "timers",
        "log_level",
        "tensorboard",
        "csv_monitor",
        "wandb",
        "comet",
        "checkpoint",
    }
)
"""Top-level keys that reach DeepSpeed as they are."""

REFUSED_KEYS = {
    "scheduler": "the learning rate comes from --lr-decay-style, --lr-warmup-* and --min-lr",
    "curriculum_learning": "DeepSpeed has removed it",
    "compression_training": "DeepSpeed has removed it",
    "amp": "DeepSpeed has removed it; use --bf16",
    "quantize_training": "DeepSpeed has removed it",
    "sparse_gradients": "DeepSpeed has removed it",
    "eigenvalue": "DeepSpeed has removed it",
    "sparse_attention": "DeepSpeed has removed it",
    "elasticity": "DeepSpeed has removed it",
    "graph_harvesting": "DeepSpeed has removed it",
    "nebula": "DeepSpeed has removed it",
    "progressive_layer_drop": "DeepSpeed has removed it",
    "managed_gradient_accumulation": "the training loop sets the accumulation boundary",
    "gradient_allreduce_op": "gradients are averaged over data-parallel ranks",
    "torch_autocast": "use --bf16",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "sequence_parallel_size": "sequence parallelism is not there yet",
    "expert_parallel": "mixture of experts is not there yet",
    "pipeline": "pipeline parallelism is not there yet",
    "data_efficiency": "it is not there yet",
    "compile": "use --compile",
    "hybrid_engine": "it is not there yet",
    "weight_quantization": "it is for inference",
}
"""Top-level keys that would change the run and are not supported: key -> what to do."""

ZERO_DEFAULTS: Json = {
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": None,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "contiguous_gradients": True,
    "round_robin_gradients": False,
    "ignore_unused_parameters": True,
}
ZERO3_DEFAULTS: Json = {
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
}
ZERO_PASSED = frozenset(
    {
        "stage",
        "offload_optimizer",
        "offload_param",
        "load_from_fp32_weights",
        "use_multi_rank_bucket_allreduce",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "memory_efficient_linear",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_gradients",
        "parameter_alignment",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "override_module_apply",
    }
)
ZERO_RENAMED = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Old or short spellings of zero_optimization's keys."""
ZERO_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
"""Legacy switches that mean an offload to the CPU."""
ZERO_DROPPED = frozenset({"cpu_offload_use_pin_memory", "elastic_checkpoint"})
"""Legacy keys that DeepSpeed itself ignores."""


def complete(config: Config, world_size: int) -> tuple[Config, list[str]]:
    """The configuration with the file's keys filled in, and every contradiction found.

    A key fills its field where the flag was not given; `"auto"` and absent keys leave the flags.
    """
    path = config.deepspeed.deepspeed_config
    if path is None or not Path(path).is_file():
        return config, _layout_problems(config)
    try:
        user = read_file(path)
    except ValueError as error:
        return config, [str(error)]
    problems = list(_key_problems(path, user))
    filled: dict[str, Any] = {}
    for link in LINKS:
        value = _get(user, link.key)
        if value is None or value == "auto":
            continue
        try:
            wanted = link.read(value)
        except ValueError as error:
            problems.append(f"{path}: {link.key} {json.dumps(value)}: {error}")
            continue
        problems += _fill(config, path, link, value, wanted, filled)
    betas = _get(user, "optimizer.params.betas")
    if betas not in (None, "auto"):
        problems += _fill_betas(config, path, betas, filled)
    config = _replace(config, filled)
    problems += _unit_problems(config, path, user)
    config, more = _accumulation(config, path, user, world_size)
    problems += _offload_problems(path, user)
    return config, problems + more + _layout_problems(config)


def generate(config: Config, dp_size: int) -> Json:
    """The complete DeepSpeed dictionary of a run whose configuration `complete` has filled.

    dp_size: data-parallel size. The file's remaining keys are overlaid.
    """
    user: Json = {}
    if config.deepspeed.deepspeed_config is not None:
        user = read_file(config.deepspeed.deepspeed_config)
    micro = config.schedule.micro_batch_size
    assert micro is not None
    total = config.batch_size(dp_size)
    precision = config.precision
    fp32_accumulation = precision.name == "fp32" or precision.accumulate_allreduce_grads_in_fp32
    accumulation = "fp32" if fp32_accumulation else precision.name
    result: Json = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": total // (micro * dp_size),
        "gradient_clipping": config.optimizer.clip_grad,
        "prescale_gradients": False,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        "dump_state": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": config.optimizer.optimizer == "adam",
        "communication_data_type": accumulation,
        "data_types": {"grad_accum_dtype": accumulation},
        "fp16": {
            "auto_cast": False,
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
            **_passed(user, "bf16"),
            "enabled": precision.bf16,
        },
        "zero_optimization": _zero(config, user.get("zero_optimization", {})),
        "optimizer": _optimizer_block(config, user),
        "activation_checkpointing": _recompute_block(config),
    }
    for key in PASSED_KEYS & user.keys():
        if user[key] != "auto":
            result[key] = user[key]
    return result


def zero_stage(config: Config) -> int:
    """The ZeRO stage in force; 1 where neither flag nor file names one."""
    stage = config.deepspeed.zero_stage
    return 1 if stage is None else stage


def read_file(path: str) -> Json:
    """The user's JSON. Raises ValueError with the place of the error."""

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{path}: the key {key!r} stands twice")
        return dict(pairs)

    try:
        user = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--deepspeed_config {path}: {error}") from error
    if not isinstance(user, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    if "bfloat16" in user:
        user.setdefault("bf16", user.pop("bfloat16"))
    if isinstance(user.get("zero_optimization"), bool):
        user["zero_optimization"] = {"stage": 1 if user["zero_optimization"] else 0}
    blocks = ("zero_optimization", "fp16", "bf16", "data_types", "optimizer")
    for block in (*blocks, "activation_checkpointing"):
        if block in user and not isinstance(user[block], dict):
            raise ValueError(f"{path}: {block} must be an object")
    if "zero_optimization" in user:
        user["zero_optimization"] = _normal_zero(user["zero_optimization"])
    for key in (
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
        "optimizer.params",
    ):
        if not isinstance(_get(user, key), dict | None):
            raise ValueError(f"{path}: {key} must be an object")
    return user


def _normal_zero(zero: Json) -> Json:
    """zero_optimization with today's keys in place of the legacy ones."""
    result = {ZERO_RENAMED.get(key, key): value for key, value in zero.items()}
    for old, new in ZERO_OFFLOAD.items():
        if result.pop(old, False):
            result.setdefault(new, {"device": "cpu"})
    return {key: value for key, value in result.items() if key not in ZERO_DROPPED}


def _fill(
    config: Config, path: str, link: Link, value: Any, wanted: Any, filled: dict[str, Any]
) -> list[str]:
    """Notes a key's value for its field, or gives the contradiction with the given flag."""
    current = _field(config, link.field)
    if link.field not in config.given:
        filled[link.field] = wanted
        return []
    if current == wanted:
        return []
    flag = flag_of(link.field)
    shown = flag if isinstance(current, bool) else f"{flag} {current}"
    return [
        f"{shown} contradicts {link.key} {json.dumps(value)} of {path}: "
        'make them equal, or write "auto" in the file'
    ]


def _fill_betas(config: Config, path: str, betas: Any, filled: dict[str, Any]) -> list[str]:
    key = "optimizer.params.betas"
    try:
        first, second = (_number(beta) for beta in betas)
    except (TypeError, ValueError):
        return [f"{path}: {key} {json.dumps(betas)}: must be two numbers"]
    return [
        *_fill(config, path, Link(key, "adam_beta1"), betas, first, filled),
        *_fill(config, path, Link(key, "adam_beta2"), betas, second, filled),
    ]


def _offload_problems(path: str, user: Json) -> Iterator[str]:
    for key in ("offload_optimizer", "offload_param"):
        block = _get(user, f"zero_optimization.{key}")
        if block is None:
            continue
        if block.get("device") is None:
            yield f'{path}: zero_optimization.{key}: give the device, "cpu", "nvme" or "none"'
        if block.get("device") == "nvme" and not block.get("nvme_path"):
            yield f"{path}: zero_optimization.{key}: the device nvme needs an nvme_path"


def _unit_problems(config: Config, path: str, user: Json) -> Iterator[str]:
    """The file may repeat the number of recomputed units, which the flags decide."""
    given = _get(user, "activation_checkpointing.number_checkpoints")
    if given in (None, "auto") or not config.model.num_layers:
        return
    if config.recompute.checkpoint_num_layers > 0 and given != _recomputed_units(config):
        yield (
            f"{path}: activation_checkpointing.number_checkpoints {json.dumps(given)}: "
            f"--num-layers "
            f"{config.model.num_layers} in units of --checkpoint-num-layers "
            f"{config.recompute.checkpoint_num_layers} are {_recomputed_units(config)}; leave "
            f"it out"
        )


def _accumulation(
    config: Config, path: str, user: Json, world_size: int
) -> tuple[Config, list[str]]:
    """Checks or uses the file's gradient_accumulation_steps."""
    steps = user.get("gradient_accumulation_steps")
    micro = config.schedule.micro_batch_size
    tp_size = config.parallel.tensor_model_parallel_size
    if steps in (None, "auto") or not micro or tp_size < 1 or world_size % tp_size:
        return config, []
    if not isinstance(steps, int) or steps < 1:
        return config, [f"{path}: gradient_accumulation_steps {steps!r}: must be a whole number"]
    dp_size = config.parallel.data_parallel_size(world_size)
    product = steps * micro * dp_size
    total = config.schedule.global_batch_size
    if total is None:
        return _replace(config, {"global_batch_size": product}), []
    if total == product:
        return config, []
    return config, [
        f"gradient_accumulation_steps {steps} of {path} x micro-batch {micro} x data-parallel size "
        f"{dp_size} = {product}, but the global batch is {total}"
    ]


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


def _key_problems(path: str, user: Json) -> Iterator[str]:
    known = sorted(OWN_KEYS | PASSED_KEYS | REFUSED_KEYS.keys())
    for key in user:
        if key in REFUSED_KEYS:
            yield f"{path}: {key} is not supported: {REFUSED_KEYS[key]}"
        elif key not in known:
            yield f"{path}: there is no key {key!r}{_near(key, known)}"
    zero_known = sorted(ZERO_DEFAULTS.keys() | ZERO3_DEFAULTS.keys() | ZERO_PASSED)
    for key in user.get("zero_optimization", {}):
        if key not in zero_known:
            yield f"{path}: there is no key zero_optimization.{key}{_near(key, zero_known)}"
    for block, passed in BLOCK_PASSED.items():
        linked = {link.key.removeprefix(f"{block}.") for link in LINKS}
        sub_known = sorted(passed | {key for key in linked if "." not in key})
        for key in _get(user, block) or {}:
            if key not in sub_known:
                yield f"{path}: there is no key {block}.{key}{_near(key, sub_known)}"
    if _get(user, "optimizer.params.adam_w_mode") is False:
        yield f"{path}: optimizer.params.adam_w_mode false: adam is always AdamW here"


def _passed(user: Json, block: str) -> Json:
    """What a block of the file says beside the keys that are fields of the configuration."""
    given = user.get(block, {})
    return {key: given[key] for key in sorted(BLOCK_PASSED[block] & given.keys())}


def _near(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _zero(config: Config, user: Json) -> Json:
    stage = zero_stage(config)
    result: Json = {"stage": stage, **ZERO_DEFAULTS, **(ZERO3_DEFAULTS if stage == 3 else {})}
    result["overlap_comm"] = stage == 3
    result["reduce_bucket_size"] = _bucket_size(config)
    for key, value in user.items():
        meaningless = key.startswith("stage3_") and stage != 3
        if key != "stage" and value != "auto" and not meaningless:
            result[key] = copy.deepcopy(value)
    for key, wanted in (
        ("offload_optimizer", "cpu" if config.deepspeed.cpu_optimizer else "none"),
        ("offload_param", config.deepspeed.remote_device),
    ):
        block = result.pop(key, None) or {}
        if wanted != "none":
            device = block.get("device")
            result[key] = {**block, "device": device if device not in (None, "none") else wanted}
    return result


def _bucket_size(config: Config) -> int:
    """DeepSpeed's default, but no more than the model has: the bucket is memory that it takes."""
    largest: int = ZERO_DEFAULTS["reduce_bucket_size"]
    if config.model.vocab_size is None:
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
        # torch's AdamW needs no compiler; an offloaded state is DeepSpeedCPUAdam's.
        "torch_adam": not config.deepspeed.cpu_optimizer,
    }
    chosen = _get(user, "optimizer.params") or {}
    params["torch_adam"] = chosen.get("torch_adam", params["torch_adam"])
    if params["torch_adam"]:
        # One pass over the flat fp32 parameters in place of eight, on CPUs as on accelerators.
        params["fused"] = chosen.get("fused", True)
    return {"type": "AdamW", "params": params}


def _recompute_block(config: Config) -> Json:
    recompute = config.recompute
    return {
        "partition_activations": recompute.partition_activations,
        "cpu_checkpointing": recompute.checkpoint_in_cpu,
        "contiguous_memory_optimization": recompute.contigious_checkpointing,
        "number_checkpoints": _recomputed_units(config),
        "synchronize_checkpoint_boundary": recompute.synchronize_each_layer,
        "profile": recompute.profile_backward,
    }


def _recomputed_units(config: Config) -> int:
    return -(-config.model.layers // config.recompute.checkpoint_num_layers)


def _get(user: Json, dotted: str) -> Any:
    value: Any = user
    for part in dotted.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


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
