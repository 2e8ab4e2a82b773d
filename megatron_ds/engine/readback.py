"""What DeepSpeed's engine really does: read from its own objects, and held against the Config.

The dictionary that was passed is not asked: what counts is what the engine, its optimizers and the
model hold once they are built. `check` stops a run that would train with other values than it was
told; `states` counts the bytes of the tensors that are there. This file reads private attributes of
the pinned DeepSpeed, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from megatron_ds.config import Config
from megatron_ds.engine import memory_estimate
from megatron_ds.engine.ds_config import zero_stage
from megatron_ds.parallel.mesh import Mesh

Values = dict[str, Any]
"""Setting, in words -> plain value."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

ON_DEVICE, ON_HOST = "device", "host"
States = dict[str, dict[str, int]]
"""Place (ON_DEVICE or ON_HOST) -> kind of state -> bytes of this process."""


def check(config: Config, mesh: Mesh, engine: Any, ds_config: Mapping[str, Any]) -> Values:
    """The values in force. Raises ValueError, with a table, if any is not what was told.

    engine: what deepspeed.initialize gave. ds_config: what was passed to it; it is asked only for
    what no flag says.
    """
    told, in_force = expected_settings(config, mesh, ds_config), actual_settings(engine)
    wrong = [name for name in told if told[name] != in_force.get(name)]
    if wrong:
        rows = [("setting", "told", "in force")]
        rows += [(name, str(told[name]), str(in_force.get(name))) for name in wrong]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        table = "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
        raise ValueError(
            f"DeepSpeed does not do what this run was told; nothing was trained.\n{table}\n"
            "No flag mends this: the installed DeepSpeed reads its configuration in another way "
            "than the one that requirements.txt pins, or this program has a fault."
        )
    return in_force


def expected_settings(config: Config, mesh: Mesh, ds_config: Mapping[str, Any]) -> Values:
    """What `read` must find."""
    options, precision, stage = config.optimizer, config.precision, zero_stage(config)
    micro, total = config.schedule.micro_batch_size, config.final_global_batch_size(mesh.dp.size)
    assert micro is not None
    parameters = DTYPES[precision.name]
    in_fp32 = precision.accumulate_allreduce_grads_in_fp32 or precision.name == "fp32"
    accumulation = "float32" if in_fp32 else parameters
    values: Values = {
        "ZeRO stage": stage,
        "data-parallel size": mesh.dp.size,
        "global batch": total,
        "micro batch": micro,
        "accumulation steps": total // (micro * mesh.dp.size),
        **_told_optimizer(config, ds_config),
        "learning rate": options.lr,
        "weight decay, matrices": options.weight_decay,
        "weight decay, biases and norms": 0.0,
        "gradient clipping": options.clip_grad,
        "parameters": parameters,
        "gradients": parameters,
        "gradient accumulation": accumulation,
        "gradient reduction": DTYPES[ds_config["communication_data_type"]],
        "master weights": "float32",
        "optimizer states": "float32",
        "optimizer offload": _told_device(config, ds_config, "offload_optimizer"),
        "parameter offload": _told_device(config, ds_config, "offload_param"),
        "loss scale": _told_loss_scale(config),
        "recomputation": _told_recomputation(config),
        "compiled layers": config.model.layers if config.runtime.compile else 0,
        "document bounds": _bounds(
            config.data.reset_position_ids, config.data.reset_attention_mask
        ),
    }
    return values


