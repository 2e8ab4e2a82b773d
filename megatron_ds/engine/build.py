"""Builds the model and its DeepSpeed engine from the configuration."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError
from torch import nn

from megatron_ds.config import Config
from megatron_ds.config.devices import HOST
from megatron_ds.config.fields import in_effect
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.engine import trials
from megatron_ds.engine.deepspeed import nvme_states
from megatron_ds.engine.deepspeed import patches as deepspeed_patches
from megatron_ds.engine.deepspeed.gradient_sums import (
    exchange_slices_by_gloo,
    leave_gradients_in_place,
)
from megatron_ds.engine.deepspeed.lazy_dynamo import import_dynamo_when_compiling
from megatron_ds.engine.deepspeed.stage_messages import StageMessages
from megatron_ds.engine.deepspeed.zero_costs import keep_views, spare_work_on_parameters
from megatron_ds.engine.ds_config.generate import build_ds_config, cpp_ops
from megatron_ds.engine.module import ModuleBuilder
from megatron_ds.engine.optimizers.adam_kernels import available_on
from megatron_ds.engine.optimizers.build import (
    attach_elements,
    attach_matrices,
    client_optimizer,
)
from megatron_ds.engine.optimizers.cautious_decay import decay_cautiously
from megatron_ds.engine.optimizers.param_groups import parameter_groups
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.states.shared_masters import share_masters
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.fileio.swap_folder import SwapFolder
from megatron_ds.launch.cpp_ops import build as build_cpp_ops
from megatron_ds.launch.device import sum_dtype
from megatron_ds.model.declaration.architecture import param_group_problems
from megatron_ds.model.declaration.rates import Multipliers, multiplier_rule
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.layers import BUILT_IN, CustomParts
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh, Mpu
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import declaration


def build_engine(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    *,
    init_weights: bool = True,
    parts: CustomParts = BUILT_IN,
) -> ZeroEngine:
    """Build the model of a configuration, sharded over a mesh, in a DeepSpeed engine. Collective.

    Needs an initialized process group and a configuration whose vocabulary size is known.

    Args:
        config: Complete configuration of the run.
        mesh: Mesh of this process.
        device: Device of this process.
        init_weights: Draw initial weights. If False, a checkpoint must be loaded.
        parts: Replacements of parts of the model.

    Raises:
        UserError: If DeepSpeed rejects values of the user's file, if a C++ op cannot be built, or
            if the engine does not have the configured settings, or the device not their numbers.
    """
    run = config
    decay = {"weight_decay": config.optimizer.weight_decay}
    config = run.in_phase(0).with_values(decay)  # in whatever stage this process starts
    mesh = mesh.of_model(config.parallel.sequence_parallel, config.has_whole_experts)
    has_fp64_router = config.moe.is_used and config.moe.moe_router_dtype == "fp64"
    if has_fp64_router and sum_dtype(device.type) != torch.float64:
        raise user_error("device-without-fp64", device=device.type, host=HOST)
    ds_config = build_ds_config(config, mesh.dp.size, device.type, available_on(device.type))
    _patch_deepspeed()
    _validate_with_deepspeed(ds_config, Mpu(mesh), config.deepspeed.deepspeed_config)
    rng = RngStreams(mesh.tp.rank, device, mesh.sequence.rank)
    attention, missing = trials.attention_options(run, mesh, device)
    build_cpp_ops(cpp_ops(ds_config))
    builder = ModuleBuilder(config, mesh, rng, attention, init_weights, parts)
    with _swap_folder(config, ds_config) as swap_folder:
        module, model = builder.build(ds_config)
        trial = trials.Trial(run, model, mesh, device)
        warnings = [*trials.run_checks(trials.MODEL_CHECKS, trial), *missing]
        engine, multipliers = _initialize(config, mesh, ds_config, module)
    if not _is_deepcompiled(ds_config):
        warnings += trials.run_checks(trials.ENGINE_CHECKS, trial)
    _correct(engine, model, mesh, ds_config, device)
    warnings += _attach_elements(engine, trial)
    built = EngineParts(
        engine,
        model,
        config,
        ds_config,
        multipliers,
        mesh,
        rng,
        device,
        is_compiled=model.has_compiled_layers or _is_deepcompiled(ds_config),
        startup_warnings=tuple(warnings),
        swap_folder=swap_folder,
    )
    return ZeroEngine(built)


def _patch_deepspeed() -> None:
    """Change what DeepSpeed and torch import, before anything is built."""
    import_dynamo_when_compiling()
    deepspeed_patches.import_muon_without_compile()
    deepspeed_patches.silence_memory_reports()
    deepspeed_patches.limit_parameter_prefetch()
    exchange_slices_by_gloo()
    spare_work_on_parameters()


def _is_deepcompiled(ds_config: Mapping[str, Any]) -> bool:
    return bool(ds_config.get("compile", {}).get("deepcompile"))


@contextmanager
def _swap_folder(config: Config, ds_config: dict[str, Any]) -> Iterator[SwapFolder | None]:
    """Lets DeepSpeed swap to an NVMe folder of this run and rank while the engine is built.

    It names its files by the rank: two runs with one folder would mix their states. The
    configuration that is written and saved afterwards has the folder of the settings.
    """
    if not config.deepspeed.uses_nvme:
        yield None
        return
    path = str(config.deepspeed.nvme_path)
    zero = ds_config["zero_optimization"]
    folder = SwapFolder(Path(path))
    blocks = [zero.get(key, {}) for key in ("offload_optimizer", "offload_param")]
    swapped = [block for block in blocks if block.get("device") == "nvme"]
    for block in swapped:
        block["nvme_path"] = str(folder.path)
    yield folder
    for block in swapped:
        block["nvme_path"] = path


def _initialize(
    config: Config, mesh: Mesh, ds_config: dict[str, Any], module: nn.Module
) -> tuple[Any, tuple[Multipliers, ...]]:
    """Build DeepSpeed's engine and optimizer, with the factors of each parameter group."""
    if config.optimizer.param_group:
        names = [declaration(name, weight).name for name, weight in module.named_parameters()]
        everywhere = itertools.chain(*gather_objects(names, mesh.pp))
        raise_if_any(param_group_problems(config, everywhere))
    options = config.optimizer
    groups, multipliers = parameter_groups(
        module,
        options.weight_decay,
        multiplier_rule(options, config.model),
        options.adam_eps if "adam_eps" in options.spec.options else None,
    )
    with deepspeed_patches.expert_groups(mesh), StageMessages(mesh, are_batched=False).active():
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=groups,
            optimizer=client_optimizer(ds_config["optimizer"]),
            config=ds_config,
            mpu=Mpu(mesh) if mesh.pp.size == 1 else None,  # a PipelineModule has its own
            dist_init_required=False,
        )
    if in_effect(config.optimizer).cautious_weight_decay:
        backup = getattr(engine.optimizer, "backup_optimizer", None)  # of a partial offload
        for optimizer in filter(None, (engine.basic_optimizer, backup)):
            decay_cautiously(optimizer)
    return engine, multipliers


