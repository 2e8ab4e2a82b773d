"""Reads settings back from DeepSpeed's engine and compares them with the configuration.

DeepSpeed ignores, overrides or misreads some settings without an error. `check` reads those that it
can get wrong from the built engine and its optimizer, and not from the dictionary that was passed.
It reads private attributes of the pinned DeepSpeed and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from megatron_ds.config import Config
from megatron_ds.config.problems import user_error
from megatron_ds.engine.ds_config import zero_stage
from megatron_ds.engine.param_groups import Multipliers
from megatron_ds.engine.settings import EngineSettings, LossScaleSettings
from megatron_ds.parallel.mesh import Mesh

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Our names of number formats, and torch's."""


def check(
    config: Config,
    mesh: Mesh,
    engine: Any,
    ds_config: Mapping[str, Any],
    multipliers: tuple[Multipliers, ...],
) -> EngineSettings:
    """Compare the settings of a built engine with the configuration.

    Args:
        config: Complete configuration of the run.
        mesh: Mesh of this process.
        engine: Engine of `deepspeed.initialize`.
        ds_config: DeepSpeed configuration that was passed to it; used for what no flag gives.
        multipliers: Factors of each parameter group.

    Returns:
        The settings in effect.

    Raises:
        UserError: If any setting differs, with a table.
    """
    expected = expected_settings(config, mesh, ds_config, multipliers)
    rows = [("setting", "expected", "actual")]
    for field in dataclasses.fields(EngineSettings):
        want, found = (
            getattr(expected, field.name),
            list(dict.fromkeys(READERS[field.name](engine))),
        )
        if found != [want]:
            rows.append((field.name, str(want), " and ".join(map(str, found)) or "nothing"))
    if len(rows) == 1:
        return expected
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
    raise user_error("engine-settings-mismatch", table=table)


def expected_settings(
    config: Config,
    mesh: Mesh,
    ds_config: Mapping[str, Any],
    multipliers: tuple[Multipliers, ...],
) -> EngineSettings:
    """The settings that a configuration asks for."""
    micro, precision = config.schedule.micro_batch_size, config.precision
    in_fp32 = precision.accumulate_allreduce_grads_in_fp32 or precision.name == "fp32"
    return EngineSettings(
        zero_stage=zero_stage(config),
        dp_size=mesh.dp.size,
        accumulation_steps=config.final_global_batch_size(mesh.dp.size) // (micro * mesh.dp.size),
        optimizer=_expected_optimizer(config, ds_config),
        weight_decay=tuple(
            config.optimizer.weight_decay * factors.weight_decay for factors in multipliers
        ),
        clip_grad=config.optimizer.clip_grad,
        param_dtype=DTYPES[precision.name],
        accumulation_dtype="float32" if in_fp32 else DTYPES[precision.name],
        reduction_dtype=DTYPES[ds_config["communication_data_type"]],
        master_dtype="float32",
        optimizer_offload=_expected_device(ds_config, "offload_optimizer")
        if config.deepspeed.cpu_optimizer
        else "none",
        param_offload=_expected_device(ds_config, "offload_param")
        if config.deepspeed.remote_device != "none"
        else "none",
        loss_scale=_expected_loss_scale(config),
    )


def loaded_ops() -> list[str]:
    """DeepSpeed's C++ ops that this process has loaded."""
    return sorted(OpBuilder._loaded_ops)


def read_stage(engine: Any) -> int:
    """The ZeRO stage, by the class of the optimizer that does the work."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        return 2 if optimizer.partition_gradients else 1
    return {"BF16_Optimizer": 1, "DeepSpeedZeroOptimizer_Stage3": 3}.get(kind, 0)


def master_weights(engine: Any) -> list[torch.Tensor]:
    """This process's tensors that the optimizer updates."""
    if read_stage(engine) == 3:
        flat: list[torch.Tensor] = engine.optimizer.fp32_partitioned_groups_flat
        return flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def moments(optimizer: Any) -> list[torch.Tensor]:
    """State tensors of a torch optimizer; none before the first step."""
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor)
    ]


def _expected_optimizer(config: Config, ds_config: Mapping[str, Any]) -> str:
    if config.optimizer.optimizer == "sgd":
        return "SGD"
    params = ds_config["optimizer"]["params"]
    if params["torch_adam"]:
        return "AdamW (fused)" if params["fused"] else "AdamW"
    return "DeepSpeedCPUAdam" if config.deepspeed.cpu_optimizer else "FusedAdam"