def actual_settings(engine: Any) -> Values:
    """What a DeepSpeed engine without a pipeline has in force."""
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    groups = basic.param_groups
    stage = _stage(engine)
    decayed = [group for group in groups if group["decayed"]]
    plain = [group for group in groups if not group["decayed"]]
    values: Values = {
        "ZeRO stage": stage,
        "data-parallel size": _unique_or_joined(_data_parallel_sizes(engine)),
        "global batch": engine.train_batch_size(),
        "micro batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation steps": engine.gradient_accumulation_steps(),
        **_optimizer(basic),
        "learning rate": _unique_or_joined(group["lr"] for group in groups),
        "weight decay, matrices": _unique_or_joined(group["weight_decay"] for group in decayed),
        "weight decay, biases and norms": _unique_or_joined(
            group["weight_decay"] for group in plain
        ),
        # Without ZeRO the engine clips, with it the optimizer does, by its own copy.
        "gradient clipping": engine.gradient_clipping() if stage == 0 else optimizer.clip_grad,
        "parameters": _unique_or_joined(_name(p.dtype) for p in engine.module.parameters()),
        "gradients": _unique_or_joined(
            _name(p.grad_dtype or p.dtype) for p in engine.module.parameters()
        ),
        "gradient accumulation": _unique_or_joined(map(_name, _accumulation_types(engine, stage))),
        "gradient reduction": _unique_or_joined(map(_name, _reduction_types(engine))),
        "master weights": _unique_or_joined(
            _name(weights.dtype) for weights in _master_weights(engine, stage)
        ),
        "optimizer states": _unique_or_joined(map(_name, _moment_types(engine, stage))),
        "optimizer offload": _optimizer_device(optimizer),
        "parameter offload": _parameter_device(optimizer),
        "loss scale": _loss_scale(engine),
        "recomputation": _recomputation(engine.module),
        "compiled layers": sum(
            layer._compiled_call_impl is not None for layer in engine.module.layers
        ),
        "document bounds": _document_bounds(engine.module),
    }
    return values


def state_bytes(engine: Any) -> States:
    """Bytes of this process's tensors that outlive a step, by place and kind.

    Buckets of reductions are not among them: they come and go. Each storage counts once, for the
    first kind that claims it.
    """
    optimizer, stage = engine.optimizer, _stage(engine)
    parameters = list(engine.module.parameters())
    kinds: list[tuple[str, Iterable[torch.Tensor | None]]] = [
        ("parameters", [getattr(p, "ds_tensor", p.data) for p in parameters]),
        ("gathered parameters", [p.data for p in parameters]),
        ("accumulated gradients", _accumulators(optimizer, stage)),
        ("gradients", [p.grad for p in parameters]),
        ("master weights", _master_weights(engine, stage)),
        ("moments", _moments(engine.basic_optimizer)),
    ]
    result: States = {ON_DEVICE: {}, ON_HOST: {}}
    seen: set[tuple[str, int]] = set()
    home = engine.device.type if isinstance(engine.device, torch.device) else str(engine.device)
    for kind, tensors in kinds:
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            key = str(storage.device), storage.data_ptr()
            if storage.nbytes() == 0 or key in seen:
                continue
            seen.add(key)
            place = ON_DEVICE if storage.device.type == home.split(":")[0] else ON_HOST
            result[place][kind] = result[place].get(kind, 0) + storage.nbytes()
    return result


def memory_inputs(
    values: Values, tp_size: int, zero: Mapping[str, Any], device: str
) -> memory_estimate.MemoryInputs:
    """What the memory estimate asks of an engine.

    values: in force. zero: zero_optimization of the DeepSpeed configuration. device: its kind.
    """
    sizes = {name: getattr(torch, name).itemsize for name in DTYPES.values()}
    moments = 2 if "betas" in values else int(values["momentum"] != 0.0)
    return memory_estimate.MemoryInputs(
        stage=values["ZeRO stage"],
        tp=tp_size,
        dp=values["data-parallel size"],
        parameter=sizes[values["parameters"]],
        accumulation=sizes[values["gradient accumulation"]],
        reduction=sizes[values["gradient reduction"]],
        moments=moments,
        bucket=int(zero["reduce_bucket_size"]),
        buckets=2 if zero.get("overlap_comm") or values["ZeRO stage"] == 3 else 1,
        offload_optimizer=values["optimizer offload"] != "none",
        offload_parameters=values["parameter offload"] != "none",
        on_cpu=device == "cpu",
    )


def cpp_ops() -> list[str]:
    """DeepSpeed's C++ ops that this process has loaded."""
    return sorted(OpBuilder._loaded_ops)


