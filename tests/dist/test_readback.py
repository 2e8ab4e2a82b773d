"""Settings read back from DeepSpeed's engine, on two ranks.

Every layout has the configured settings, and a run stops if any compared setting differs. A setting
is falsified where the built engine keeps it, and then restored; some are also falsified on their
way to DeepSpeed, to show that the read-back follows what DeepSpeed does with them.

Claim (parallel): DeepSpeed's actual settings equal the configured ones, or the run stops
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.config.options.optimizer_specs import NAMES
from megatron_ds.config.problems import UserError
from megatron_ds.engine import build as engine_build
from megatron_ds.engine import readback
from megatron_ds.engine.readback import StateBytes
from megatron_ds.engine.settings import EngineSettings
from megatron_ds.planning.memory_estimate import estimate
from megatron_ds.planning.memory_inputs import MemoryInputs, memory_inputs
from megatron_ds.train_state import TrainState
from tests.dist.engine_harness import batches_of, build, prepare
from tests.dist.parity_cases import SHAPE, Case, config_of, ds_file
from tests.dist.reference import Samples
from tests.dist.synchronization import reads_of_steps
from tests.distributed import run_ranks
from tests.problems import codes
from tests.unit.engine.test_adam_kernels import FusedAdam

BASE = "zero1 bf16"
APEX = "zero1 apex"
QUANTIZED = "zero3 quantized weights"
RECORD_EVERY = 50
"""More steps than are taken."""
DEEPSPEED_UNITS = {
    "recompute_granularity": "full",
    "checkpoint_num_layers": 2,
    "deepspeed_activation_checkpointing": True,
    "partition_activations": True,
}


def layouts() -> dict[str, Config]:
    """Layouts that must have their settings: stages, number formats, offloading, optimizers."""

    def config(stage: int, name: str = "adamw", tp: int = 1, **changes: Any) -> Config:
        return config_of(Case(2, stage, tp, 2, "learned", name), **changes)

    moments = {"exp_avg_dtype": "bf16", "normuon": True}
    bf16 = {"bf16": True}
    offload = {"cpu_optimizer": True}
    fp16 = {"fp16": True, "allow_fp16_on_cpu": True}
    unaccumulated = {**bf16, "accumulate_allreduce_grads_in_fp32": False}
    masters = {**unaccumulated, "bf16_master_weights": True}
    stochastic = {"bf16_stochastic_round": True}
    all_offload = {**offload, "remote_device": "cpu"}

    def of_file(stage: int, values: dict[str, Any]) -> Config:
        return config(stage, deepspeed={"deepspeed_config": ds_file(values)})

    buckets = {"stage": 1, "reduce_bucket_size": 4000, "allgather_bucket_size": 4000}
    quantized = {"stage": 3, "zero_quantized_weights": True}
    apex = {"optimizer": {"type": "ApexFusedAdam"}, "zero_optimization": buckets}
    return {
        APEX: of_file(1, apex),
        QUANTIZED: of_file(3, {"zero_optimization": quantized}),
        "zero0": config(0),
        "zero0 sgd": config(0, "sgd"),
        "zero2 lion": config(2, "lion"),
        "zero3 muon": config(3, "muon"),
        **{
            f"zero1 bf16 {name}": config(1, name, precision=bf16)
            for name in NAMES
            if name not in ("adam", "sgd", "lion", "muon")  # in other layouts
        },
        "zero1 bf16 muon": config(1, "muon", precision=bf16, optimizer=moments),
        "zero1": config(1),
        "zero2": config(2),
        "zero3": config(3),
        BASE: config(1, precision=bf16),
        "zero2 bf16": config(2, precision=bf16),
        "zero3 bf16": config(3, precision=bf16),
        "zero1 bf16 accumulated": config(1, precision=unaccumulated),
        "zero1 offload": config(1, deepspeed=offload),
        "zero2 bf16 offload": config(2, precision=bf16, deepspeed=offload),
        "zero3 bf16 offload": config(3, precision=bf16, deepspeed=all_offload),
        "zero2 bf16 stochastic": config(2, precision=masters, optimizer=stochastic),
        "zero3 bf16 stochastic": config(3, precision=masters, optimizer=stochastic),
        "zero2 fp16": config(2, precision={**fp16, "initial_loss_scale": 2.0**8}),
        "zero3 fp16 static": config(3, precision={**fp16, "loss_scale": 128.0}),
        "tp2 recomputed": config(1, tp=2, recompute=DEEPSPEED_UNITS),
    }


changed = mock.patch.object
Change = Callable[[Any], Any]
FALSIFIED: dict[str, tuple[str, Change]] = {
    "zero_stage": ("zero2", lambda e: changed(e.optimizer, "partition_gradients", False)),
    "dp_size": (BASE, lambda e: changed(e, "dp_world_size", 1)),
    "hpz_size": ("zero3", lambda e: changed(e.optimizer, "zero_hpz_partition_size", 2)),
    "accumulation_steps": (BASE, lambda e: changed(e._config, "gradient_accumulation_steps", 3)),
    "optimizer": ("zero1 offload", lambda e: changed(e.basic_optimizer, "adam_w_mode", False)),
    "betas": (
        BASE,
        lambda e: mock.patch.dict(e.basic_optimizer.param_groups[-1], betas=(0.9, 0.99)),
    ),
    "epsilon": (
        "zero1 offload",
        lambda e: mock.patch.dict(e.basic_optimizer.param_groups[0], eps=0.1),
    ),
    "momentum": (
        "zero0 sgd",
        lambda e: mock.patch.dict(e.basic_optimizer.param_groups[0], momentum=0.9),
    ),
    "moment_dtypes": ("zero1 bf16 muon", lambda e: changed(e.basic_optimizer, "state_types", {})),
    "matrices": ("zero1 bf16 muon", lambda e: changed(e.basic_optimizer, "_matrices", {})),
    "weight_decay": (
        BASE,
        lambda e: mock.patch.dict(e.basic_optimizer.param_groups[-1], weight_decay=0.1),
    ),
    "clip_grad": (BASE, lambda e: changed(e.optimizer, "clip_grad", 1.0)),
    "param_dtype": (
        BASE,
        lambda e: changed(e.module.final_norm, "weight", torch.nn.Parameter(torch.ones(32))),
    ),
    "accumulation_dtype": (
        "zero2 bf16",
        lambda e: changed(e.optimizer, "gradient_accumulation_dtype", torch.bfloat16),
    ),
    "reduction_dtype": (
        "zero3 bf16",
        lambda e: changed(e.optimizer, "ipg_buckets", {torch.bfloat16: None}),
    ),
    "master_dtype": (
        "zero3 bf16",
        lambda e: changed(
            e.optimizer, "fp32_partitioned_groups_flat", [torch.zeros(1, dtype=torch.bfloat16)]
        ),
    ),
    "optimizer_offload": (
        "zero3 bf16 offload",
        lambda e: changed(e.optimizer, "offload_optimizer", False),
    ),
    "param_offload": ("zero3 bf16 offload", lambda e: changed(e.optimizer, "offload_param", False)),
    "loss_scale": ("zero2 fp16", lambda e: changed(e.optimizer.loss_scaler, "scale_window", 500)),
    "passed_keys": (
        QUANTIZED,
        lambda e: changed(
            e.optimizer.parameter_offload.param_coordinator, "zero_quantized_weights", False
        ),
    ),
}
"""Setting -> the layout on which it is falsified, and how."""

OVERRIDDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "clip_grad": ["zero1 bf16", {"gradient_clipping": 7.0}],
    "accumulation_dtype": ["zero2 bf16", {"data_types": {"grad_accum_dtype": "bf16"}}],
    "optimizer_offload": [
        "zero2 bf16",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ],
    "zero_stage": ["zero1", {"zero_optimization": {"stage": 2}}],
    "accumulation_steps": [
        "zero1 bf16",
        {"train_batch_size": 32, "gradient_accumulation_steps": 4},
    ],
    "loss_scale": ["zero2 fp16", {"fp16": {"hysteresis": 4}}],
    "passed_keys": ["zero3", {"zero_optimization": {"zero_quantized_weights": True}}],
}
"""Setting -> a layout, and keys that DeepSpeed is given with other values than the flags."""


ON_THE_HOST = {
    "megatron_ds/training/exit_conditions.py _largest",
    "all_reduce by megatron_ds/training/exit_conditions.py _largest",
    "megatron_ds/parallel/embedding.py <genexpr>",
    "megatron_ds/engine/optimizers/matrix_optimizer.py _step_elements",
    "megatron_ds/engine/optimizers/stochasticadamw.py _step_flat",
    "megatron_ds/engine/norms.py _sum_on_host",
}
"""Reads of host tensors: the agreement on stopping has its own group for them, numbers of steps are
never moved, and token ids are checked by an assertion on the device where that is not the CPU.
Sums of squares are read on a CPU only."""
DECISIONS = {
    "megatron_ds/engine/step.py _is_dropped",  # stage 0
    "megatron_ds/engine/deepspeed/flat_gradients.py _step_flat",  # bf16, stage 1
    "deepspeed/runtime/utils.py is_invalid_grad_norm",
}
"""Where a step reads its norm, to decide whether it is applied: in one of these places."""
WAITS_OF_DEEPSPEED = {
    "has_overflow",  # fp16's loss scale, and bf16
    "update_offload_overflow_tracker",
    "complete_grad_norm_calculation_for_cpu_offload",
}
"""Functions of DeepSpeed that read tensors in each step."""


@contextmanager
def stand_in_for_apex() -> Iterator[None]:
    modules = {name: ModuleType(name) for name in ("apex", "apex.optimizers", "amp_C")}
    vars(modules["apex.optimizers"])["FusedAdam"] = FusedAdam
    sys.modules.update(modules)
    try:
        yield
    finally:  # what was imported meanwhile stays
        for name in modules:
            del sys.modules[name]


def operators_of(action: Callable[[], object]) -> Counter[str]:
    """The operators, collectives among them, that an action runs in this thread."""
    counts: Counter[str] = Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Operators():
        action()
    return counts


class Quantizer:
    """Stands in for DeepSpeed's quantization kernels, which need an accelerator."""

    Symmetric = 0

    def quantize(self, values: Tensor, groups: int, bits: int, _: int) -> tuple[Tensor, Tensor]:
        rows = values.float().reshape(groups, -1)
        scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
        return (rows / scales).round().to(torch.int8).reshape(values.shape), scales.flatten()

    def dequantize(self, values: Tensor, scales: Tensor, groups: int, *_: int) -> Tensor:
        rows = values.float().reshape(groups, -1) * scales.reshape(groups, 1)
        return rows.reshape(values.shape).half()