def _correct(
    engine: Any, model: GPTModel, mesh: Mesh, ds_config: dict[str, Any], device: torch.device
) -> None:
    """Compile and patch a built engine, and attach the matrices of its optimizer."""
    if _is_deepcompiled(ds_config):
        engine.compile()
        model.compiled = "the model by DeepSpeed's DeepCompile"
    deepspeed_patches.drop_skipped_gradients(engine.optimizer)
    deepspeed_patches.check_every_copy(engine.optimizer, mesh)
    nvme_states.align_gradients(engine.optimizer)
    leave_gradients_in_place(engine.optimizer, engine.module, device)
    share_masters(engine.optimizer)
    keep_views(engine.optimizer)
    attach_matrices(engine, ds_config["zero_optimization"]["stage"], mesh, device)


def _attach_elements(engine: Any, trial: trials.Trial) -> list[Problem]:
    """Give the optimizer that rounds stochastically its elements; why its step is eager."""
    step, problems = trials.compiled_step(trial)
    config = trial.config
    attach_elements(engine, config.zero_stage, trial.mesh, config.runtime.seed, step)
    return problems


def _validate_with_deepspeed(ds_config: dict[str, Any], mpu: object, path: str | None) -> None:
    """Let DeepSpeed parse its configuration before anything is built.

    Args:
        ds_config: Complete DeepSpeed configuration.
        mpu: Model-parallel unit.
        path: The user's file; only its values can have a wrong type.
    """
    try:
        DeepSpeedConfig(copy.deepcopy(ds_config), mpu)
    except ValidationError as error:
        rejected = "".join(
            f"\n  - {'.'.join(map(str, item['loc']))} {item['input']!r}: {item['msg']}"
            for item in error.errors()
        )
        raise user_error("deepspeed-rejects-value", path=path, rejected=rejected) from error
