"""Tries faster kernels and compiled code on the device before training; reports what is missing.

A check of `MODEL_CHECKS` or `ENGINE_CHECKS` tries one kind of kernel, uses it if it works on all
ranks, and yields the problem otherwise. Kernels of attention are selected before the model is
built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import z3_leaf_module
from torch import nn

from megatron_ds.config import Config
from megatron_ds.config.devices import is_host
from megatron_ds.config.fields import in_effect
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.generate import compiles_efficient_linear
from megatron_ds.engine.optimizers.stochasticadamw import Update, compile_update
from megatron_ds.engine.readback import DTYPES
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.attention.cores import order_of
from megatron_ds.model.attention.packed import AttentionBackend, PackingOptions
from megatron_ds.model.attention.rule import AttentionRule, attention_rules
from megatron_ds.model.attention.trial import select_kernel
from megatron_ds.model.experts.grouped import try_grouped_matmuls
from megatron_ds.model.fp8_compilation import compile_rounding
from megatron_ds.model.fp8_layers import gradient_format, recipe_of, trace_products
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.kernels.compilation import compile_layers, use_eager, use_elementwise
from megatron_ds.model.kernels.compiled_layers import try_layers, whole
from megatron_ds.model.kernels.elementwise import Elementwise, compile_elementwise
from megatron_ds.model.kernels.half_products import replace_slow_products
from megatron_ds.parallel.fp8.grouped import has_grouped_kernel
from megatron_ds.parallel.fp8.rounding import has_kernel, scalings_of
from megatron_ds.parallel.mesh import Mesh


@dataclass(frozen=True)
class Trial:
    """Layers of this rank that the checks try, with the configuration of the run."""

    run: Config
    """Configuration of the run, with all phases."""
    model: GPTModel
    mesh: Mesh
    device: torch.device

    @property
    def config(self) -> Config:
        """Configuration of the first phase, whose shapes are tried."""
        return self.run.in_phase(0)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's parameters."""
        return _dtype(self.run)


Check = Callable[[Trial], Iterator[Problem]]
"""Tries kernels of one kind, and yields why they are not used."""


def run_checks(checks: Iterable[Check], trial: Trial) -> Iterator[Problem]:
    """Run checks in order. Collective.

    Yields:
        The problems of each check, which are warnings: the run is slower than it could be.
    """
    for check in checks:
        yield from check(trial)


def half_precision_matmuls(trial: Trial) -> Iterator[Problem]:
    """Replace matmuls in half precision that are slow on a CPU."""
    if (problem := replace_slow_products(trial.dtype, trial.device)) is not None:
        yield problem


def grouped_matmuls(trial: Trial) -> Iterator[Problem]:
    """Try grouped matmuls of the experts."""
    if (problem := try_grouped_matmuls(trial.model, trial.dtype, trial.device)) is not None:
        yield problem


def fp8_products(trial: Trial) -> Iterator[Problem]:
    """Warn if the device has no kernel that multiplies in fp8; otherwise compile the casts."""
    precision = trial.config.precision
    if precision.fp8_format is None:
        return
    by_row = precision.fp8_recipe == "rowwise"
    scalings = scalings_of(by_row=by_row, block=precision.fp8_block)
    has_kernels = trial.dtype is torch.bfloat16 and all(
        has_kernel(trial.device, scaling) for scaling in scalings
    )
    gradients = gradient_format(precision)
    lacks_groups = trial.config.moe.is_used and not has_grouped_kernel(trial.device, gradients)
    if not has_kernels or lacks_groups:
        yield Problem("fp8-without-kernel", device=trial.device.type)
        return
    recipe = recipe_of(trial.model)
    if trial.config.runtime.no_compile or not get_accelerator().is_triton_supported():
        return
    if recipe is not None:  # None on a pipeline stage whose layers are in bf16
        failure = compile_rounding(
            recipe,
            trial.device,
            trial.mesh,
            lengths_vary=trial.run.lengths_vary,
            keeps_weights=trial.config.zero_stage < 3,
            has_experts=trial.config.moe.is_used,
        )
        yield from () if failure is None else (failure,)