def _told_optimizer(config: Config, ds_config: Mapping[str, Any]) -> Values:
    options, params = config.optimizer, ds_config["optimizer"]["params"]
    if options.optimizer == "sgd":
        return {"optimizer": "SGD", "momentum": options.sgd_momentum}
    if params["torch_adam"]:
        kernel = "AdamW (fused)" if params["fused"] else "AdamW"
    else:
        kernel = "DeepSpeedCPUAdam" if config.deepspeed.cpu_optimizer else "FusedAdam"
    return {
        "optimizer": kernel,
        "decoupled weight decay": True,
        "betas": (options.adam_beta1, options.adam_beta2),
        "epsilon": options.adam_eps,
    }


def _told_device(config: Config, ds_config: Mapping[str, Any], key: str) -> str:
    """The kind of device that keeps what is offloaded; which file of nvme, no flag says."""
    chosen = (
        config.deepspeed.cpu_optimizer
        if key == "offload_optimizer"
        else config.deepspeed.remote_device != "none"
    )
    return str(ds_config["zero_optimization"][key]["device"]) if chosen else "none"


def _told_loss_scale(config: Config) -> str:
    precision = config.precision
    if not precision.fp16:
        return "none"
    if precision.loss_scale is not None:
        return f"static {precision.loss_scale:g}"
    return _dynamic(
        precision.initial_loss_scale,
        precision.loss_scale_window,
        precision.hysteresis,
        precision.min_loss_scale,
    )


def _dynamic(first: float, window: int, hysteresis: int, lowest: float) -> str:
    return f"dynamic from {first:g}, window {window}, hysteresis {hysteresis}, at least {lowest:g}"


def _told_recomputation(config: Config) -> str:
    recompute = config.recompute
    if recompute.granularity != "full":
        return recompute.granularity or "none"
    units = -(-config.model.layers // recompute.checkpoint_num_layers)
    if not recompute.by_deepspeed:
        return _full(recompute.checkpoint_num_layers)
    return _full(
        recompute.checkpoint_num_layers,
        by=f"DeepSpeed, {units} units",
        partitioned=recompute.partition_activations,
        on_host=recompute.checkpoint_in_cpu,
        contiguous=recompute.contigious_checkpointing,
        synchronised=recompute.synchronize_each_layer,
        timed=recompute.profile_backward,
    )


def _full(layers: int, by: str = "torch", **switches: bool) -> str:
    said = "".join(f", {name.replace('_', ' ')}" for name, on in switches.items() if on)
    return f"full, every {layers} layers, by {by}{said}"


def _stage(engine: Any) -> int:
    """By the kind of optimizer, which does the work."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        return 2 if optimizer.partition_gradients else 1
    return {"BF16_Optimizer": 1, "DeepSpeedZeroOptimizer_Stage3": 3}.get(kind, 0)


def _data_parallel_sizes(engine: Any) -> Iterator[int]:
    """The engine's number, by which it scales, and that of the group in which it reduces."""
    yield engine.dp_world_size
    group = getattr(engine.optimizer, "dp_process_group", None)
    if group is not None:
        yield group.size()


def _optimizer(basic: Any) -> Values:
    groups = basic.param_groups
    name = type(basic).__name__
    if "betas" not in groups[0]:
        return {
            "optimizer": name,
            "momentum": _unique_or_joined(group["momentum"] for group in groups),
        }
    if any(group.get("fused") for group in groups):
        name = f"{name} (fused)"
    return {
        "optimizer": name,
        "decoupled weight decay": bool(
            getattr(basic, "adam_w_mode", isinstance(basic, torch.optim.AdamW))
        ),
        "betas": _unique_or_joined(tuple(group["betas"]) for group in groups),
        "epsilon": _unique_or_joined(group["eps"] for group in groups),
    }


def _accumulation_types(engine: Any, stage: int) -> Iterable[torch.dtype]:
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # BF16_Optimizer
        return (flat.dtype for flat in optimizer.fp32_groups_gradients_flat)
    if stage == 3:
        return (optimizer.grad_partitions_flat_buffer.dtype,)
    if stage == 0:
        return (p.grad_dtype or p.dtype for p in engine.module.parameters())
    return (optimizer.gradient_accumulation_dtype,)


def _reduction_types(engine: Any) -> Iterable[torch.dtype]:
    buckets = getattr(engine.optimizer, "ipg_buckets", None)
    return (engine.communication_data_type,) if buckets is None else buckets


def _accumulators(optimizer: Any, stage: int) -> Iterable[torch.Tensor | None]:
    if stage == 3:
        return (optimizer.grad_partitions_flat_buffer,)
    found = list(getattr(optimizer, "fp32_groups_gradients_flat", ()))
    for partitions in getattr(optimizer, "averaged_gradients", {}).values():
        found += partitions or []
    for group in getattr(optimizer, "bit16_groups", ()):
        found += [getattr(p, "grad_accum", None) for p in group]
    found += [master.grad for master in getattr(optimizer, "single_partition_of_fp32_groups", ())]
    return found


def _master_weights(engine: Any, stage: int) -> list[torch.Tensor]:
    if stage == 3:
        flat: list[torch.Tensor] = engine.optimizer.fp32_partitioned_groups_flat
        return flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def _moments(basic: Any) -> list[torch.Tensor]:
    return [
        value
        for state in basic.state.values()
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor)
    ]


