"""What a rank of a test does: build the engine, train, record full tensors and observations.

Owns everything that reads internals of DeepSpeed's engine.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsFloat
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from megatron_ds.config import Config, ParallelConfig
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.sample import DocumentEnds
from megatron_ds.data.token_dataset import TransformedDataset
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.deepspeed.patches import require_precision
from megatron_ds.engine.device_batches import DeviceBatches
from megatron_ds.engine.norms import NORMS, ZEROS
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.sharding import expert_group, shard_spec, unshard
from megatron_ds.train_state import StepPlan
from tests.dist.recorded import Recorder
from tests.dist.reference import EOD, Run, Samples, Tensors, packing_of

EngineProbe = Callable[[Any], None]
"""Called with DeepSpeed's engine before the first step."""
NEW_TENSORS = ("empty", "zeros", "ones", "full", "tensor", "arange", "eye", "randn")
"""Functions of torch that deepspeed.zero.Init replaces while it is active."""
COUNTED = (ZEROS, *NORMS)
_ORIGINALS = {name: getattr(torch, name) for name in NEW_TENSORS}


class Meshes(dict[int, Mesh]):
    """The meshes of a rank by tensor-parallel size, and those of other layouts once needed."""

    def __init__(self, by_tp_size: dict[int, Mesh]) -> None:
        super().__init__(by_tp_size)
        self._others: dict[tuple[int, ...], Mesh] = {}

    def of(self, parallel: ParallelConfig) -> Mesh:
        """The mesh of a layout. Collective."""
        tp_size = parallel.tensor_model_parallel_size
        pp_size = parallel.pipeline_model_parallel_size
        ep_size = parallel.expert_data_ranks
        if pp_size == parallel.sequence_ranks == ep_size == 1:
            return self[tp_size]
        sizes = parallel.cp_size, parallel.cp_inner_size, parallel.ulysses_size
        key = tp_size, pp_size, *sizes, ep_size
        if key not in self._others:
            self._others[key] = Mesh.build(
                tp_size,
                pp_size=pp_size,
                cp_size=parallel.cp_size,
                cp_inner_size=parallel.cp_inner_size,
                ulysses_size=parallel.ulysses_size,
                ep_size=ep_size,
            )
        return self._others[key]


def prepare() -> Meshes:
    """Prepares a rank of `run_ranks` for engines."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deepspeed.utils.logger.setLevel("ERROR")
    # Ranges for a profiler of CUDA, in each of DeepSpeed's functions.
    deepspeed.utils.nvtx.enable_nvtx = False
    # On a CPU it starts a process, each time that ZeRO-3 reduces gradients.
    accelerator = get_accelerator()
    accelerator.device_count = functools.cache(accelerator.device_count)
    sizes = [size for size in (1, 2, 4) if dist.get_world_size() % size == 0]
    gc.collect()
    gc.freeze()  # the collection after each job skips what has been imported
    return Meshes({size: Mesh.build(tp_size=size) for size in sizes})


def build(config: Config, mesh: Mesh) -> ZeroEngine:
    """The engine of a configuration, as pretrain_gpt.py builds it."""
    require_precision(config.precision)
    return build_engine(config, mesh, torch.device("cpu"))


@dataclass
class Construction:
    """Parameter counts observed while the model was built."""

    peak: int = 0
    """Most elements of unpartitioned parameters at one time."""
    largest_module: int = 0
    """Elements of the largest module, without its children."""
    total: int = 0
    """Elements of all parameters of this tensor-parallel rank."""
    unpartitioned: int = 0
    """Elements that are not partitioned when the engine is built."""
    local: int = 0
    """Elements of this data-parallel rank's ZeRO-3 partitions, including padding."""


@contextmanager
def watch_construction() -> Iterator[Construction]:
    """Counts every registered parameter until it is partitioned."""
    construction = Construction()
    known: list[weakref.ref[nn.Parameter]] = []
    sizes: dict[int, int] = {}
    register = nn.Module.register_parameter

    def count_and_register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None:
            return
        known.append(weakref.ref(param))
        alive = {id(p): p.numel() for p in (ref() for ref in known) if p is not None}
        sizes[id(module)] = sizes.get(id(module), 0) + param.numel()
        construction.peak = max(construction.peak, sum(alive.values()))
        construction.largest_module = max(sizes.values())
        construction.total += param.numel()

    with mock.patch.object(nn.Module, "register_parameter", count_and_register):
        yield construction


