"""Reads settings and sizes back from DeepSpeed's engine, and checks them against the configuration.

DeepSpeed ignores, overrides or misreads some settings without an error. `check` reads those that it
can get wrong from the built engine and its optimizer, and not from the dictionary that was passed.
It reads private attributes of the pinned DeepSpeed and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch import Tensor

from megatron_ds.config import Config, OptimizerConfig, PrecisionConfig
from megatron_ds.config.devices import HOST
from megatron_ds.config.fields import in_effect
from megatron_ds.config.options.optimizer_specs import MOMENT_TYPES, OptimizerSpec
from megatron_ds.config.problems import user_error
from megatron_ds.engine.ds_config import passthrough
from megatron_ds.engine.ds_config.generate import adam_kernel
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.settings import EngineSettings, LossScaleSettings
from megatron_ds.launch.output import columns
from megatron_ds.model.declaration.architecture import is_matrix, run_spec
from megatron_ds.model.stages import rank_layers

ON_DEVICE = "device"
ON_HOST = "host"
StateBytes = dict[str, dict[str, int]]
"""ON_DEVICE or ON_HOST -> kind of state -> bytes of this process."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Our names of number formats, and torch's."""
FUSED = " (fused)"
"""Suffix of the names of optimizers with torch's fused kernel."""
OFFLOAD_SWITCHES = {
    "optimizer_offload": ("swap_optimizer", "cpu_offload", "offload_optimizer"),
    "param_offload": ("params_in_nvme_and_cpu", "offload_param"),
}
"""Attributes of DeepSpeed's optimizers: for offloading to a disk, and to host memory."""
SUPER_OFFLOAD_OPTIMIZER = "SuperOffloadOptimizer_Stage3"
"""DeepSpeed's class of optimizer for `super_offload`."""


def check(parts: EngineParts) -> EngineSettings:
    """Compare the settings of an engine, built or just loaded, with the configuration.

    Args:
        parts: Parts of the engine. The DeepSpeed configuration is used for what no flag gives.

    Returns:
        The settings in effect.

    Raises:
        UserError: If any setting differs, with a table.
    """
    expected = _expected_settings(parts)
    actual: dict[str, dict[Any, None]] = {}  # sets in order
    for name, value in _actual_settings(parts.engine, parts.config.optimizer.spec):
        actual.setdefault(name, {})[value] = None
    rows = [("setting", "expected", "actual")]
    for name, want in vars(expected).items():
        values = list(actual.get(name, ()))
        if values != [want]:
            rows.append((name, str(want), " and ".join(map(str, values)) or "nothing"))
    if len(rows) == 1:
        return expected
    table = "\n".join(f"  {line}" for line in columns(rows))
    raise user_error("engine-settings-mismatch", table=table)


def state_bytes(engine: Any) -> StateBytes:
    """Count the bytes of this process's tensors that outlive a step, by kind.

    Excludes reduction buckets, which are temporary. Each storage counts once, for the first kind
    that uses it.

    Args:
        engine: Engine of `deepspeed.initialize`.
    """
    parameters = list(engine.module.parameters())
    kinds: dict[str, Iterable[Tensor | None]] = {
        "parameters": [getattr(p, "ds_tensor", p.data) for p in parameters],
        "gathered parameters": [p.data for p in parameters],
        "accumulated gradients": _gradient_sums(engine),
        "gradients": [p.grad for p in parameters],
        "master weights": master_weights(engine),
        "moments": _moments(engine.basic_optimizer),
    }
    result: StateBytes = {ON_DEVICE: {}, ON_HOST: {}}
    seen: set[tuple[str, int]] = set()
    device_type = torch.device(engine.device).type
    for category, tensors in kinds.items():
        for storage in (tensor.untyped_storage() for tensor in tensors if tensor is not None):
            key = str(storage.device), storage.data_ptr()
            if storage.nbytes() > 0 and key not in seen:
                seen.add(key)
                memory = ON_DEVICE if storage.device.type == device_type else ON_HOST
                result[memory][category] = result[memory].get(category, 0) + storage.nbytes()
    return result


def loaded_ops() -> list[str]:
    """DeepSpeed's C++ ops that this process has loaded."""
    return sorted(OpBuilder._loaded_ops)