def overlaid(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = overlaid(result[key], value) if nested else value
    return result


def mismatch(call: Callable[[], object]) -> str:
    """The message of a settings mismatch; empty if there is none."""
    try:
        call()
    except UserError as error:
        if codes(error.problems) != ["engine-settings-mismatch"]:
            raise
        return str(error)
    return ""


@dataclass
class RankResult:
    settings: dict[str, EngineSettings] = field(default_factory=dict)
    falsified: dict[str, str] = field(default_factory=dict)
    overridden: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, MemoryInputs] = field(default_factory=dict)
    state_bytes: dict[str, StateBytes] = field(default_factory=dict)
    muon_is_compiled: bool = True
    losses: dict[str, list[float]] = field(default_factory=dict)
    reads: dict[str, Counter[str]] = field(default_factory=dict)
    operators: list[Counter[str]] = field(default_factory=list)
    """Of a step between two records, of one without records, and of a recorded step."""


def on_a_rank(rank: int, configs: dict[str, Config]) -> RankResult:
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    CUDAQuantizer.quantizer_cuda_module = Quantizer()
    meshes = prepare()
    result = RankResult()
    for layout, config in configs.items():
        mesh = meshes[config.parallel.tensor_model_parallel_size]
        with stand_in_for_apex():
            engine = build(config.with_values({"record_every": RECORD_EVERY}), mesh)
        result.settings[layout] = engine.settings
        inner = engine._engine
        check = functools.partial(readback.check, engine._parts)
        for setting, (where, change) in FALSIFIED.items():
            if where == layout:
                with change(inner):
                    result.falsified[setting] = mismatch(check)
                assert not mismatch(check)
        batches = batches_of(config, mesh, Samples(128, SHAPE))
        plan = schedules.plan(config, TrainState(), mesh.dp.size)
        first = engine.train_step(batches, plan)
        assert not first.skipped
        state = TrainState().advance(plan, first)
        result.losses[layout] = [float(first.loss), float(engine.params_norm())]
        result.reads[layout] = reads_of_steps(config, mesh, engine, batches, state)
        if layout == BASE:
            for interval in (RECORD_EVERY, None, 1):
                engine._measures._record_every = interval
                step = functools.partial(engine.train_step, batches, plan)
                result.operators.append(operators_of(step))
        result.inputs[layout] = memory_inputs(config, mesh.dp.size, "cpu")
        result.state_bytes[layout] = engine.state_bytes()
    for setting, (layout, changes) in OVERRIDDEN.items():
        generate = engine_build.build_ds_config
        overriding = mock.patch.object(
            engine_build,
            "build_ds_config",
            lambda *arguments: overlaid(generate(*arguments), changes),  # noqa: B023
        )
        with overriding:
            rebuild = functools.partial(build, configs[layout], meshes[1])
            result.overridden[setting] = mismatch(rebuild)
    from deepspeed.runtime.zero.muon import original_muon  # an import at the top compiles it

    result.muon_is_compiled = hasattr(original_muon.muon_update, "_torchdynamo_orig_callable")
    return result