@contextmanager
def count_attention_calls() -> Iterator[list[int]]:
    """Counts calls of the attention kernel in the only element of the list."""
    calls = [0]
    attend = functional.scaled_dot_product_attention

    def count_and_attend(*inputs: Any, **options: Any) -> torch.Tensor:
        calls[0] += 1
        output: torch.Tensor = attend(*inputs, **options)
        return output

    with mock.patch.object(functional, "scaled_dot_product_attention", count_and_attend):
        yield calls


def train(
    config: Config,
    plans: list[StepPlan],
    samples: Samples,
    probe: EngineProbe | None,
    meshes: Meshes,
    *,
    records_masks: bool = False,
    tensors_of: Collection[int] | None = None,
) -> Run:
    """Trains the plans' steps. Collective; every rank gets the same full tensors.

    Args:
        config: The configuration.
        plans: The steps.
        samples: The data.
        probe: Sees the engine before the first step.
        meshes: Those of this rank.
        records_masks: Record the masks of dropout.
        tensors_of: Steps, from 1, of which gradients and weights are recorded, and after which a
            pipeline evaluates. None: all. A run spends about a third of its time on recording.
    """
    mesh = meshes.of(config.parallel)
    logged = {"log_num_zeros_in_grad": True, "log_layer_norms_interval": 1, "record_every": 1}
    logged |= {"timing_log_level": 2, "log_interval": 1}
    config = config.with_values(logged)
    with watch_construction() as construction:
        engine = build(config, mesh)
    parameters = [weakref.ref(p) for p in engine._engine.module.parameters()]
    run = Run()
    construction.unpartitioned = sum(p.numel() for p in engine._engine.module.parameters())
    construction.local = sum(
        p.ds_tensor.numel() for p in engine._engine.module.parameters() if hasattr(p, "ds_tensor")
    )
    run.notes["construction"] = construction
    run.notes["types"] = [str(kind) for kind in engine._engine.get_data_types()]
    run.weights.append(full_weights(engine, mesh))
    if probe is not None:
        probe(engine._engine)
    # A counter in compiled code would recompile it for every value.
    counted = nullcontext([0]) if engine._parts.is_compiled else count_attention_calls()
    compiled = counters["frames"]["ok"]
    breaks = sum(counters["graph_break"].values())
    recorded_steps = range(1, len(plans) + 1) if tensors_of is None else tensors_of
    _record_gradients(engine, mesh, run, recorded_steps)
    recorder = Recorder(engine._engine.module, mesh, masks=records_masks)
    run.recorded = recorder.recorded
    batches = batches_of(config, mesh, samples)
    with counted as calls, recorder.recording():
        for number, plan in enumerate(plans, 1):
            with engine.marked(partial(_count_region, run.regions)):
                result = engine.train_step(batches, plan)
            assert not result.skipped
            run.times.append(engine.step_times())
            run.losses.append(_mean(result.loss, mesh))
            counted = {n: float(v) for n, v in result.extras.items() if n.startswith(COUNTED)}
            reported = result.extras.keys() - counted.keys() - {"decoupled_learning_rate"}
            run.statistics.append(counted)
            run.records.append(result.record or {})
            means = {name: _mean(result.extras[name], mesh) for name in sorted(reported)}
            run.routing.append(means)
            run.norms.append(None if result.grad_norm is None else float(result.grad_norm))
            if number not in recorded_steps:
                run.weights.append({})
                continue
            run.weights.append(full_weights(engine, mesh))
            if mesh.pp.size > 1 and number < len(plans):  # the last pass is one of training
                run.evaluations.append(evaluate(engine, config, mesh, samples))
    run.notes["params norm"] = engine.params_norm()
    run.notes["attention calls"] = calls[0]
    run.notes["compiled"] = counters["frames"]["ok"] - compiled
    run.notes["graph breaks"] = sum(counters["graph_break"].values()) - breaks
    engine._engine.destroy()
    del engine
    torch._dynamo.reset()
    releases = config.deepspeed.zero_stage != 3 and config.precision.name == "fp32"
    _assert_nothing_left(parameters if releases else [])
    return run


@contextmanager
def _count_region(regions: Counter[str], name: str) -> Iterator[None]:
    regions[name] += 1
    yield