def _expected_settings(parts: EngineParts) -> EngineSettings:
    """The settings that a configuration asks for."""
    config = parts.config
    ds_config = parts.ds_config
    scaler = getattr(parts.engine.optimizer, "loss_scaler", None)
    layers = rank_layers(config)[parts.mesh.pp.rank]
    decay = config.optimizer.weight_decay
    matrices = run_spec(config).sizes(layers, is_matrix).total()
    precision = config.precision
    options = config.optimizer
    dp_size = parts.mesh.dp.size
    in_fp32 = precision.accumulate_allreduce_grads_in_fp32 or precision.name == "fp32"
    offload = config.deepspeed
    spec = options.spec
    return EngineSettings(
        zero_stage=config.zero_stage,
        dp_size=parts.mesh.replicas.size,
        accumulation_steps=config.final_global_batch_size(dp_size)
        // (config.schedule.micro_batch_size * dp_size),
        optimizer=_expected_optimizer(config, ds_config),
        betas=tuple(getattr(options, name) for name in spec.betas) or None,
        epsilon=None
        if (epsilon := _value_of(options, "eps")) is None
        else tuple(epsilon * factors.eps for factors in parts.multipliers),
        momentum=_value_of(options, "momentum"),
        matrices=None if spec.matrices is None else matrices,
        weight_decay=tuple(decay * factors.weight_decay for factors in parts.multipliers),
        clip_grad=options.clip_grad,
        param_dtype=DTYPES[precision.name],
        accumulation_dtype="float32" if in_fp32 else DTYPES[precision.name],
        reduction_dtype=DTYPES[ds_config["communication_data_type"]],
        master_dtype="bfloat16" if in_effect(precision).bf16_master_weights else "float32",
        optimizer_offload=offload.optimizer_offload,
        param_offload=offload.param_offload,
        moment_dtypes=tuple(DTYPES[name] for name in options.moment_dtypes.values()),
        loss_scale=_expected_loss_scale(precision, scaler),
        hpz_size=ds_config["zero_optimization"].get("zero_hpz_partition_size", 1),
        passed_keys=tuple(passed.key for passed in passthrough.find(config)),
    )


def _value_of(options: OptimizerConfig, key: str) -> float | None:
    """The value of the option of a key of the optimizer's block; None without one."""
    name = options.spec.option_of(key)
    return None if name is None else float(getattr(options, name))


def _expected_optimizer(config: Config, ds_config: Mapping[str, Any]) -> str:
    spec = config.optimizer.spec
    if not spec.has_kernels:
        return spec.title
    if not config.optimizer.moment_dtypes:
        return adam_kernel(config, ds_config).value
    return f"{spec.title}{FUSED if ds_config['optimizer']['params']['fused'] else ''}"


def _expected_loss_scale(precision: PrecisionConfig, scaler: Any) -> LossScaleSettings | None:
    if not precision.fp16:
        return None
    if precision.loss_scale is not None:
        return LossScaleSettings(precision.loss_scale)
    return LossScaleSettings(
        # Once in use, or loaded, a dynamic scale is a state and no setting.
        scaler.cur_scale if getattr(scaler, "cur_iter", 0) > 0 else precision.initial_loss_scale,
        precision.loss_scale_window,
        precision.hysteresis,
        precision.min_loss_scale,
    )


def _actual_settings(engine: Any, spec: OptimizerSpec) -> Iterator[tuple[str, Any]]:
    """All values that the parts of an engine have for the fields of EngineSettings.

    Args:
        engine: Engine of `deepspeed.initialize`.
        spec: Declaration of its optimizer, with the names of its states.
    """
    stage = _read_stage(engine)
    optimizer = engine.optimizer
    basic = engine.basic_optimizer
    yield "zero_stage", stage
    yield "dp_size", engine.dp_world_size  # the divisor of gradients
    group = getattr(optimizer, "dp_process_group", None)
    if group is not None:
        yield "dp_size", group.size()
    yield "accumulation_steps", engine.gradient_accumulation_steps()
    name = type(basic).__name__
    if type(basic).__module__.partition(".")[0] == "apex":
        name += " of apex"
    matrices = getattr(basic, "matrix_count", None)
    # Optimizers of matrices update only what is no matrix by the kernel.
    if matrices is None and any(group.get("fused") for group in basic.param_groups):
        name += FUSED
    # DeepSpeed's Adam kernels are Adam with L2 regularization unless configured otherwise.
    is_decoupled = getattr(basic, "adam_w_mode", True)
    yield "optimizer", name if is_decoupled else f"{name} without decoupled decay"
    for group in basic.param_groups:
        yield "betas", tuple(group["betas"]) if "betas" in group else None
        yield "momentum", group.get("momentum")
    epsilon = tuple(group["eps"] for group in basic.param_groups if "eps" in group)
    yield "epsilon", epsilon or None
    types = getattr(basic, "state_types", {})
    names = {state.dtype: state.name for state in spec.states}
    options = MOMENT_TYPES if types else ()
    dtypes = (str(types.get(names.get(option, ""), torch.float32)) for option in options)
    yield "moment_dtypes", tuple(dtype.removeprefix("torch.") for dtype in dtypes)
    yield "matrices", matrices
    yield "weight_decay", tuple(group["weight_decay"] for group in basic.param_groups)
    # Without ZeRO the engine clips; with it the optimizer does, by its own copy.
    yield "clip_grad", engine.gradient_clipping() if stage == 0 else optimizer.clip_grad
    for name, dtype in _actual_dtypes(engine, stage):
        yield name, str(dtype).removeprefix("torch.")
    for setting, (to_disk, *to_host) in OFFLOAD_SWITCHES.items():
        is_on_host = any(getattr(optimizer, name, False) for name in to_host)
        is_on_disk = getattr(optimizer, to_disk, False)
        yield setting, "nvme" if is_on_disk else HOST if is_on_host else "none"
    yield "loss_scale", _actual_loss_scale(engine)
    yield "hpz_size", getattr(optimizer, "zero_hpz_partition_size", 1)
    yield "passed_keys", _actual_passed_keys(engine)