def _expected_device(ds_config: Mapping[str, Any], key: str) -> str:
    # No flag tells "cpu" from "nvme" for the optimizer; the user's file does.
    return str(ds_config["zero_optimization"][key]["device"])


def _expected_loss_scale(config: Config) -> LossScaleSettings | None:
    precision = config.precision
    if not precision.fp16:
        return None
    if precision.loss_scale is not None:
        return LossScaleSettings(precision.loss_scale)
    return LossScaleSettings(
        precision.initial_loss_scale,
        precision.loss_scale_window,
        precision.hysteresis,
        precision.min_loss_scale,
    )


def _dp_sizes(engine: Any) -> Iterator[int]:
    yield engine.dp_world_size  # the divisor of gradients
    group = getattr(engine.optimizer, "dp_process_group", None)
    if group is not None:
        yield group.size()


def _optimizer_name(engine: Any) -> Iterator[str]:
    optimizer = engine.basic_optimizer
    name = type(optimizer).__name__
    if any(group.get("fused") for group in optimizer.param_groups):
        name += " (fused)"
    # DeepSpeed's Adam kernels are Adam with L2 regularization unless they are told otherwise.
    yield name if getattr(optimizer, "adam_w_mode", True) else f"{name} without decoupled decay"


def _weight_decay(engine: Any) -> Iterator[tuple[float, ...]]:
    yield tuple(group["weight_decay"] for group in engine.basic_optimizer.param_groups)


def _clip_grad(engine: Any) -> Iterator[float]:
    # Without ZeRO the engine clips; with it the optimizer does, by its own copy.
    yield engine.gradient_clipping() if read_stage(engine) == 0 else engine.optimizer.clip_grad


def _param_dtypes(engine: Any) -> Iterator[str]:
    for parameter in engine.module.parameters():
        yield _name(parameter.dtype)
        yield _name(parameter.grad_dtype or parameter.dtype)


def _accumulation_dtypes(engine: Any) -> Iterator[str]:
    optimizer, stage = engine.optimizer, read_stage(engine)
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # BF16_Optimizer
        yield from (_name(flat.dtype) for flat in optimizer.fp32_groups_gradients_flat)
    elif stage == 3:
        yield _name(optimizer.grad_partitions_flat_buffer.dtype)
    elif stage == 0:
        yield from (_name(p.grad_dtype or p.dtype) for p in engine.module.parameters())
    else:
        yield _name(optimizer.gradient_accumulation_dtype)


def _reduction_dtypes(engine: Any) -> Iterator[str]:
    # Stage 3 has one bucket for each type in which it reduces.
    buckets = getattr(engine.optimizer, "ipg_buckets", None)
    return map(_name, (engine.communication_data_type,) if buckets is None else buckets)


def _master_dtypes(engine: Any) -> Iterator[str]:
    for tensor in (*master_weights(engine), *moments(engine.basic_optimizer)):
        yield _name(tensor.dtype)


def _optimizer_device(engine: Any) -> Iterator[str]:
    optimizer = engine.optimizer
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(
        optimizer, "offload_optimizer", False
    )
    yield "nvme" if getattr(optimizer, "swap_optimizer", False) else "cpu" if offloaded else "none"


def _param_device(engine: Any) -> Iterator[str]:
    optimizer = engine.optimizer
    if getattr(optimizer, "params_in_nvme_and_cpu", False):
        yield "nvme"
    else:
        yield "cpu" if getattr(optimizer, "offload_param", False) else "none"


def _loss_scale(engine: Any) -> Iterator[LossScaleSettings | None]:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or (not scaler.dynamic and scaler.cur_scale == 1.0):
        yield LossScaleSettings(1.0) if engine.fp16_enabled() else None
    elif not scaler.dynamic:
        yield LossScaleSettings(scaler.cur_scale)
    else:
        yield LossScaleSettings(
            scaler.cur_scale, scaler.scale_window, scaler.delayed_shift, scaler.min_scale
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


READERS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "zero_stage": lambda engine: (read_stage(engine),),
    "dp_size": _dp_sizes,
    "accumulation_steps": lambda engine: (engine.gradient_accumulation_steps(),),
    "optimizer": _optimizer_name,
    "weight_decay": _weight_decay,
    "clip_grad": _clip_grad,
    "param_dtype": _param_dtypes,
    "accumulation_dtype": _accumulation_dtypes,
    "reduction_dtype": _reduction_dtypes,
    "master_dtype": _master_dtypes,
    "optimizer_offload": _optimizer_device,
    "param_offload": _param_device,
    "loss_scale": _loss_scale,
}
"""Field of EngineSettings -> all values that the parts of an engine have for it."""
