"""Number formats and offloading on two ranks, compared with one process in fp32.

bf16 agrees with fp32 at every stage and accumulates gradients in fp32.
Offloaded optimizer states and parameters change nothing; neither do the settings of DeepSpeed that
only decide when a gradient is summed or sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import data_parallel
from benchmarks.communication import Setting, bytes_of_a_step
from megatron_ds.config import Config
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepPlan
from tests.dist import parity_cases
from tests.dist.compare import differing_bits, differing_names, norm_of, worst_difference
from tests.dist.offload_harness import WITHOUT_LIBAIO, Offload, parity_job, resume, swapping
from tests.dist.parity_cases import Case, config_of, ds_file, reference_of
from tests.dist.rank_jobs import JobResults, Jobs, case_training, has_proofs, run_jobs, training
from tests.dist.reference import Samples, Tensors, train_reference
from tests.proofs.cases import with_proofs

LAYOUTS = [(1, 2), (2, 1), (3, 2)]
"""ZeRO stage and tensor-parallel size; `test_layouts.py` has all pairs."""
OFFLOADED = [(stage, tp, "cpu" if stage == 3 else "none") for stage, tp in LAYOUTS]
"""Stage, tensor-parallel size and device of the parameters; optimizer states are in host memory."""

OFFLOADS = {
    name: Offload(**row)
    for name, row in {
        "nvme-optimizer": {},
        "nvme": {"tp": 2, "parameters": "nvme"},
        "nvme-pipelined": {
            "accumulation": 1,
            "parameters": "nvme",
            "zero": {
                "sub_group_size": 8000,
                "offload_optimizer": {
                    "device": "nvme",
                    "pipeline_read": True,
                    "pipeline_write": True,
                },
            },
        },
        "nvme-parameters": {"optimizer": "cpu", "parameters": "nvme"},
        "partial": {
            "optimizer": "cpu",
            "zero": {"sub_group_size": 8000, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
    }.items()
}
NEEDS_LIBAIO = [name for name in OFFLOADS if name.startswith("nvme")]

TIMING = [
    ("zero_optimization.overlap_comm", 1, 1, False),
    ("zero_optimization.overlap_comm", 2, 1, True),
    ("zero_optimization.overlap_comm", 3, 1, True),
    ("bf16.immediate_grad_update", 1, 2, True),
]
"""Switch of DeepSpeed, ZeRO stage, tensor-parallel size, bf16."""

BF16_MASTERS = [(1, 1, True), (2, 1, False), (3, 2, True)]
"""ZeRO stage, tensor-parallel size, optimizer states in host memory."""

COMMUNICATED = {
    1: {"all-reduce": 4.0, "all-gather": 2.0},
    2: {"all-reduce": 4 * 4.0, "all-gather": 2.0},
    3: {"all-gather": 4 * 2 * 2.0, "reduce-scatter": 4 * 4.0},
}
"""ZeRO stage -> bytes per parameter, as docs/training/zero.md says."""

KEPT = {
    "1": 6 + 12 / 2,
    "2": 2 + 16 / 2,
    "3": 18 / 2,
    "1-offloaded": 6 + 4 / 2 + 16 / 2,
    "2-offloaded": 2 + 4 / 2 + 16 / 2,
}
"""ZeRO stage -> bytes per parameter on two ranks, those in host memory included."""

RESUMED = Offload(
    tp=2,
    accumulation=2,
    parameters="nvme",
    zero={"sub_group_size": 200},  # the flat tensors of matrices are swapped, the others are not
    changes={"precision": {"bf16": True}},
)

ACCUMULATING = [(1, True), (2, True), (3, True), (2, False)]
"""ZeRO stage, whether in fp32."""
LEFT_OUT = (
    "bf16-2-1",
    "nvme-optimizer",
    "nvme-parameters",
    "offloaded-2-1-none",
    "communication-1-offloaded",
    "masters-2-1",
    "accumulating-2-True",
    "communication-1",
)
"""Jobs that only proofs need, besides those of `TIMING[:2]`."""
MICRO_BATCHES = 96
# All micro-batches are equal, so each adds the same gradient to a sum up to 95 times as large. bf16
# has 8 significant bits: rounding errors, equal too, add up to percents of the gradient. fp32 loses
# nothing.
EQUAL_SAMPLES = Samples(2 * MICRO_BATCHES, parity_cases.SHAPE, different=1)
ONE_LONG_STEP = [StepPlan(1, 2 * MICRO_BATCHES, MICRO_BATCHES, 1.0, 0.0, seq_length=99)]


def layout(stage: int, tp: int) -> Case:
    return Case(2, stage, tp, 4 if stage == tp else 1, "learned", "adamw")


def accumulating_config(stage: int, in_fp32: bool) -> Config:
    """Two data-parallel ranks, many micro-batches of one sample, plain SGD."""
    return config_of(
        Case(2, stage, 1, 1, "learned", "sgd"),
        model={"num_layers": 1},
        precision={"bf16": True, "accumulate_allreduce_grads_in_fp32": in_fp32},
        schedule={"micro_batch_size": 1, "global_batch_size": 2 * MICRO_BATCHES, "train_iters": 1},
    )


def switched_case(stage: int, tp: int) -> Case:
    return Case(2, stage, tp, 4, "learned", "adamw", batches=(16, 16))


def switched(switch: str, stage: int, tp: int, *, bf16: bool, value: bool) -> Config:
    """A configuration with a switch of DeepSpeed, several buckets and accumulation."""
    block, key = switch.split(".")
    values: dict[str, Any] = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 4000}}
    values.setdefault(block, {})[key] = value
    return config_of(
        switched_case(stage, tp),
        precision={"bf16": bf16},
        deepspeed={"deepspeed_config": ds_file(values)},
    )


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> JobResults:
    jobs = Jobs()
    folder = tmp_path_factory.mktemp("files")
    proofs = has_proofs(request)
    switches = TIMING if proofs else TIMING[2:]
    for (switch, stage, tp, bf16), value in itertools.product(switches, (True, False)):
        config = switched(switch, stage, tp, bf16=bf16, value=value)
        plans = parity_cases.plans_of(switched_case(stage, tp))
        jobs[f"{switch}-{stage}-{tp}-{bf16}-{value}"] = training(config, plans)
    for stage, tp in LAYOUTS:
        job = case_training(layout(stage, tp), precision={"bf16": True})
        jobs[f"bf16-{stage}-{tp}"] = job
    for stage, tp, is_offloaded in BF16_MASTERS:
        jobs[f"masters-{stage}-{tp}"] = case_training(
            layout(stage, tp),
            precision={"bf16": True, "bf16_master_weights": True},
            deepspeed={"cpu_optimizer": is_offloaded, "zero_stage": stage},
        )
    for stage, tp, remote in OFFLOADED:
        offload = {"cpu_optimizer": True, "remote_device": remote}
        job = case_training(layout(stage, tp), deepspeed=offload)
        jobs[f"offloaded-{stage}-{tp}-{remote}"] = job
    for name, offload in OFFLOADS.items():
        if name not in NEEDS_LIBAIO or WITHOUT_LIBAIO is None:
            jobs[name] = parity_job(offload, folder)
    if WITHOUT_LIBAIO is None:
        loaded = {"nvme": RESUMED, "cpu": replace(RESUMED, optimizer="cpu", parameters="cpu")}
        jobs["resume"] = swapping(functools.partial(resume, RESUMED, loaded, folder))
    for stage, in_fp32 in ACCUMULATING:
        config = accumulating_config(stage, in_fp32)
        jobs[f"accumulating-{stage}-{in_fp32}"] = training(config, ONE_LONG_STEP, EQUAL_SAMPLES)
    for name in KEPT:
        jobs[f"communication-{name}"] = functools.partial(communicate, name)
    jobs["bare loop"] = compare_with_bare_loop
    left_out = () if proofs else LEFT_OUT
    return run_jobs(2, Jobs((name, job) for name, job in jobs.items() if name not in left_out))


def communicate(name: str, meshes: dict[int, Mesh]) -> dict[str, Any]:
    """Bytes per parameter of a step of four micro-batches in bf16."""
    stage, _, is_offloaded = name.partition("-")
    offload = "optimizer" if is_offloaded else ""
    return bytes_of_a_step(Setting(int(stage), "bf16", 4, offload=offload), meshes[1], 64)


def compare_with_bare_loop(meshes: dict[int, Mesh]) -> dict[str, float]:
    """Losses after a few steps of the two loops of benchmarks/data_parallel.py."""
    shape = dataclasses.replace(data_parallel.SHAPES["tiny"], layers=1, hidden=32, vocab=64)
    found = data_parallel.compare(shape, 1, 0.0)
    assert found["ratio"] > 0 < found["cpu_ratio"]
    losses: dict[str, float] = found["losses"]
    return losses


@pytest.mark.parametrize(("stage", "tp"), with_proofs(LAYOUTS, LAYOUTS[1:2]))
def test_bf16_follows_fp32(stage: int, tp: int, outcomes: JobResults) -> None:
    """Claim (precision): bf16 follows fp32"""
    reference = reference_of("learned", "adamw")
    for run in outcomes.of(f"bf16-{stage}-{tp}"):
        assert run.notes["types"] == ["torch.bfloat16", "torch.float32"]
        assert run.losses == pytest.approx(reference.losses, rel=0, abs=1e-2)
        assert run.losses != reference.losses
        assert run.norms == pytest.approx(reference.norms, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "tp", "is_offloaded"), with_proofs(BF16_MASTERS, BF16_MASTERS[1:2])
)
def test_bf16_master_weights_follow_fp32(
    stage: int, tp: int, is_offloaded: bool, outcomes: JobResults
) -> None:
    """As closely as a bf16 run with master weights in fp32: see docs/training/zero.md.

    The engine itself reports the type of its master weights, which `build` compares.
    """
    reference = reference_of("learned", "adamw")
    for run in outcomes.of(f"masters-{stage}-{tp}"):
        assert run.losses == pytest.approx(reference.losses, rel=0, abs=2e-3)
        assert run.norms == pytest.approx(reference.norms, rel=0.01)
        errors = [
            worst_difference(*pair)
            for pair in zip(run.weights, reference.weights, strict=True)
            if pair[0]
        ]
        assert len(errors) == 3
        assert max(errors)[0] <= 0.06, max(errors)
        assert all(torch.equal(w, w.bfloat16().float()) for w in run.weights[-1].values())


@functools.cache
def accumulated_alone() -> Tensors:
    """The gradient of one process."""
    reference = train_reference(accumulating_config(1, True), EQUAL_SAMPLES, ONE_LONG_STEP)
    return reference.gradients[0]


@pytest.mark.parametrize(("stage", "in_fp32"), with_proofs(ACCUMULATING, ACCUMULATING[1:2]))
def test_bf16_gradients_are_accumulated_in_fp32(
    stage: int, in_fp32: bool, outcomes: JobResults
) -> None:
    """The tolerance leaves room for the bf16 arithmetic of the model itself.

    Claim (precision): bf16 gradients are accumulated in fp32
    """
    wanted = accumulated_alone()
    for run in outcomes.of(f"accumulating-{stage}-{in_fp32}"):
        accumulated = "torch.float32" if in_fp32 else "torch.bfloat16"
        assert run.notes["types"] == ["torch.bfloat16", accumulated]
        errors = {name: run.gradients[0][name] - wanted[name] for name in wanted}
        off = norm_of(errors) / norm_of(wanted)
        assert off < 0.01 if in_fp32 else off > 0.03, off


@pytest.mark.parametrize(("stage", "tp", "remote"), with_proofs(OFFLOADED, OFFLOADED[1:2]))
def test_offloading_changes_nothing(stage: int, tp: int, remote: str, outcomes: JobResults) -> None:
    """The process it is compared with knows no offloading; the parity cases run without it equal
    the same process.

    Claim (precision): CPU offload of optimizer and parameters changes nothing, within 1e-5 in fp32
    """
    reference = reference_of("learned", "adamw")
    assert outcomes.differences(f"offloaded-{stage}-{tp}-{remote}", reference) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.libaio] if name in NEEDS_LIBAIO else []),
                *([pytest.mark.proof] if name in LEFT_OUT else []),
            ],
        )
        for name in OFFLOADS
    ],
)
def test_states_on_a_disk_change_nothing(name: str, outcomes: JobResults) -> None:
    reference = reference_of("learned", "adamw")
    assert outcomes.differences(name, reference) == []
    for run in outcomes.of(name):
        assert run.notes["params norm"] == pytest.approx(norm_of(reference.weights[-1]), rel=1e-5)


@pytest.mark.libaio
@pytest.mark.parametrize("loaded", ["nvme", "cpu"])
def test_resume_from_states_on_a_disk_is_exact(loaded: str, outcomes: JobResults) -> None:
    """Bit for bit, wherever the run that loads the checkpoint keeps its states.

    Claim (non-finite): weights that are not finite are neither loaded nor saved, and no checkpoint
    is removed after a skipped step
    """
    for seen in outcomes.of("resume"):
        results, weights, finite = seen[loaded]
        expected, continued, _ = seen["continued"]
        assert finite == [False, True]  # a checkpoint with a NaN, and the right one after it
        assert results == expected
        assert differing_names(weights, continued) == []
        assert differing_names(weights, seen["saved"][1]) != []


@pytest.mark.parametrize(("switch", "stage", "tp", "bf16"), with_proofs(TIMING, TIMING[:2]))
def test_when_a_gradient_is_sent_changes_no_bit(
    switch: str, stage: int, tp: int, bf16: bool, outcomes: JobResults
) -> None:
    """Claim (precision): overlapped gradient reduction, and bf16 gradients added to their
    accumulator at once, change no bit on two ranks"""
    name = f"{switch}-{stage}-{tp}-{bf16}"
    for on, off in zip(outcomes.of(f"{name}-True"), outcomes.of(f"{name}-False"), strict=True):
        assert differing_bits(on, off) == []


@pytest.mark.parametrize("stage", with_proofs(COMMUNICATED, [1]))
def test_stages_communicate_the_documented_bytes(stage: int, outcomes: JobResults) -> None:
    """Claim (precision): the bytes that each ZeRO stage communicates are listed in
    [zero.md](../training/zero.md#communication)"""
    for found in outcomes.of(f"communication-{stage}"):
        assert found["messages"] == pytest.approx(COMMUNICATED[stage], rel=0.02)


@pytest.mark.parametrize("name", with_proofs(KEPT, ["1", "1-offloaded"]))
def test_stages_keep_the_documented_bytes(name: str, outcomes: JobResults) -> None:
    """Between backward pass and optimizer step on two ranks: the table of docs/training/zero.md."""
    for found in outcomes.of(f"communication-{name}"):
        assert found["states"] == pytest.approx(KEPT[name], rel=0.01)


def test_training_without_zero_equals_the_bare_loop_that_it_is_timed_against(
    outcomes: JobResults,
) -> None:
    for losses in outcomes.of("bare loop"):
        engine, bare = losses.values()
        assert engine == pytest.approx(bare, rel=1e-5)
