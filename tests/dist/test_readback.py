"""What the engine really does, held against what it was told, on two ranks.

Every layout agrees, and every compared value that is made to differ stops the run with a table.

One set of processes does it all. A value is falsified where the engine keeps it, on a built engine,
and put back; some are falsified on their way to DeepSpeed, to show that the reading follows what
DeepSpeed does with them.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing

from megatron_ds.config import Config, ParallelConfig, PrecisionConfig, RecomputeConfig, RuntimeConfig
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.engine import build
from megatron_ds.engine import readback
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.engine import memory_estimate
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.engine.memory_estimate import estimate
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepPlan
from tests.dist.parity_cases import SAMPLES_PER_STEP, SHAPE, Case, completed, config_of
from tests.dist.engine_harness import CPU, prepare
from tests.dist.reference import Samples
from tests.distributed import run_ranks

BASE = "zero1 bf16"
DEEPSPEED_UNITS = RecomputeConfig(
    checkpoint_activations=True,
    checkpoint_num_layers=2,
    deepspeed_activation_checkpointing=True,
    partition_activations=True,
)


def layouts(folder: Path) -> dict[str, Config]:
    """What must agree: stages, number formats, offloading, optimizers, recomputation."""

    def config(stage: int, optimizer: str = "adamw", **groups: Any) -> Config:
        tp = groups.get("parallel", ParallelConfig()).tensor_model_parallel_size
        base = config_of(Case(2, stage, tp, 4, "learned", optimizer), folder)
        zero = groups.pop("deepspeed", {})
        changed = dataclasses.replace(base.deepspeed, **zero)
        return completed(dataclasses.replace(base, deepspeed=changed, **groups), 2)

    bf16, offload = PrecisionConfig(bf16=True), {"cpu_optimizer": True}
    fp16 = PrecisionConfig(fp16=True, allow_fp16_on_cpu=True, initial_loss_scale=2.0**8)
    return {
        "zero0": config(0),
        "zero0 sgd": config(0, "sgd"),
        "zero1": config(1),
        "zero2": config(2),
        "zero3": config(3),
        BASE: config(1, precision=bf16),
        "zero2 bf16": config(2, precision=bf16),
        "zero3 bf16": config(3, precision=bf16),
        "zero1 bf16 accumulated": config(
            1,
            precision=PrecisionConfig(bf16=True, accumulate_allreduce_grads_in_fp32=False),
        ),
        "zero1 offload": config(1, deepspeed=offload),
        "zero2 bf16 offload": config(2, precision=bf16, deepspeed=offload),
        "zero3 bf16 offload": config(
            3, precision=bf16, deepspeed={**offload, "remote_device": "cpu"}
        ),
        "zero2 fp16": config(2, precision=fp16),
        "zero3 fp16 static": config(
            3, precision=PrecisionConfig(fp16=True, allow_fp16_on_cpu=True, loss_scale=128.0)
        ),
        "tp2 recomputed": config(
            1, parallel=ParallelConfig(tensor_model_parallel_size=2), recompute=DEEPSPEED_UNITS
        ),
        "selective": config(1, recompute=RecomputeConfig(recompute_granularity="selective")),
        "full": config(1, recompute=RecomputeConfig(checkpoint_activations=True)),
        "compiled": config(0, runtime=RuntimeConfig(compile=True)),
    }


@contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    with mock.patch.object(holder, name, value):
        yield


@contextmanager
def group_changed(engine: Any, **values: Any) -> Iterator[None]:
    """The last group alone: a value that only some parameters have is wrong too."""
    with mock.patch.dict(engine.basic_optimizer.param_groups[-1], values):
        yield


Change = Callable[[Any], Any]
FALSIFIED: dict[str, tuple[str, Change]] = {
    "ZeRO stage": ("zero2", lambda e: changed(e.optimizer, "partition_gradients", False)),
    "data-parallel size": (BASE, lambda e: changed(e, "dp_world_size", 1)),
    "global batch": (BASE, lambda e: changed(e._config, "train_batch_size", 15)),
    "micro batch": (BASE, lambda e: changed(e._config, "train_micro_batch_size_per_gpu", 3)),
    "accumulation steps": (BASE, lambda e: changed(e._config, "gradient_accumulation_steps", 3)),
    "optimizer": (BASE, lambda e: changed(e, "basic_optimizer", like(e, torch.optim.Adam))),
    "decoupled weight decay": (
        "zero1 offload",
        lambda e: changed(e.basic_optimizer, "adam_w_mode", False),
    ),
    "betas": (BASE, lambda e: group_changed(e, betas=(0.9, 0.999))),
    "epsilon": (BASE, lambda e: group_changed(e, eps=1e-8)),
    "momentum": ("zero0 sgd", lambda e: group_changed(e, momentum=0.9)),
    "learning rate": (BASE, lambda e: group_changed(e, lr=0.02)),
    "weight decay, matrices": (
        BASE,
        lambda e: mock.patch.dict(e.basic_optimizer.param_groups[0], weight_decay=0.0),
    ),
    "weight decay, biases and norms": (BASE, lambda e: group_changed(e, weight_decay=0.1)),
    "gradient clipping": (BASE, lambda e: changed(e.optimizer, "clip_grad", 1.0)),
    "parameters": (
        BASE,
        lambda e: changed(e.module.final_norm, "weight", torch.nn.Parameter(torch.ones(32))),
    ),
    "gradients": (
        "zero1",
        lambda e: changed(
            e.module.final_norm, "weight", torch.nn.Parameter(torch.ones(32, dtype=torch.half))
        ),
    ),
    "gradient accumulation": (
        "zero2 bf16",
        lambda e: changed(e.optimizer, "gradient_accumulation_dtype", torch.bfloat16),
    ),
    "gradient reduction": (
        "zero3 bf16",
        lambda e: changed(e.optimizer, "ipg_buckets", {torch.bfloat16: None}),
    ),
    "master weights": (
        "zero3 bf16",
        lambda e: changed(
            e.optimizer, "fp32_partitioned_groups_flat", [torch.zeros(1, dtype=torch.bfloat16)]
        ),
    ),
    "optimizer states": (
        BASE,
        lambda e: mock.patch.dict(
            e.basic_optimizer.state,
            {torch.zeros(1): {"exp_avg": torch.zeros(1, dtype=torch.bfloat16)}},
        ),
    ),
    "optimizer offload": (
        "zero3 bf16 offload",
        lambda e: changed(e.optimizer, "offload_optimizer", False),
    ),
    "parameter offload": (
        "zero3 bf16 offload",
        lambda e: changed(e.optimizer, "offload_param", False),
    ),
    "loss scale": (
        "zero2 fp16",
        lambda e: changed(e.optimizer.loss_scaler, "scale_window", 500),
    ),
    "recomputation": (
        "tp2 recomputed",
        lambda _: changed(checkpointing, "PARTITION_ACTIVATIONS", False),
    ),
    "compiled layers": (
        "compiled",
        lambda e: changed(e.module.layers[1], "_compiled_call_impl", None),
    ),
    "document bounds": ("zero1", lambda e: changed(e.module, "documents", PackingOptions(0, True, True))),
}
"""For every compared setting: the layout on which, and how, it is made another one."""

PASSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient clipping": (BASE, {"gradient_clipping": 7.0}),
    "epsilon": ("zero1", {"optimizer": {"params": {"eps": 1e-5}}}),
    "gradient accumulation": ("zero2 bf16", {"data_types": {"grad_accum_dtype": "bf16"}}),
    "optimizer offload": (
        "zero2 bf16",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ),
    "ZeRO stage": ("zero1", {"zero_optimization": {"stage": 2}}),
    "global batch": (BASE, {"train_batch_size": 32, "gradient_accumulation_steps": 8}),
    "loss scale": ("zero2 fp16", {"fp16": {"hysteresis": 4}}),
}
"""Settings that DeepSpeed is given in another way than the flags say, and what it is given."""


def like(engine: Any, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer of another kind with the same groups."""
    other = kind([torch.zeros(1)])
    other.param_groups = engine.basic_optimizer.param_groups
    return other