@pytest.fixture(scope="module")
def results() -> list[RankResult]:
    return run_ranks(on_a_rank, 2, layouts())


def test_engine_has_configured_settings_in_every_layout(results: list[RankResult]) -> None:
    assert set(FALSIFIED) == {item.name for item in dataclasses.fields(EngineSettings)}
    for rank in results:
        settings = rank.settings["zero3 bf16 offload"]
        assert (settings.zero_stage, settings.param_dtype, settings.accumulation_dtype) == (
            3,
            "bfloat16",
            "float32",
        )
        assert (settings.optimizer, settings.optimizer_offload) == ("DeepSpeedCPUAdam", "cpu")
        assert rank.settings[APEX].optimizer == "FusedAdam of apex"
        assert rank.losses[APEX] == pytest.approx(rank.losses["zero1"], rel=1e-6)
        assert rank.settings[QUANTIZED].passed_keys == ("zero_optimization.zero_quantized_weights",)
        # Weights are rounded to 8 bits.
        assert rank.losses[QUANTIZED] == pytest.approx(rank.losses["zero3"], rel=1e-3)
        assert rank.losses[QUANTIZED][0] != rank.losses["zero3"][0]


@pytest.mark.parametrize("setting", FALSIFIED)
def test_falsified_setting_of_engine_stops_run(setting: str, results: list[RankResult]) -> None:
    for rank in results:
        assert f"\n  {setting}  " in rank.falsified[setting]


