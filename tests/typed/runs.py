"""Passes of the model on one rank of a mesh of any size, whose types are checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from spmd_types import P, R, V
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ds.config import Config
from megatron_ds.engine.trials import attention_options
from megatron_ds.model.declaration.architecture import run_spec
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.stages import layers_per_stage, stage_slices
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh, Mpu, axis_groups
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import declaration, expert_group
from tests.typed.checker import DATA, Axes, Checker, Types, TypesError
from tests.typed.declared import Declared, checked, enforced, line_of, operators
from tests.typed.lattice import Type, varying


@contextmanager
def fake_mesh(world: int, rank: int = 0, **sizes: int) -> Iterator[Axes]:
    """The mesh of a rank, on torch's fake process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = Mesh.build(**{f"{name}_size": size for name, size in {"tp": 1, **sizes}.items()})
        yield Axes(mesh, mesh.dp.size // mesh.ep.size)
    finally:
        dist.destroy_process_group()


SEQUENCE = ("cp", "ulysses")
SPANS = {name: (name,) for name in ("tp", "cp", "ulysses", "ep", "pp")} | {
    "dp": DATA,
    "sequence": SEQUENCE,
    "heads": ("ulysses",),
    "chunks": ("cp",),
    "replicas": (*DATA, *SEQUENCE),
    "expert_dp": ("edp", *SEQUENCE),
    "model": ("pp", "tp"),
    "same_batch": (*SEQUENCE, "tp"),
    "ep_tp": ("ep", "tp"),
}
"""Axes of each group of the mesh."""


def check_groups(axes: Axes) -> None:
    """Check that each group has the ranks of its axes, and the engine averages over the right ones.

    Raises:
        TypesError: One has others.
    """
    groups = {name: (getattr(axes.mesh, name).ranks, axis_groups) for name in SPANS}
    averaged = Mpu(axes.mesh).get_data_parallel_group_ranks()  # type: ignore[attr-defined]
    groups["replicas of the engine"] = averaged, Mpu.__init__
    for name, (ranks, made_by) in groups.items():
        spanned = set(axes.spanned(ranks))
        if spanned != {axis for axis in SPANS[name.partition(" ")[0]] if axis in axes.names}:
            text = f"the group {name} spans the axes {sorted(spanned)}"
            raise TypesError(f"{line_of(made_by)}: {text}")


def check(axes: Axes, run: Callable[[Checker], None]) -> Checker:
    """Run a forward and a backward pass and check them.

    Raises:
        TypesError: A tensor does not lie on the ranks as it must.
    """
    try:
        return _check(axes, run)
    except TypesError as error:
        if not str(error).startswith("backward pass"):
            raise
    # Again, with the places where the forward pass called what the backward pass computes.
    with torch.autograd.set_detect_anomaly(True, check_nan=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _check(axes, run)


def _check(axes: Axes, run: Callable[[Checker], None]) -> Checker:
    checker = Checker(axes)
    with enforced(checker), checker:
        run(checker)
    return checker


def parameter_types(parameter: nn.Parameter, name: str, axes: Axes) -> Types:
    """How a parameter lies on the axes, by its declaration."""
    weight = declaration(name, parameter)
    types: Types = {}
    shard = getattr(parameter, "shard_spec", None)
    if shard is not None:
        types["tp"] = varying(shard.dim)
    if weight.is_stacked:
        types["ep"] = varying(0)
    return {axis: each for axis, each in types.items() if axis in axes.names}


def check_gradients(checker: Checker, module: nn.Module) -> None:
    """Check that each parameter's gradient is complete but for what the engine sums.

    Raises:
        TypesError: One is not.
    """
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            continue
        held = parameter_types(parameter, name, checker.axes)
        is_expert = expert_group(parameter) is not None and not parameter.allreduce  # type: ignore[attr-defined]
        if "tp" in held and not getattr(parameter, "tensor_model_parallel", False):
            used = checker.used.get(id(parameter), "parameters")
            raise TypesError(
                f"{used}: {name} is varying on the tp axis, but the engine is not told"
            )
        for axis in checker.axes.names:
            kind = checker.type_of(parameter.grad, axis).kind
            if axis == "pp" or kind is None:
                continue
            is_summed = axis in ("edp", *SEQUENCE) or (axis == "ep" and not is_expert)
            if is_summed and axis in held:
                used = checker.used.get(id(parameter), "parameters")
                text = f"the engine sums the gradient of {name} over the {axis} axis"
                raise TypesError(f"{used}: {text}, on which ranks have different parts of it")
            wanted = (P, V) if is_summed else (R, V) if axis in held else (R,)
            if kind not in wanted:
                used = checker.used.get(id(parameter), "parameters")
                needed = "partial, for the engine sums it" if is_summed else "complete"
                text = f"the gradient of {name} is {Type(kind)} on the {axis} axis, not {needed}"
                raise TypesError(f"{used}: {text}")


def typed(checker: Checker, tensor: Tensor, **types: Type) -> Tensor:
    """Set the types of an input."""
    checker.set(tensor, {axis: each for axis, each in types.items() if axis in checker.axes.names})
    return tensor


def with_parameters(checker: Checker, module: nn.Module) -> None:
    """Set the types of a module's parameters, which have no gradients yet."""
    module.zero_grad()
    for name, parameter in module.named_parameters():
        checker.set(parameter, parameter_types(parameter, name, checker.axes))
        checker.parameters[id(parameter)] = name


SAMPLES = 3


def check_stage(config: Config, axes: Axes, dtype: torch.dtype = torch.float32) -> None:
    """A forward and a backward pass of the layers of this rank, whose types are checked."""
    check_groups(axes)
    mesh = axes.mesh.of_model(config.parallel.sequence_parallel, config.has_whole_experts)
    axes.mesh = mesh
    rng = RngStreams(mesh.tp.rank, sp_rank=mesh.sequence.rank)
    layers = layers_per_stage(config.model, config.parallel, config.moe)
    slices = stage_slices(run_spec(config), layers)
    held = config.parallel.stages_of_ranks[mesh.pp.rank]
    attention, _ = attention_options(config, mesh, torch.device("cpu"))
    model = GPTModel(
        config.model,
        mesh=mesh,
        rng=rng,
        seed=1,
        checkpointing=ActivationCheckpointing(config.recompute, rng),
        attention=attention,
        stages=[slices[stage] for stage in held],
        moe=config.moe,
    ).to(dtype)
    data = {axis: varying(0) for axis in DATA}
    shape = SAMPLES, config.model.seq_length

    def run(checker: Checker) -> None:
        with_parameters(checker, model)
        rng.begin_step(1, 0, 0)
        tokens = typed(checker, torch.arange(shape[0] * shape[1]).view(shape) % 90, **data)
        labels = typed(checker, tokens.roll(-1), **data)
        mask = typed(checker, torch.ones(shape), **data)
        documents = None
        if attention.packing is not None:
            last = typed(checker, torch.zeros(shape, dtype=torch.bool), **data)
            documents = attention.packing.documents(last, SAMPLES)
        for at, stage in enumerate(held):
            x = None if stage == 0 else hidden(checker, config, mesh, dtype)
            output = model.compute_stage(at, x, tokens, labels, mask, documents=documents)
            if isinstance(output, Tensor):
                output = checked(checker, output, of_hidden(checker), "the stage's output", "")
                gradient = torch.ones_like(output)
                checker.set(gradient, dict(checker.types(output)))
                output.backward(gradient)
            else:
                loss, _ = output.weighted(None)
                loss.backward()
        check_gradients(checker, model)

    check(axes, run)


def hidden(checker: Checker, config: Config, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """What a stage receives from the one before it."""
    length = config.model.seq_length // mesh.sequence.size
    length //= mesh.tp.size if mesh.tp.sequence_parallel else 1
    wide = torch.float32 if config.model.fp32_residual_connection else dtype
    x = torch.ones(length, SAMPLES, config.model.hidden_size, dtype=wide, requires_grad=True)
    return typed(checker, x, **{axis: declared.type for axis, declared in of_hidden(checker)})


def of_hidden(checker: Checker) -> list[tuple[str, Declared]]:
    """How hidden states lie between two stages: what a stage receives is what one returns."""
    signatures = operators()["model.gpt.GPTModel.compute_stage"].signatures(None, checker)
    return [(axis, signature.inputs["x_SBH"]) for axis, signature in signatures]