def overlaid(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = overlaid(result[key], value) if nested else value
    return result


def complaint(call: Callable[[], object]) -> str:
    """The words of a ValueError; empty if there is none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def on_a_rank(rank: int, configs: dict[str, Config]) -> dict[str, dict[str, Any]]:
    meshes = prepare((1, 2))
    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
    agreed: dict[str, Any] = {}
    attributes: dict[str, str] = {}
    engines: dict[str, memory_estimate.MemoryInputs] = {}
    held: dict[str, readback.States] = {}
    for layout, config in configs.items():
        mesh = meshes[config.parallel.tensor_model_parallel_size]
        engine = build_engine(config, mesh, CPU)
        agreed[layout] = engine.settings
        inner, ds_config = engine._engine, engine.ds_config
        for setting, (where, change) in FALSIFIED.items():
            if where == layout:
                with change(inner):
                    attributes[setting] = complaint(
                        lambda: readback.check(config, mesh, inner, ds_config)  # noqa: B023
                    )
                assert not complaint(lambda: readback.check(config, mesh, inner, ds_config))  # noqa: B023
        if layout != "compiled":  # which would take a compiler's time
            train_a_step(engine, config, mesh)
            zero = ds_config["zero_optimization"]
            engines[layout] = readback.memory_inputs(engine.settings, mesh.tp.size, zero, "cpu")
            held[layout] = engine.state_bytes()
    passed: dict[str, str] = {}
    for setting, (layout, changes) in PASSED.items():
        config = configs[layout]
        generate = build.build_ds_config

        def lying(*arguments: Any) -> dict[str, Any]:
            return overlaid(generate(*arguments), changes)  # noqa: B023

        with mock.patch.object(build, "build_ds_config", lying):
            passed[setting] = complaint(lambda: build_engine(config, meshes[1], CPU))  # noqa: B023
    from deepspeed.runtime.zero.muon import original_muon  # at the top it would be compiled

    return {
        "agreed": agreed,
        "attributes": attributes,
        "passed": passed,
        "engines": engines,
        "held": held,
        "compiled": {"Muon": hasattr(original_muon.muon_update, "_torchdynamo_orig_callable")},
    }


def train_a_step(engine: ZeroEngine, config: Config, mesh: Mesh) -> None:
    micro = config.schedule.micro_batch_size
    assert micro is not None
    batches = MicroBatchIterator(
        Samples(SAMPLES_PER_STEP, SHAPE),
        consumed=0,
        micro_batch_size=micro,
        dp_rank=mesh.dp.rank,
        dp_size=mesh.dp.size,
        eod=None,
    )
    accumulated = SAMPLES_PER_STEP // (micro * mesh.dp.size)
    plan = StepPlan(1, SAMPLES_PER_STEP, accumulated, 0.01, 0.1, seq_length=99)
    result = engine.train_step(batches, plan)
    assert not result.skipped


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(on_a_rank, 2, layouts(tmp_path_factory.mktemp("effective")))


def test_every_layout_does_what_it_was_told(
    outcome: list[dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    for rank in outcome:
        assert list(rank["agreed"]) == list(layouts(tmp_path))
        settings = {setting for values in rank["agreed"].values() for setting in values}
        assert settings == set(FALSIFIED)
    told = outcome[0]["agreed"]["zero3 bf16 offload"]
    assert (told["ZeRO stage"], told["parameters"], told["gradient accumulation"]) == (
        3,
        "bfloat16",
        "float32",
    )
    assert (told["optimizer"], told["optimizer offload"]) == ("DeepSpeedCPUAdam", "cpu")


@pytest.mark.parametrize("setting", FALSIFIED)
def test_an_engine_that_holds_another_value_is_stopped(
    setting: str, outcome: list[dict[str, dict[str, Any]]]
) -> None:
    for rank in outcome:
        assert re.search(
            rf"told +in force\n(.*\n)*?  {re.escape(setting)}  ", rank["attributes"][setting]
        )


@pytest.mark.parametrize("setting", PASSED)
def test_a_value_that_deepspeed_was_given_wrongly_is_stopped(
    setting: str, outcome: list[dict[str, dict[str, Any]]]
) -> None:
    for rank in outcome:
        assert re.search(
            rf"told +in force\n(.*\n)*?  {re.escape(setting)}  ", rank["passed"][setting]
        )


def test_the_memory_estimate_counts_the_states_that_are_there(
    outcome: list[dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    for layout, config in layouts(tmp_path).items():
        if layout == "compiled":
            continue
        for rank in outcome:
            expected = estimate(config, rank["engines"][layout])
            for kind in ("parameters", "master weights", "moments"):
                counted = expected.device.get(kind, 0) + expected.host.get(kind, 0)
                assert total(rank["held"][layout], kind) == pytest.approx(counted), (layout, kind)
            if rank["engines"][layout].stage == 3:  # the buffer stays from step to step
                kind = "accumulated gradients"
                counted = expected.device.get(kind, 0) + expected.host.get(kind, 0)
                assert total(rank["held"][layout], kind) == pytest.approx(counted), (layout, kind)


def test_the_optimizer_that_nobody_takes_is_not_compiled(
    outcome: list[dict[str, dict[str, Any]]],
) -> None:
    assert [rank["compiled"] for rank in outcome] == [{"Muon": False}] * 2


def total(states: readback.States, kind: str) -> int:
    """On a CPU all states are in one place, whatever is offloaded."""
    return sum(kinds.get(kind, 0) for kinds in states.values())
