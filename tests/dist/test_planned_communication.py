"""The planned messages of a step are those that torch.distributed sees in a trained one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.communication import as_a_large_model, message_log
from megatron_ds.config import (
    Config,
    DeepSpeedConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
)
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.deepspeed import flat_gradients
from megatron_ds.engine.deepspeed.stage_messages import StageMessages
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.ds_config import generate
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.model.experts.router import Router, Routing
from megatron_ds.parallel import host_sums
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.planning.communication import Traffic, step_traffic
from megatron_ds.planning.memory_inputs import PlannedRun, memory_inputs
from megatron_ds.train_state import StepPlan, StepResult
from tests.dist.rank_jobs import JobResults, Jobs, run_jobs, selected
from tests.observed import Observed
from tests.proofs.cases import with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)

NEGLIGIBLE = 60
"""Bytes of norms, flags, and the loads of experts."""
MODEL: dict[str, Any] = TABLES["model"]
LENGTH = MODEL["seq_length"]
VOCAB = MODEL["vocab_size"]
LAYOUTS: dict[str, dict[str, Any]] = TABLES["layouts"]
IN_MAKE_TEST = TABLES["in_make_test"]
"""Every axis, every ZeRO stage, both models and both precisions."""
ACCUMULATION = 3
PLANNED_ACCUMULATION = 2
"""Of the steps whose messages are compared with the planned ones."""


def config_of(
    settings: Mapping[str, Any], world_size: int, accumulation: int = ACCUMULATION
) -> Config:
    parallel = ParallelConfig(
        **{key: value for key, value in settings.items() if key in vars(ParallelConfig())}
    )
    samples = parallel.data_parallel_size(world_size) * accumulation
    return Config(
        model=ModelConfig(**{**MODEL, **settings.get("model", {})}),
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(micro_batch_size=1, global_batch_size=samples, train_iters=2),
        precision=PrecisionConfig(bf16=not settings.get("fp32", False)),
        deepspeed=DeepSpeedConfig(zero_stage=settings["zero_stage"]),
        recompute=RecomputeConfig(**settings.get("recompute", {})),
        parallel=parallel,
        moe=MoEConfig(**settings.get("moe", {})),
    )


def balanced(forward: Callable[..., Routing]) -> Callable[..., Routing]:
    """A router that assigns as many tokens to each expert."""

    def route(router: Router, x_TH: torch.Tensor, sequences: int) -> Routing:
        routing = forward(router, x_TH, sequences)
        shape = routing.experts_TK.shape
        experts = torch.arange(shape.numel()).view(shape) % router.moe.experts
        return routing._replace(experts_TK=experts)

    return route


def engine_and_step(config: Config, mesh: Mesh) -> tuple[ZeroEngine, Callable[[], StepResult]]:
    """An engine whose weights count as a large model's, and a function that takes a step."""
    engine = build_engine(as_a_large_model(config), mesh, torch.device("cpu"))
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    batch = DeviceBatch(tokens, tokens, None, 0)
    samples = config.schedule.global_batch_size
    assert samples is not None
    plan = StepPlan(1, samples, samples // mesh.dp.size, 1e-3, 0.0, seq_length=LENGTH)
    return engine, lambda: engine.train_step(itertools.repeat(batch), plan)


def communicate(name: str, meshes: dict[int, Mesh]) -> tuple[int, int, dict[str, int]]:
    """The pipeline and the context-parallel rank, and the bytes that it sends in a step by
    operation."""
    del meshes
    config = config_of(LAYOUTS[name], 4, PLANNED_ACCUMULATION)
    # As ranks of several machines, which share no memory.
    with mock.patch.object(host_sums, "connect", return_value=None):
        mesh = Mesh.build(**config.mesh_sizes)
    engine, take_step = engine_and_step(config, mesh)
    with mock.patch.object(Router, "forward", balanced(Router.forward)):
        # The first step is different: ZeRO-3 learns the order of the layers in it.
        take_step()
        with message_log(NEGLIGIBLE) as log:
            take_step()
    sent: Counter[str] = Counter()
    for (operation, _), size in log.messages.items():
        sent[operation] += size
    engine._engine.destroy()
    return mesh.pp.rank, mesh.cp.rank, dict(sent)


SUMMED = TABLES["summed"]
"""Layouts, optimizers, and whether all sums are of two ranks: those of more depend on the order."""


NO_KERNELS = {
    *(f"aten.{name}" for name in ("view", "detach", "slice", "select", "split", "alias")),
    *(f"profiler._record_function_{name}" for name in ("enter_new", "exit")),
}
WAIT = "aten._local_scalar_dense"


class Summed(NamedTuple):
    """What a rank has after two steps."""

    weights: torch.Tensor
    norms: list[float]
    slices: int
    early: list[int]
    """Slices that were sent before the last backward pass ended, by step."""
    calls: Counter[str]
    """Operations of the last optimizer step after its norm, but views."""


def calls_after_norm(engine: ZeroEngine) -> Counter[str]:
    """Operations, but views, of the last step of a bf16 optimizer of ZeRO 1 after its norm."""
    calls: Counter[str] = Counter()
    flat = engine._steps.gradients
    optimizer = engine._engine.optimizer
    measure = flat._measure
    take_step = optimizer.step
    counting = ExitStack()

    def count(operator: Any, *_: Any) -> None:
        if str(operator) not in NO_KERNELS:
            calls[str(operator)] += 1

    def measure_and_count(*arguments: Any) -> torch.Tensor:
        norm = measure(*arguments)
        counting.enter_context(Observed(count))
        return norm

    def step_and_count() -> None:
        calls.clear()
        with counting:
            take_step()

    flat._measure = measure_and_count
    optimizer.step = step_and_count
    return calls


def summed(name: str, in_slices: bool, meshes: dict[int, Mesh]) -> Summed:
    """Trains on different samples; gradients are summed in slices or by DeepSpeed."""
    del meshes
    options = OptimizerConfig(**SUMMED[name][0])
    config = dataclasses.replace(config_of(LAYOUTS[name], 4), optimizer=options)
    mesh = Mesh.build(**config.mesh_sizes)
    cpu = torch.device("cpu")
    early: list[int] = []
    with (
        mock.patch.object(generate, "_bucket_size", return_value=20_000),
        mock.patch.object(flat_gradients, "_is_mean", return_value=in_slices),
    ):
        engine = build_engine(config, mesh, cpu)
    flat = engine._steps.gradients
    send = flat.send

    def send_and_count(passes: int = 0, **options: bool) -> None:
        before = len(flat._works)
        send(passes, **options)
        early[-1] += (passes > 0) * (len(flat._works) - before)

    flat.send = send_and_count
    calls = calls_after_norm(engine)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    norms = []
    for step in (1, 2, 3):
        samples = mesh.dp.size * ACCUMULATION
        plan = StepPlan(step, samples, ACCUMULATION, options.lr, 0.0, seq_length=LENGTH)
        tokens = [
            torch.randint(VOCAB, (1, LENGTH + 1), generator=generator) for _ in range(ACCUMULATION)
        ]
        batches = [DeviceBatch(each[:, :-1], each[:, 1:], None, 0) for each in tokens]
        early.append(0)
        result = engine.train_step(iter(batches), plan)
        norms.append(float(result.grad_norm or 0))
    weights = torch.cat([each.detach().flatten() for each in engine.module.parameters()])
    engine._engine.destroy()
    return Summed(weights, norms, len(flat._slices), early, calls)


@contextmanager
def deepspeeds_messages(_: StageMessages) -> Iterator[None]:
    """In place of `StageMessages.active`."""
    yield


def exchanged(in_batches: bool, meshes: dict[int, Mesh]) -> tuple[torch.Tensor, list[list[str]]]:
    """Weights of a rank of four stages after two steps, and the operations of each batch."""
    del meshes
    config = config_of(LAYOUTS["zero1 pp4, llama"], 4)
    mesh = Mesh.build(**config.mesh_sizes)
    batches: list[list[str]] = []
    exchange = dist.batch_isend_irecv

    def record(operations: list[dist.P2POp]) -> list[dist.Work]:
        assert {each.group for each in operations} == {mesh.p2p.handle} != {dist.group.WORLD}
        batches.append([each.op.__name__ for each in operations])
        return exchange(operations)

    active = StageMessages.active if in_batches else deepspeeds_messages
    with (
        mock.patch.object(StageMessages, "active", active),
        mock.patch.object(dist, "batch_isend_irecv", record),
    ):
        engine = build_engine(config, mesh, torch.device("cpu"))
        tokens = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
        batch = DeviceBatch(tokens, tokens, None, 0)
        for step in (1, 2):  # in the first one stages also send the shape of the hidden states
            batches.clear()
            plan = StepPlan(step, ACCUMULATION, ACCUMULATION, 1e-2, 0.0, seq_length=LENGTH)
            engine.train_step(itertools.repeat(batch), plan)
    weights = torch.cat([each.detach().flatten() for each in engine.module.parameters()])
    engine._engine.destroy()
    return weights, batches


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    jobs = Jobs()
    for _, params in selected(request):
        for is_own in (True, False):
            if "layout" in params:
                job = functools.partial(summed, params["layout"], is_own)
                jobs[f"{params['layout']} {is_own}"] = job
            elif "name" not in params:
                jobs[f"exchanged {is_own}"] = functools.partial(exchanged, is_own)
        if "name" in params:
            jobs[params["name"]] = functools.partial(communicate, params["name"])
    return run_jobs(4, jobs)


@pytest.mark.parametrize("name", with_proofs(LAYOUTS, LAYOUTS.keys() - set(IN_MAKE_TEST)))
def test_planned_messages_are_those_of_a_step(name: str, outcomes: JobResults) -> None:
    """Claim (deepspeed): the planned messages of a step equal the messages of trained steps, by
    operation and byte"""
    config = config_of(LAYOUTS[name], 4, PLANNED_ACCUMULATION)
    dp_size = config.parallel.data_parallel_size(4)
    run = PlannedRun.of(config, memory_inputs(config, dp_size, "cpu"))
    for pp_rank, cp_rank, found in outcomes.of(name):
        planned: Counter[str] = Counter()
        for each in step_traffic(run, pp_rank, cp_rank):
            planned[each.operation] += bytes_in_messages(each)
        assert found == dict(planned)


def bytes_in_messages(traffic: Traffic) -> int:
    """Bytes of the tensors that a rank passes to torch.distributed."""
    # Tokens that stay on their rank are in no message.
    return round(traffic.sent) if traffic.what == "routed tokens" else traffic.size


@pytest.mark.parametrize("layout", with_proofs(SUMMED, ("zero1 tp2", "zero1 ep2 sp2")))
def test_gradients_summed_during_the_backward_pass_are_those_summed_after_it(
    layout: str, outcomes: JobResults
) -> None:
    """Claim (precision): in bf16, ZeRO 1 sums gradients during the last backward pass with the same
    weights and norms, bit for bit, as after it: tensor parallelism, tied pipeline stages, experts;
    after the norm a step waits once and takes at most 14 operations, 20 with experts"""
    in_slices = outcomes.of(f"{layout} True")
    afterwards = outcomes.of(f"{layout} False")
    for found, expected in zip(in_slices, afterwards, strict=True):
        assert found.slices > 2
        assert not any(expected.early)
        # All in the first step come after it, then all but those with a part of the embedding.
        assert found.early[0] == 0
        assert min(found.early[1:]) > 0
        assert max(found.norms) > 0.05
        if SUMMED[layout][1]:
            assert found.norms == expected.norms
            assert torch.equal(found.weights, expected.weights)
        else:
            assert found.norms == pytest.approx(expected.norms, rel=1e-3)
        assert found.calls.pop(WAIT) == 1
        assert 0 < found.calls.total() <= (20 if "ep2" in layout else 14), found.calls


def test_stages_exchange_messages_of_both_directions_in_one_batch(outcomes: JobResults) -> None:
    """In a group of their own, though the stages are all ranks; the weights stay the same."""
    exchanges = []
    for found, expected in zip(
        outcomes.of("exchanged True"), outcomes.of("exchanged False"), strict=True
    ):
        weights, batches = found
        others, without = expected
        assert torch.equal(weights, others)
        assert not without
        exchanges.append(sum(sorted(batch) == ["irecv", "isend"] for batch in batches))
    # Of three micro-batches, a stage in the middle sends while it receives anything but its first
    # activation. The first one has sent all but the last activation when a gradient comes, and the
    # last one receives two activations after a gradient.
    assert exchanges == [1, 5, 5, 2]