def selective_recompute(trial: Trial) -> Iterator[Problem]:
    """Warn if selective recomputation computes attention twice and saves next to nothing."""
    config = trial.config
    if config.recompute.recompute_granularity != "selective":
        return
    is_per_document = config.data.reset_attention_mask and not trial.model.attention.kernels
    stores_scores = is_host(trial.device.type) and config.model.attention_dropout > 0
    if not (is_per_document or stores_scores):
        yield Problem("selective-recompute-of-fused-attention")


def compiled_layers(trial: Trial) -> Iterator[Problem]:
    """Compile the layers, or on an accelerator at least their elementwise parts. Collective.

    Yields:
        Why nothing, or less than by default, is compiled on any rank.
    """
    model = trial.model
    config = trial.config
    lengths_vary = trial.run.lengths_vary
    if config.runtime.compile:
        compile_layers(model, lengths_vary=lengths_vary)
        if config.zero_stage < 3:
            trace_products(model)
    if config.runtime.compile or config.runtime.no_compile:
        return
    if not get_accelerator().is_triton_supported():
        return
    reason = _reason_for_eager_layers(config)
    if config.zero_stage == 3 and not all(map(z3_leaf_module, model.blocks())):
        reason = reason or "ZeRO stage 3"
    if reason:
        yield from _compile_elementwise(trial, reason)
        return
    if trial.mesh.tp.size > 1:
        # A rank whose compiler fails in a layer would leave the others waiting in its collectives.
        problem = _elementwise_functions(trial)[1]
        if problem is not None:
            yield problem
            return
    gathered = _gathered if config.zero_stage == 3 else whole
    micro_batch = config.schedule.micro_batch_size
    failure = try_layers(model, micro_batch, lengths_vary=lengths_vary, gathered=gathered)
    local = None if failure is None else Problem("layers-not-compiled", reason=failure)
    refusal = _first_of_all_ranks(local, trial.mesh)
    if refusal is None:
        return
    use_eager(model)
    problems = list(_compile_elementwise(trial, "their trial failed"))
    yield from problems or [refusal]


MODEL_CHECKS: tuple[Check, ...] = (
    half_precision_matmuls,
    grouped_matmuls,
    fp8_products,
    selective_recompute,
)
"""Checks of a model that DeepSpeed has not wrapped yet."""
ENGINE_CHECKS: tuple[Check, ...] = (compiled_layers,)
"""Checks of the model of a built engine, unless DeepSpeed compiles it."""


def attention_options(
    config: Config, mesh: Mesh, device: torch.device
) -> tuple[AttentionOptions, list[Problem]]:
    """Select the attention backends by trials.

    Args:
        config: Configuration of the run, with all phases.
        mesh: Mesh of this process.
        device: Device of this process.

    Returns:
        The backends, and why kernels are missing.
    """
    choice = config.runtime.attention_backend
    kernels: dict[AttentionRule, AttentionBackend] = {}
    warnings = []
    rules = {rule: phase for phase in config.phase_configs for rule in attention_rules(phase.model)}
    for rule, phase in () if is_host(device.type) else rules.items():
        kernel, warning = select_kernel(
            rule,
            phase.model,
            phase.schedule.micro_batch_size,
            config.parallel.head_ranks,
            _dtype(config),
            device,
            choice,
            has_documents=config.data.reset_attention_mask,
        )
        kernels |= {} if kernel is None else {rule: kernel}
        warnings += [] if warning is None else [warning]
    samples = order_of(choice, sizes_vary=config.lengths_vary)
    documents = order_of(choice, sizes_vary=True)
    packing = _packing_options(config)
    kinds = config.parallel.cp_comm_type
    return AttentionOptions(samples, documents, kernels, packing, kinds), warnings


