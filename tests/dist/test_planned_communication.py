"""The planned messages of a step are those that torch.distributed sees in a trained one."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch

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
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.model.moe import Router, Routing
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.planning.communication import step_traffic
from megatron_ds.train_state import StepPlan, StepResult
from tests.dist.rank_jobs import JobResults, run_jobs, selected
from tests.proofs.cases import with_proofs

NEGLIGIBLE = 40
"""Bytes of norms, flags, and the loads of experts."""
LENGTH, VOCAB = 16, 256
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": VOCAB,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LLAMA = {
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
TP, PP, SP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "ds_sequence_parallel_size",
)
EP = "expert_model_parallel_size"
EXPERTS: dict[str, Any] = {"num_experts": (4,), "moe_router_topk": 2}
FULL = {"recompute_granularity": "full"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0 fp32": {"zero_stage": 0, "fp32": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2 fp32, llama": {"zero_stage": 2, "fp32": True, "model": LLAMA},
    "zero1 tp2": {"zero_stage": 1, TP: 2},
    "zero2 tp2, llama": {"zero_stage": 2, TP: 2, "model": LLAMA},
    "zero1 tp4 sequence parallel": {"zero_stage": 1, TP: 4, "sequence_parallel": True},
    "zero1 tp2 sequence parallel, llama, full recomputation": {
        "zero_stage": 1,
        TP: 2,
        "sequence_parallel": True,
        "model": LLAMA,
        "recompute": FULL,
    },
    "zero1 tp2 full recomputation": {"zero_stage": 1, TP: 2, "recompute": FULL},
    "zero1 pp2": {"zero_stage": 1, PP: 2},
    "zero1 pp2 tp2": {"zero_stage": 1, PP: 2, TP: 2},
    "zero1 pp2 tp2 sequence parallel": {
        "zero_stage": 1,
        PP: 2,
        TP: 2,
        "sequence_parallel": True,
    },
    "zero1 pp4, llama": {"zero_stage": 1, PP: 4, "model": LLAMA},
    "zero1 sp2": {"zero_stage": 1, SP: 2},
    "zero3 sp2, llama": {"zero_stage": 3, SP: 2, "model": LLAMA},
    "zero2 sp2 tp2": {"zero_stage": 2, SP: 2, TP: 2},
    "zero1 pp2 tp2 experts": {"zero_stage": 1, PP: 2, TP: 2, "moe": EXPERTS},
    "zero1 ep2 sp2": {"zero_stage": 1, SP: 2, EP: 2, "moe": EXPERTS},
    "zero2 ep4, every second layer": {
        "zero_stage": 2,
        EP: 4,
        "moe": {**EXPERTS, "expert_interval": 2},
    },
    "zero1 ep2 tp2 full recomputation": {
        "zero_stage": 1,
        TP: 2,
        EP: 2,
        "moe": EXPERTS,
        "recompute": FULL,
    },
    "zero1 ep2 tp2 sequence parallel": {
        "zero_stage": 1,
        TP: 2,
        EP: 2,
        "sequence_parallel": True,
        "moe": EXPERTS,
    },
}
PROOFS = (
    *("zero2 fp32, llama", "zero1 tp2", "zero1 tp4 sequence parallel", "zero1 pp2", "zero1 sp2"),
    *("zero1 tp2 full recomputation", "zero1 pp2 tp2", "zero2 sp2 tp2", "zero1 ep2 sp2"),
    "zero1 ep2 tp2 full recomputation",
)
ACCUMULATION = 3


def config_of(settings: Mapping[str, Any], world_size: int) -> Config:
    parallel = ParallelConfig(
        **{key: value for key, value in settings.items() if key in vars(ParallelConfig())}
    )
    samples = parallel.data_parallel_size(world_size) * ACCUMULATION
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

    def route(router: Router, x_TH: torch.Tensor) -> Routing:
        routing = forward(router, x_TH)
        shape = routing.experts_TK.shape
        experts = torch.arange(shape.numel()).view(shape) % router.moe.experts
        return routing._replace(experts_TK=experts)

    return route


def engine_and_step(config: Config, mesh: Mesh) -> tuple[ZeroEngine, Callable[[], StepResult]]:
    """An engine whose weights count as a large model's, and a function that takes a step."""
    engine = build_engine(as_a_large_model(config), mesh, torch.device("cpu"))
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    batch = DeviceBatch(tokens, tokens, None, 0)
    samples = mesh.dp.size * ACCUMULATION
    plan = StepPlan(1, samples, ACCUMULATION, 1e-3, 0.0, seq_length=LENGTH)
    return engine, lambda: engine.train_step(itertools.repeat(batch), plan)


def communicate(name: str, meshes: dict[int, Mesh]) -> tuple[int, dict[str, int]]:
    """The pipeline rank, and the bytes that it sends in a step by operation."""
    del meshes
    config = config_of(LAYOUTS[name], 4)
    mesh = Mesh.build(**config.axis_sizes)
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
    return mesh.pp.rank, dict(sent)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    names = [params["name"] for _, params in selected(request)]
    return run_jobs(4, {name: functools.partial(communicate, name) for name in names})


@pytest.mark.parametrize("name", with_proofs(LAYOUTS, PROOFS))
def test_planned_messages_are_those_of_a_step(name: str, outcomes: JobResults) -> None:
    config = config_of(LAYOUTS[name], 4)
    dp_size = config.parallel.data_parallel_size(4)
    for pp_rank, found in outcomes.of(name):
        planned: Counter[str] = Counter()
        for each in step_traffic(config, dp_size, "cpu", pp_rank):
            planned[each.operation] += each.size
        assert found == dict(planned)
