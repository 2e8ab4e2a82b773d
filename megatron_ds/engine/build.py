"""Builds the model and its DeepSpeed engine from the configuration."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError
from torch import Tensor

from megatron_ds.config import Config, RecomputeConfig
from megatron_ds.config.devices import is_host
from megatron_ds.config.fields import in_effect
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.data.gpt_dataset import END_MARK
from megatron_ds.engine import readback
from megatron_ds.engine.deepspeed import nvme_states
from megatron_ds.engine.deepspeed import patches as deepspeed_patches
from megatron_ds.engine.deepspeed.stage_messages import StageMessages
from megatron_ds.engine.ds_config.generate import build_ds_config, cpp_ops
from megatron_ds.engine.optimizers.adam_kernels import available_on
from megatron_ds.engine.optimizers.build import attach_matrices, client_optimizer
from megatron_ds.engine.optimizers.cautious_decay import decay_cautiously
from megatron_ds.engine.optimizers.param_groups import (
    Multipliers,
    multiplier_rule,
    parameter_groups,
)
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.pipeline_module import PipelineStage, build_stage
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.fileio.swap_folder import SwapFolder
from megatron_ds.launch.cpp_ops import build as build_cpp_ops
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.attention.cores import order_of
from megatron_ds.model.attention.packed import AttentionBackend, PackingOptions
from megatron_ds.model.attention.rule import AttentionRule, attention_rules
from megatron_ds.model.attention.trial import select_kernel
from megatron_ds.model.experts.grouped import try_grouped_products
from megatron_ds.model.gpt import ALL_LAYERS, GPTModel
from megatron_ds.model.kernels.compiled_layers import try_layers
from megatron_ds.model.kernels.elementwise import compile_elementwise
from megatron_ds.model.layers import BUILT_IN, CustomParts
from megatron_ds.model.mlp import TiledMLP
from megatron_ds.model.spec.architecture import param_group_problems
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing, Function
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.half_products import replace_slow_products
from megatron_ds.parallel.mesh import Mesh, Mpu
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import declaration


def build_engine(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    eod: int | None = None,
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
        eod: Id of the end-of-document token, for --reset-position-ids and --reset-attention-mask.
        init_weights: Draw initial weights. If False, a checkpoint must be loaded.
        parts: What replaces parts of the model.

    Raises:
        UserError: If DeepSpeed rejects values of the user's file, if a C++ op cannot be built, if
            the tokenizer lacks an end-of-document token that is needed, or if the engine does not
            have the configured settings.
    """
    run, decay = config, {"weight_decay": config.optimizer.weight_decay}
    config = run.in_stage(0).with_values(decay)  # in whatever stage this process starts
    mesh = mesh.of_model(config.parallel.sequence_parallel, config.has_whole_experts)
    ds_config = build_ds_config(config, mesh.dp.size, device.type, available_on(device.type))
    # What DeepSpeed and torch import is changed before anything is built.
    deepspeed_patches.import_muon_without_compile()
    deepspeed_patches.silence_memory_reports()
    deepspeed_patches.limit_parameter_prefetch()
    _validate_with_deepspeed(ds_config, Mpu(mesh), config.deepspeed.deepspeed_config)
    rng = RngStreams(mesh.tp.rank, device, mesh.sp.rank)
    attention, missing = _attention_options(run, mesh, device, _packing_options(config, eod))
    build_cpp_ops(cpp_ops(ds_config))
    build = partial(_build_model, config, mesh, rng, attention, init_weights, parts)
    with _swap_folder(config, ds_config) as swap_folder:
        module, model = _build_module(config, mesh, ds_config, build)
        warnings = [*_notes(config, model, device), *missing]
        engine, multipliers = _initialize(config, mesh, ds_config, module)
    if not _is_deepcompiled(ds_config):
        warnings.append(_compile(model, run, mesh, device))
    _correct(engine, model, mesh, ds_config, device)
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
        startup_warnings=tuple(one for one in warnings if one is not None),
        swap_folder=swap_folder,
    )
    return ZeroEngine(built)


def _dtype(config: Config) -> torch.dtype:
    """Type of the model's parameters."""
    dtype: torch.dtype = getattr(torch, readback.DTYPES[config.precision.name])
    return dtype


def _is_deepcompiled(ds_config: Mapping[str, Any]) -> bool:
    return bool(ds_config.get("compile", {}).get("deepcompile"))


@contextmanager
def _swap_folder(config: Config, ds_config: dict[str, Any]) -> Iterator[SwapFolder | None]:
    """With NVMe, let DeepSpeed swap to a folder of this run and rank, while it is built.

    It names its files by the rank: two runs with one folder would mix their states. The
    configuration that is written and saved afterwards has the folder of the settings.
    """
    if not config.deepspeed.uses_nvme:
        yield None
        return
    path = str(config.deepspeed.nvme_path)
    zero, folder = ds_config["zero_optimization"], SwapFolder(Path(path))
    blocks = [zero.get(key, {}) for key in ("offload_optimizer", "offload_param")]
    swapped = [block for block in blocks if block.get("device") == "nvme"]
    for block in swapped:
        block["nvme_path"] = str(folder.path)
    yield folder
    for block in swapped:
        block["nvme_path"] = path


