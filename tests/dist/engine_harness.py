"""What a rank does: build the engine, train, and hand back whole tensors; and what it watches.

Everything that reaches into DeepSpeed for a look stands here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, SupportsFloat

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from megatron_ds.config import Config
from megatron_ds.data.micro_batches import Batch, MicroBatchIterator
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.parallel.collectives import all_gather
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import unshard, shard_spec
from megatron_ds.launch.environment import prepare_environment
from megatron_ds.train_state import StepPlan
from tests.dist.reference import END, Run, Samples, Tensors

CPU = torch.device("cpu")
Look = Callable[[Any], None]
"""Something done to DeepSpeed's engine before the first step."""
NEW_TENSORS = ("empty", "zeros", "ones", "full", "tensor", "arange", "eye", "randn")
"""Functions of torch that zero.Init replaces while it is active."""
_ORIGINALS = {name: getattr(torch, name) for name in NEW_TENSORS}


def prepare(tp_sizes: tuple[int, ...] = (1, 2)) -> dict[int, Mesh]:
    """Makes a rank of `run_ranks` ready for engines; the meshes by tensor-parallel size."""
    prepare_environment()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deepspeed.utils.logger.setLevel("ERROR")
    return {size: Mesh.build(tp_size=size) for size in tp_sizes}


@dataclass
class Construction:
    """What was seen of the parameters while the model was built."""

    peak: int = 0
    """Most elements of parameters that were whole at one time."""
    largest_module: int = 0
    """Elements of the module that has the most, its children not counted."""
    total: int = 0
    """Elements of all parameters of this tensor-parallel rank."""
    left_whole: int = 0
    """Elements that are whole when the engine is built."""
    kept: int = 0
    """Elements of the slices that this data-parallel rank keeps under ZeRO-3, padding included."""


@contextmanager
def watched_construction() -> Iterator[Construction]:
    """Inside, every parameter that a module registers is counted as long as it is not cut."""
    seen = Construction()
    known: list[weakref.ref[nn.Parameter]] = []
    sizes: dict[int, int] = {}
    register = nn.Module.register_parameter

    def watching(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None:
            return
        known.append(weakref.ref(param))
        alive = {id(p): p.numel() for p in (ref() for ref in known) if p is not None}
        sizes[id(module)] = sizes.get(id(module), 0) + param.numel()
        seen.peak = max(seen.peak, sum(alive.values()))
        seen.largest_module = max(sizes.values())
        seen.total += param.numel()

    nn.Module.register_parameter = watching  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def counted_attention() -> Iterator[list[int]]:
    """Inside, the calls of the attention kernel are counted in the list's only element."""
    calls = [0]
    attend = functional.scaled_dot_product_attention

    def counting(*inputs: Any, **options: Any) -> torch.Tensor:
        calls[0] += 1
        output: torch.Tensor = attend(*inputs, **options)
        return output

    functional.scaled_dot_product_attention = counting
    try:
        yield calls
    finally:
        functional.scaled_dot_product_attention = attend


def train(
    config: Config,
    mesh: Mesh,
    samples: Samples,
    plans: list[StepPlan],
    look: Look | None = None,
) -> Run:
    """The plans' steps through the engine. Collective; every rank gets the same whole tensors."""
    with watched_construction() as construction:
        engine = build_engine(config, mesh, CPU, eod=END)
    parameters = [weakref.ref(p) for p in engine._engine.module.parameters()]
    run = Run()
    construction.left_whole = sum(p.numel() for p in engine._engine.module.parameters())
    construction.kept = sum(
        p.ds_tensor.numel() for p in engine._engine.module.parameters() if hasattr(p, "ds_tensor")
    )
    run.notes["construction"] = construction
    run.notes["types"] = [str(kind) for kind in engine._engine.get_data_types()]
    run.weights.append(whole_weights(engine, mesh))
    if look is not None:
        look(engine._engine)
    # A count in compiled code would compile it anew for each number.
    counted = nullcontext([0]) if config.runtime.compile else counted_attention()
    compiled = counters["frames"]["ok"]
    with counted as calls:
        _train(engine, run, config, mesh, samples, plans)
    run.notes["attention calls"] = calls[0]
    run.notes["compiled"] = counters["frames"]["ok"] - compiled
    engine._engine.destroy()
    del engine
    torch._dynamo.reset()
    releases = config.deepspeed.zero_stage != 3 and config.precision.name == "fp32"
    _assert_nothing_left(parameters if releases else [])
    return run


def _train(
    engine: ZeroEngine,
    run: Run,
    config: Config,
    mesh: Mesh,
    samples: Samples,
    plans: list[StepPlan],
) -> None:
    _keep_gradients(engine, mesh, run)
    batches = _batches(config, mesh, samples)
    for plan in plans:
        result = engine.train_step(batches, plan)
        assert not result.skipped
        run.losses.append(_mean(result.loss, mesh))
        run.norms.append(result.grad_norm)
        run.weights.append(whole_weights(engine, mesh))


def _batches(config: Config, mesh: Mesh, samples: Samples) -> Iterator[Batch]:
    micro = config.schedule.micro_batch_size
    assert micro is not None
    return MicroBatchIterator(
        samples,
        consumed=0,
        micro_batch_size=micro,
        dp_rank=mesh.dp.rank,
        dp_size=mesh.dp.size,
        eod=END if config.data.eod_mask_loss else None,
    )


def _keep_gradients(engine: ZeroEngine, mesh: Mesh, run: Run) -> None:
    """Notes rate and gradients where an optimizer step is about to use them."""
    ds_engine = engine._engine
    step = ds_engine.step

    def noting() -> None:
        if ds_engine.is_gradient_accumulation_boundary():
            (rate,) = {group["lr"] for group in ds_engine.optimizer.param_groups}
            run.rates.append(rate)
            run.gradients.append(
                {
                    name: whole(_known(safe_get_full_grad(param)), param, mesh)
                    for name, param in engine._engine.module.named_parameters()
                }
            )
        step()

    ds_engine.step = noting


def whole_weights(engine: ZeroEngine, mesh: Mesh) -> Tensors:
    """Every weight that the model computes with, whole."""
    weights = {}
    for name, param in engine._engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            weights[name] = whole(param.detach(), param, mesh)
    return weights


def whole(value: torch.Tensor, param: nn.Parameter, mesh: Mesh) -> torch.Tensor:
    """A tensor shaped like a parameter, its tensor-parallel parts joined, as a copy in fp32."""
    spec = shard_spec(param)
    parts = [value] if spec is None else list(all_gather(value, mesh.tp))
    full = parts[0] if spec is None else unshard(parts, spec)
    return full.float().clone()


def _mean(loss: SupportsFloat, mesh: Mesh) -> float:
    total = torch.tensor(float(loss), dtype=torch.float64)
    dist.all_reduce(total, group=mesh.dp.handle)
    return total.item() / mesh.dp.size


def _known(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def _assert_nothing_left(parameters: list[weakref.ref[nn.Parameter]]) -> None:
    """A finished engine leaves no parameter and no patched function of torch behind.

    parameters: those to ask about. A ZeRO-3 engine's and a bf16 optimizer's would be found alive:
    DeepSpeed ties them into autograd classes and hooks that Python cannot collect.
    """
    gc.collect()
    alive = sum(ref() is not None for ref in parameters)
    assert alive == 0, f"{alive} of {len(parameters)} parameters outlive their engine"
    assert partition_parameters.zero_init_context == 0
    for name, original in _ORIGINALS.items():
        assert getattr(torch, name) is original, f"torch.{name} is still replaced"