def evaluate(engine: ZeroEngine, config: Config, mesh: Mesh, samples: Samples) -> float:
    """The evaluation loss of half of the micro-batches of a step, or of its only one. Collective.

    There may be fewer micro-batches than pipeline stages.
    """
    schedule = config.schedule
    count = schedule.global_batch_size // (schedule.micro_batch_size * mesh.dp.size)
    count = max(count // 2, 1)
    batches = list(itertools.islice(batches_of(config, mesh, samples), count))
    loss = engine.eval_loss(iter(batches), count)
    if all(batch.loss_weights_BS is None for batch in batches):
        tokens = sum(int(batch.num_counted()) for batch in batches)
        torch.testing.assert_close(loss.nats / tokens, loss.total / loss.weight)
    sums = torch.stack([loss.total, loss.weight])
    dist.all_reduce(sums, group=mesh.dp.handle)
    return float(sums[0] / sums[1])


def batches_of(
    config: Config, mesh: Mesh, samples: Samples, consumed: int = 0, shift: int = 0
) -> DeviceBatches:
    """The micro-batches of a rank, or of that so many places further, read by one rank of each
    tensor-parallel group."""
    options = config.data
    ends = DocumentEnds(EOD, masks_loss=options.eod_mask_loss)
    batches = MicroBatchIterator(
        TransformedDataset(samples, [ends]) if options.boundary_fields else samples,
        consumed=consumed,
        micro_batch_size=config.schedule.micro_batch_size,
        dp_rank=(mesh.dp.rank + shift) % mesh.dp.size,
        dp_size=mesh.dp.size,
        reads=mesh.same_batch.rank == 0,
    )
    packing = packing_of(config)
    return DeviceBatches(batches, torch.device("cpu"), mesh.same_batch, packing=packing)


def _record_gradients(
    engine: ZeroEngine, mesh: Mesh, run: Run, recorded_steps: Collection[int]
) -> None:
    """Records the learning rate and the gradients right before each optimizer step uses them."""
    ds_engine = engine._engine

    def record() -> None:
        engine._steps.gradients.complete()
        # A decoupled learning rate is larger.
        rate = min(group["lr"] for group in ds_engine.optimizer.param_groups)
        run.rates.append(rate)
        if len(run.rates) not in recorded_steps:
            run.gradients.append({})
            return
        scale = getattr(ds_engine.optimizer, "loss_scale", 1.0)
        named = dict(ds_engine.module.named_parameters())
        with by_one_message():
            own = {name: safe_get_full_grad(parameter) for name, parameter in named.items()}
        full = full_tensors(own, named, mesh.tp, mesh.ep)
        run.gradients.append(of_all_stages({n: grad / scale for n, grad in full.items()}, mesh))

    if mesh.pp.size > 1:
        instructions = ds_engine._INSTRUCTION_MAP
        step_stages = instructions[schedule.OptimizerStep]

        def record_and_step_stages(_: Any) -> None:
            record()
            step_stages(ds_engine)

        ds_engine._INSTRUCTION_MAP = {
            **instructions,
            schedule.OptimizerStep: record_and_step_stages,
        }
        return
    step = ds_engine.step

    def record_and_step() -> None:
        if ds_engine.is_gradient_accumulation_boundary():
            record()
        step()

    ds_engine.step = record_and_step


def of_all_stages(own: Tensors, mesh: Mesh) -> Tensors:
    """The tensors of all pipeline stages. Both copies of a tied weight must be equal bit by bit."""
    stages = [own] * mesh.pp.size
    if mesh.pp.size > 1:
        dist.all_gather_object(stages, own, group=mesh.pp.handle)
    result: Tensors = {}
    for stage in stages:
        for name, value in stage.items():
            assert torch.equal(result.setdefault(name, value), value), f"{name} differs"
    return result


def full_weights(engine: ZeroEngine, mesh: Mesh) -> Tensors:
    """The full tensor of every weight that the model computes with."""
    named = dict(engine._engine.module.named_parameters())
    shards = _unpartitioned(named) if hasattr(next(iter(named.values())), "ds_id") else named
    return of_all_stages(full_tensors(shards, named, mesh.tp, mesh.ep), mesh)


def _unpartitioned(named: Mapping[str, nn.Parameter]) -> Mapping[str, torch.Tensor]:
    """The parameters of ZeRO-3 as the model computes with them, gathered by one message."""
    found: dict[str, torch.Tensor] = {}
    groups: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        if parameter.nvme_swapper is None:
            groups.setdefault(parameter.ds_process_group, {})[name] = parameter
            continue
        with deepspeed.zero.GatheredParameters([parameter]):  # there are few buffers for them
            found[name] = parameter.detach().clone()
    for handle, parameters in groups.items():
        partitions = [each.ds_tensor.detach() for each in parameters.values()]
        gathered = _gathered(partitions, handle, dist.get_world_size(handle))
        for (name, parameter), parts in zip(parameters.items(), gathered, strict=True):
            flat = torch.cat(parts)[: parameter.ds_numel]
            found[name] = flat.view(parameter.ds_shape)
    return {name: found[name] for name in named}


def _gathered(
    tensors: Sequence[torch.Tensor], handle: Any, size: int
) -> Sequence[Sequence[torch.Tensor]]:
    """Gathers each tensor from every rank of a process group, all of them in one message."""
    if not tensors or size == 1:
        return [[tensor] for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    by_rank = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(by_rank, flat, group=handle)
    split = [each.split([tensor.numel() for tensor in tensors]) for each in by_rank]
    return [
        [part.view(tensor.shape) for part in parts]
        for tensor, *parts in zip(tensors, *split, strict=True)
    ]


@contextmanager
def by_one_message() -> Iterator[None]:
    """Within it, DeepSpeed's functions that return full states return tensors that are complete
    after it: what each of them sums or gathers over a process group is sent together. Collective.
    """
    sums: dict[Any, list[torch.Tensor]] = {}
    gathers: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def sum_later(buffer: torch.Tensor, group: Any) -> None:
        sums.setdefault(group, []).append(buffer)

    def gather_later(buffer: torch.Tensor, part: torch.Tensor, group: Any) -> None:
        gathers.setdefault(group, []).append((buffer, part))

    with (
        mock.patch.object(deepspeed.comm, "all_reduce", sum_later),
        mock.patch.object(deepspeed.comm, "all_gather_into_tensor", gather_later),
    ):
        yield
    for group, buffers in sums.items():
        flat = torch.cat(buffers)
        dist.all_reduce(flat, group=group)
        for buffer, total in zip(buffers, flat.split([len(e) for e in buffers]), strict=True):
            buffer.copy_(total)
    for group, pairs in gathers.items():
        gathered = _gathered([part for _, part in pairs], group, dist.get_world_size(group))
        for (buffer, _), parts in zip(pairs, gathered, strict=True):
            buffer.copy_(torch.cat(parts))


def full_tensors(
    shards: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    group: Group,
    ep_group: Group | None = None,
) -> Tensors:
    """Joins the shards of tensors shaped like parameters; copies in fp32.

    Args:
        shards: The shards by name.
        parameters: The parameters by name.
        group: Tensor-parallel group.
        ep_group: Expert-parallel group, over which experts are joined.
    """
    full = {name: shard.detach().float() for name, shard in shards.items()}
    if ep_group is not None:
        experts = [name for name in full if expert_group(parameters[name]) is not None]
        by_rank = _gathered([full[name] for name in experts], ep_group.handle, ep_group.size)
        full |= {name: torch.cat(parts) for name, parts in zip(experts, by_rank, strict=True)}
    specs = {name: spec for name in full if (spec := shard_spec(parameters[name])) is not None}
    by_rank = _gathered([full[name] for name in specs], group.handle, group.size)
    for (name, spec), parts in zip(specs.items(), by_rank, strict=True):
        full[name] = unshard(parts, spec)
    return {name: tensor.clone() for name, tensor in full.items()}


def full_tensor(value: torch.Tensor, param: nn.Parameter, group: Group) -> torch.Tensor:
    """As `full_tensors`, of one tensor."""
    return full_tensors({"": value}, {"": param}, group)[""]


def _mean(loss: SupportsFloat, mesh: Mesh) -> float:
    total = torch.tensor(float(loss), dtype=torch.float64)
    dist.all_reduce(total, group=mesh.replicas.handle)
    return total.item() / mesh.replicas.size


def _assert_nothing_left(parameters: list[weakref.ref[nn.Parameter]]) -> None:
    """A destroyed engine must release its parameters and restore the functions of torch.

    Args:
        parameters: Those that must be released. The parameters of a ZeRO-3 engine and of a bf16
            optimizer are not: DeepSpeed references them from autograd classes and hooks that
            Python cannot collect.
    """
    gc.collect()
    alive = sum(ref() is not None for ref in parameters)
    assert alive == 0, f"{alive} of {len(parameters)} parameters outlive their engine"
    assert partition_parameters.zero_init_context == 0
    for name, original in _ORIGINALS.items():
        assert getattr(torch, name) is original, f"torch.{name} is still replaced"