def _actual_dtypes(engine: Any, stage: int) -> Iterator[tuple[str, torch.dtype]]:
    optimizer = engine.optimizer
    parameters = list(engine.module.parameters())
    gradients = [parameter.grad_dtype or parameter.dtype for parameter in parameters]
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # BF16_Optimizer
        accumulated = [flat.dtype for flat in optimizer.fp32_groups_gradients_flat]
    elif stage == 3:
        accumulated = [optimizer.grad_partitions_flat_buffer.dtype]
    else:
        accumulated = gradients if stage == 0 else [optimizer.gradient_accumulation_dtype]
    types = getattr(engine.basic_optimizer, "state_types", {})
    own_types = {
        id(state[name])
        for state in engine.basic_optimizer.state.values()
        for name in types.keys() & state.keys()
        if state[name].dtype == types[name]
    }
    # 8-bit moments are integers.
    moments = (
        moment
        for moment in _moments(engine.basic_optimizer)
        if moment.is_floating_point() and id(moment) not in own_types
    )
    masters = (*master_weights(engine), *moments)
    dtypes: dict[str, Iterable[torch.dtype]] = {
        "param_dtype": [*(parameter.dtype for parameter in parameters), *gradients],
        "accumulation_dtype": accumulated,
        # Stage 3 has one bucket for each type in which it reduces.
        "reduction_dtype": getattr(optimizer, "ipg_buckets", (engine.communication_data_type,)),
        "master_dtype": [tensor.dtype for tensor in masters],
    }
    return ((name, dtype) for name, types in dtypes.items() for dtype in types)


def _actual_loss_scale(engine: Any) -> LossScaleSettings | None:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or (not scaler.dynamic and scaler.cur_scale == 1.0):
        return LossScaleSettings(1.0) if engine.fp16_enabled() else None
    if not scaler.dynamic:
        return LossScaleSettings(scaler.cur_scale)
    return LossScaleSettings(
        scaler.cur_scale, scaler.scale_window, scaler.delayed_shift, scaler.min_scale
    )


def _actual_passed_keys(engine: Any) -> tuple[str, ...]:
    """The keys of `passthrough.PASSED` that the parts of an engine which read them have taken."""
    optimizer = engine.optimizer
    gatherer = getattr(getattr(optimizer, "parameter_offload", None), "param_coordinator", None)
    is_on = {
        "zero_quantized_weights": getattr(gatherer, "zero_quantized_weights", False),
        "zero_quantized_gradients": getattr(optimizer, "all2all_process_group", None) is not None,
        "super_offload": type(optimizer).__name__ == SUPER_OFFLOAD_OPTIMIZER,
        "deepcompile": engine.is_deepcompile_active(),
    }
    return tuple(one.key for one in passthrough.PASSED if is_on[one.key.rpartition(".")[2]])


def _read_stage(engine: Any) -> int:
    """The ZeRO stage, by the class of the optimizer that does the work."""
    optimizer = engine.optimizer
    name = type(optimizer).__name__
    if name == "DeepSpeedZeroOptimizer":
        return 2 if optimizer.partition_gradients else 1
    stages = {"BF16_Optimizer": 1, "DeepSpeedZeroOptimizer_Stage3": 3, SUPER_OFFLOAD_OPTIMIZER: 3}
    return stages.get(name, 0)


def master_weights(engine: Any) -> list[Tensor]:
    """This process's tensors that the optimizer updates."""
    if _read_stage(engine) == 3:
        flat: list[Tensor] = engine.optimizer.fp32_partitioned_groups_flat
        return flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def _moments(optimizer: Any) -> list[Tensor]:
    """State tensors of a torch optimizer; none before the first step."""
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and isinstance(value, Tensor)
    ]


def _gradient_sums(engine: Any) -> list[Tensor | None]:
    optimizer = engine.optimizer
    if _read_stage(engine) == 3:
        return [optimizer.grad_partitions_flat_buffer]
    sums = list(getattr(optimizer, "fp32_groups_gradients_flat", ()))
    for partitions in getattr(optimizer, "averaged_gradients", {}).values():
        sums += partitions or []
    for group in getattr(optimizer, "bit16_groups", ()):
        sums += [getattr(p, "grad_accum", None) for p in group]
    sums += [master.grad for master in getattr(optimizer, "single_partition_of_fp32_groups", ())]
    return sums