def compiled_step(trial: Trial) -> tuple[Update | None, list[Problem]]:
    """Compile the step of weights that are rounded stochastically. Collective.

    Returns:
        The step, None if it is eager or another one; and why it is eager on any rank.
    """
    runtime = trial.run.runtime
    is_compiled = runtime.compile or get_accelerator().is_triton_supported()
    is_stochastic = in_effect(trial.run.optimizer).bf16_stochastic_round
    if runtime.no_compile or not (is_compiled and is_stochastic):
        return None, []
    step, local = compile_update(trial.device)
    problem = _first_of_all_ranks(local, trial.mesh)
    return (step, []) if problem is None else (None, [problem])


def _packing_options(config: Config) -> PackingOptions | None:
    """Returns the treatment of document boundaries; None if they are ignored."""
    data = config.data
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    return PackingOptions(data.reset_position_ids, data.reset_attention_mask)


def gathers_layers(config: Config, ds_config: Mapping[str, Any]) -> bool:
    """Whether ZeRO-3 gathers all parameters of a layer at once, before it and before its gradients.

    The hooks that gather them are then outside of the graphs of a compiled layer. Parameters on
    disks are swapped through a few buffers, too few for a layer. A graph saves views of the weights
    that torch multiplies by, with which what has been gathered would be kept: DeepSpeed's products
    save the parameters, and torch must compile them.

    Args:
        config: Configuration of the first phase.
        ds_config: DeepSpeed configuration.
    """
    runtime = config.runtime
    zero = ds_config["zero_optimization"]
    if zero["stage"] != 3 or zero.get("offload_param", {}).get("device") == "nvme":
        return False
    if not (zero.get("memory_efficient_linear", True) and compiles_efficient_linear()):
        return False
    if runtime.compile:
        return True
    if runtime.no_compile or ds_config.get("compile", {}).get("deepcompile"):
        return False
    return bool(get_accelerator().is_triton_supported()) and not _reason_for_eager_layers(config)


def _gathered(block: nn.Module) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = GatheredParameters(list(block.parameters()))
    return context


def _compile_elementwise(trial: Trial, reason: str) -> Iterator[Problem]:
    """Compile the elementwise parts of layers that are eager. Collective.

    Args:
        trial: The layers.
        reason: Why they are eager.

    Yields:
        Why the parts are not compiled on any rank.
    """
    functions, problem = _elementwise_functions(trial)
    if problem is None:
        use_elementwise(trial.model, functions, reason)
    else:
        yield problem


def _elementwise_functions(trial: Trial) -> tuple[Elementwise, Problem | None]:
    """Try compiled elementwise parts. Collective.

    Returns:
        The functions, and why they must not be used on any rank.
    """
    config = trial.config
    length = config.model.seq_length // trial.mesh.sequence.size
    functions, local = compile_elementwise(
        dataclasses.replace(config.model, seq_length=length),
        config.schedule.micro_batch_size,
        trial.mesh.tp,
        trial.dtype,
        trial.device,
    )
    # Compiled dropout draws other masks, which all tensor-parallel ranks must share.
    return functions, _first_of_all_ranks(local, trial.mesh)


def _reason_for_eager_layers(config: Config) -> str:
    """Returns the reason that layers are not compiled by default; empty if they are."""
    reasons = {
        "measured attention logits": config.measures_logits,
        "MLP in tiles": config.recompute.tiled_mlp,
        "linear layers in fp8": config.precision.fp8_format is not None,
        "activation checkpointing by DeepSpeed": config.recompute.is_by_deepspeed,
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _first_of_all_ranks(problem: Problem | None, mesh: Mesh) -> Problem | None:
    problems = [problem] * mesh.world_size
    if mesh.world_size > 1:
        dist.all_gather_object(problems, problem)
    return next((entry for entry in problems if entry is not None), None)


def _dtype(config: Config) -> torch.dtype:
    """Type of the model's parameters."""
    dtype: torch.dtype = getattr(torch, DTYPES[config.precision.name])
    return dtype