def _moment_types(engine: Any, stage: int) -> Iterable[torch.dtype]:
    """Those of the moments or, before the first step, those that they will get."""
    basic = engine.basic_optimizer
    present = [moment.dtype for moment in _moments(basic)]
    if present:
        return present
    if getattr(basic, "fp32_optimizer_states", False):  # DeepSpeedCPUAdam
        return (torch.float32,)
    return (weights.dtype for weights in _master_weights(engine, stage))


def _optimizer_device(optimizer: Any) -> str:
    if getattr(optimizer, "swap_optimizer", False):
        return "nvme"
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(
        optimizer, "offload_optimizer", False
    )
    return "cpu" if offloaded else "none"


def _parameter_device(optimizer: Any) -> str:
    if getattr(optimizer, "params_in_nvme_and_cpu", False):
        return "nvme"
    return "cpu" if getattr(optimizer, "offload_param", False) else "none"


def _loss_scale(engine: Any) -> str:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or (not scaler.dynamic and scaler.cur_scale == 1.0):
        return "static 1" if engine.fp16_enabled() else "none"
    if not scaler.dynamic:
        return f"static {scaler.cur_scale:g}"
    return _dynamic(scaler.cur_scale, scaler.scale_window, scaler.delayed_shift, scaler.min_scale)


def _document_bounds(model: nn.Module) -> str:
    rules: Any = model.documents
    return _bounds(*((rules.reset_positions, rules.reset_attention) if rules else (False, False)))


def _bounds(reset_positions: bool, reset_attention: bool) -> str:
    """What happens where one document of a sample ends and the next begins, in words."""
    positions = "positions restart" if reset_positions else "positions run on"
    return f"{positions}, attention {'ends' if reset_attention else 'looks back'}"


def _recomputation(model: nn.Module) -> str:
    """What the model's parts hold and, where DeepSpeed recomputes, what its module was told."""
    recompute: Any = model.recompute
    if recompute is None:
        cores = _unique_or_joined(layer.attention.recompute is not None for layer in model.layers)  # type: ignore[union-attr]
        return {True: "selective", False: "none"}.get(cores, f"selective in some layers: {cores}")
    if not recompute.by_deepspeed:
        return _full(recompute.layers_per_chunk)
    return _full(
        recompute.layers_per_chunk,
        by=f"DeepSpeed, {checkpointing.num_layers} units",
        partitioned=checkpointing.PARTITION_ACTIVATIONS,
        on_host=checkpointing.CPU_CHECKPOINT,
        contiguous=checkpointing.CONTIGUOUS_CHECKPOINTING,
        synchronised=checkpointing.SYNCHRONIZE,
        timed=checkpointing.PROFILE_TIME,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unique_or_joined(values: Iterable[Any]) -> Any:
    """The value that all have; otherwise all of them, in words, which equals no value."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else " and ".join(map(str, distinct)) or "nothing"