@pytest.mark.parametrize("setting", OVERRIDDEN)
def test_setting_that_deepspeed_got_differently_stops_run(
    setting: str, results: list[RankResult]
) -> None:
    for rank in results:
        assert f"\n  {setting}  " in rank.overridden[setting]


def test_memory_estimate_equals_allocated_states(results: list[RankResult]) -> None:
    for layout, config in layouts().items():
        for rank in results:
            expected = estimate(config, rank.inputs[layout])
            kinds = ["parameters", "master weights", "moments"]
            if (
                rank.inputs[layout].zero_stage == 3
            ):  # the other stages free their buffer after a step
                kinds.append("accumulated gradients")
            for kind in kinds:
                counted = expected.device.get(kind, 0) + expected.host.get(kind, 0)
                # On a CPU, device and host are one memory.
                allocated = sum(sizes.get(kind, 0) for sizes in rank.state_bytes[layout].values())
                assert allocated == pytest.approx(counted), (layout, kind)


def test_unused_muon_optimizer_is_not_compiled(results: list[RankResult]) -> None:
    assert [rank.muon_is_compiled for rank in results] == [False, False]


def test_steps_between_logs_do_not_wait_for_the_device(results: list[RankResult]) -> None:
    """They wait once they have the norm, to decide whether to step.

    Claim (precision): between two logs only the optimizers wait for the device, once they have the
    norm
    """
    for rank in results:
        for layout in layouts():
            if layout == APEX:  # plain AdamW stands in for it, which reads its step counters
                continue
            places = set(rank.reads[layout]) - ON_THE_HOST
            assert len(places & DECISIONS) == 1, layout
            others = places - DECISIONS
            assert all(place.startswith("deepspeed/") for place in others), (layout, others)
            assert {place.split()[-1] for place in others} <= WAITS_OF_DEEPSPEED, layout


def test_steps_between_records_do_what_steps_without_records_do(results: list[RankResult]) -> None:
    """Claim (logging): between two records of `--record-every` a step runs the operators and
    collectives of a step without records, and waits for the device no more often"""
    for rank in results:
        between, without, recorded = rank.operators
        assert between == without
        assert sum(recorded.values()) > sum(without.values())
        assert any("allreduce" in name for name in between)