def _build_module(
    config: Config,
    mesh: Mesh,
    ds_config: dict[str, Any],
    build: Callable[[Sequence[slice]], GPTModel],
) -> tuple[GPTModel | PipelineStage, GPTModel]:
    """Build what DeepSpeed trains, a model or a pipeline stage, and the model in it."""
    module: GPTModel | PipelineStage
    with _zero3_init_context(ds_config, mesh):
        if mesh.pp.size > 1:
            module = build_stage(build, config, mesh)
            model = module.gpt
        else:
            module = model = build(ALL_LAYERS)
    if config.recompute.tiled_mlp and ds_config["zero_optimization"]["stage"] == 3:
        # The parameters of an MLP are gathered once for all of its tiles.
        deepspeed.utils.set_z3_leaf_modules(model, [TiledMLP], raise_if_not_found=False)
    return module, model


def _initialize(
    config: Config, mesh: Mesh, ds_config: dict[str, Any], module: GPTModel | PipelineStage
) -> tuple[Any, tuple[Multipliers, ...]]:
    """Build DeepSpeed's engine and optimizer, with the factors of each parameter group."""
    if config.optimizer.param_group:
        names = [declaration(name, weight).name for name, weight in module.named_parameters()]
        everywhere = itertools.chain(*gather_objects(names, mesh.pp))
        raise_if_any(param_group_problems(config, everywhere))
    groups, multipliers = parameter_groups(
        module, config.optimizer.weight_decay, multiplier_rule(config.optimizer)
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
    attach_matrices(engine, ds_config["zero_optimization"]["stage"], mesh, device)


def _build_model(
    config: Config,
    mesh: Mesh,
    rng: RngStreams,
    attention: AttentionOptions,
    init_weights: bool,
    parts: CustomParts,
    stages: Sequence[slice],
) -> GPTModel:
    checkpoint = None
    if config.recompute.is_by_deepspeed:
        num_layers = config.model.num_layers
        checkpoint = configure_checkpointing(config.recompute, num_layers, Mpu(mesh), rng)
    return GPTModel(
        config.model,
        mesh=mesh,
        rng=rng,
        seed=config.runtime.seed if init_weights else None,
        checkpointing=ActivationCheckpointing(config.recompute, rng, checkpoint),
        attention=attention,
        moe=config.moe,
        stages=stages,
        parts=parts,
    )


def _compile(model: GPTModel, config: Config, mesh: Mesh, device: torch.device) -> Problem | None:
    """Compile the layers, or on an accelerator at least their elementwise parts. Collective.

    Returns:
        Why nothing, or less than by default, is compiled on any rank.
    """
    lengths_vary, config = config.lengths_vary, config.in_stage(0)
    if config.runtime.compile:
        model.compile_layers(lengths_vary=lengths_vary)
    if config.runtime.compile or config.runtime.no_compile:
        return None
    if not get_accelerator().is_triton_supported():
        return None
    micro_batch, refusal = config.schedule.micro_batch_size, None
    reason = _reason_for_eager_layers(config, mesh)
    if not reason:
        failure = try_layers(model, micro_batch, lengths_vary=lengths_vary)
        local = None if failure is None else Problem("layers-not-compiled", reason=failure)
        refusal = _first_of_all_ranks(local, mesh)
        if refusal is None:
            return None
        model.use_eager()
        reason = "their trial failed"
    functions, problem = compile_elementwise(
        dataclasses.replace(config.model, seq_length=config.model.seq_length // mesh.sp.size),
        micro_batch,
        mesh.tp,
        _dtype(config),
        device,
    )
    # Compiled dropout draws other masks, which all tensor-parallel ranks must share.
    if (problem := _first_of_all_ranks(problem, mesh)) is not None:
        return problem
    model.use_elementwise(functions, reason)
    return refusal


def _reason_for_eager_layers(config: Config, mesh: Mesh) -> str:
    """Returns the reason that layers are not compiled by default; empty if they are."""
    reasons = {
        "experts": config.moe.is_used,
        "measured attention logits": config.measures_logits,
        "ZeRO stage 3": config.zero_stage == 3,
        "tensor parallelism": mesh.tp.size > 1,
        "DeepSpeed-Ulysses": mesh.sp.size > 1,
        "MLP in tiles": config.recompute.tiled_mlp,
        "activation checkpointing by DeepSpeed": config.recompute.is_by_deepspeed,
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _first_of_all_ranks(problem: Problem | None, mesh: Mesh) -> Problem | None:
    problems = [problem] * mesh.world_size
    if mesh.world_size > 1:
        dist.all_gather_object(problems, problem)
    return next((entry for entry in problems if entry is not None), None)


def _notes(config: Config, model: GPTModel, device: torch.device) -> tuple[Problem | None, ...]:
    """Replace kernels that are slow or missing on this device, and report what is computed
    twice."""
    return (
        replace_slow_products(_dtype(config), device),
        try_grouped_products(model, _dtype(config), device),
        selective_recompute_note(config, model.attention, device),
    )


def selective_recompute_note(
    config: Config, attention: AttentionOptions, device: torch.device
) -> Problem | None:
    """Warn if selective recomputation computes attention twice and saves next to nothing."""
    if config.recompute.recompute_granularity != "selective":
        return None
    is_per_document = config.data.reset_attention_mask and not attention.kernels
    stores_scores = is_host(device.type) and config.model.attention_dropout > 0
    if is_per_document or stores_scores:
        return None
    return Problem("selective-recompute-of-fused-attention")


def configure_checkpointing(
    config: RecomputeConfig, layers: int, mpu: Mpu, rng: RngStreams
) -> Function:
    """Configure DeepSpeed's activation checkpointing, whose settings are global to the process.

    Inputs are partitioned, on the host, or in contiguous buffers. Our sharded random stream, which
    DeepSpeed does not know, is restored here.

    Args:
        config: What is recomputed, and where inputs are kept.
        layers: Layers of the model.
        mpu: Names the group over which inputs are partitioned.
        rng: Random streams that a recomputation restores.

    Returns:
        The implementation for `ActivationCheckpointing`.
    """
    config = in_effect(config)
    deepspeed.checkpointing.configure(
        mpu,
        partition_activations=config.partition_activations,
        contiguous_checkpointing=config.contiguous_checkpointing,
        num_checkpoints=-(-layers // config.checkpoint_num_layers),
        checkpoint_in_cpu=config.checkpoint_in_cpu,
        synchronize=config.synchronize_each_layer,
        profile=config.profile_backward,
    )

    def checkpoint(function: Function, *inputs: Tensor) -> Tensor:
        before = rng.sharded_state
        recomputing = False

        def run(*values: Tensor) -> Tensor:
            nonlocal recomputing
            if recomputing:
                with rng.restore_tp_rng(before):
                    return function(*values)
            recomputing = True
            return function(*values)

        output: Tensor = deepspeed.checkpointing.checkpoint(run, *inputs)
        return output

    return checkpoint


def _packing_options(config: Config, eod: int | None) -> PackingOptions | None:
    """Returns the treatment of document boundaries; None if they are ignored."""
    data = config.data
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    if eod is None:
        raise user_error("tokenizer-without-eod")
    end = END_MARK if data.marks_ends else eod
    resets = data.reset_position_ids, data.reset_attention_mask
    return PackingOptions(end, *resets, has_marks=data.marks_ends)


def _attention_options(
    config: Config, mesh: Mesh, device: torch.device, packing: PackingOptions | None = None
) -> tuple[AttentionOptions, list[Problem]]:
    """Returns the attention backends, and why a kernel is missing."""
    choice = config.runtime.attention_backend
    kernels: dict[AttentionRule, AttentionBackend] = {}
    warnings = []
    rules = {rule: stage for stage in config.stage_configs for rule in attention_rules(stage.model)}
    for rule, stage in () if is_host(device.type) else rules.items():
        kernel, warning = select_kernel(
            rule,
            stage.model,
            stage.schedule.micro_batch_size,
            mesh.sp_tp.size,  # shares the heads, inside attention
            _dtype(config),
            device,
            choice,
            has_documents=config.data.reset_attention_mask,
        )
        kernels |= {} if kernel is None else {rule: kernel}
        warnings += [] if warning is None else [warning]
    samples = order_of(choice, sizes_vary=config.lengths_vary)
    documents = order_of(choice, sizes_vary=True)
    return AttentionOptions(samples, documents, kernels, packing), warnings


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


def _zero3_init_context(ds_config: dict[str, Any], mesh: Mesh) -> Any:
    """Context in which ZeRO-3 partitions each parameter when it is created.

    No rank then holds the complete model. The group must be passed: by default DeepSpeed partitions
    over all ranks, which mixes the shards of different tensor-parallel ranks without an error.
    """
    if ds_config["zero_optimization"]["stage"] != 3:
        return nullcontext()
    # The dtype comes from ds_config: DeepSpeed replaces one passed here by bf16 on a device
    # without fp16.
    size = ds_config["zero_optimization"]["zero_hpz_partition_size"]
    return deepspeed.zero.Init(
        config_dict_or_path=ds_config,
        mpu=Mpu(mesh),
        data_parallel_group=mesh.dp_sp.handle,
        zero_param_parallel_group=deepspeed_patches.set_hpz_group(mesh.dp_sp, size),
    )
