"""Number formats and offloading on two ranks, compared with one process in fp32.

bf16 agrees with fp32 at every stage and tensor-parallel size and accumulates gradients in fp32.
Offloaded optimizer states and parameters change nothing. Layouts that DeepSpeed computes wrongly
are rejected.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from megatron_ds.config import Config, DeepSpeedConfig, PrecisionConfig, ScheduleConfig
from megatron_ds.engine.ds_config_merge import merge_file
from megatron_ds.train_state import StepPlan
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, complete_config, config_of, plans_of
from tests.dist.rank_jobs import Job, JobResults, run_jobs
from tests.dist.reference import Samples, Tensors, train_reference
from tests.problems import codes

LAYOUTS = list(itertools.product((1, 2, 3), (1, 2)))
"""ZeRO stage and tensor-parallel size."""
OFFLOADED = [(stage, tp, "none") for stage, tp in LAYOUTS] + [(3, 1, "cpu"), (3, 2, "cpu")]
"""Stage, tensor-parallel size and device of the parameters; optimizer states are in host memory."""
SAMPLES = Samples(parity_cases.STEPS * parity_cases.SAMPLES_PER_STEP, parity_cases.SHAPE)

MICRO_BATCHES = 96
# All micro-batches are equal, so each adds the same gradient to a sum up to 95 times as large. bf16
# has 8 significant bits: rounding errors, equal too, add up to percents of the gradient. fp32 loses
# nothing.
EQUAL_SAMPLES = Samples(2 * MICRO_BATCHES, parity_cases.SHAPE, different=1)


def layout(stage: int, tp: int) -> Case:
    return Case(2, stage, tp, 4 if stage == tp else 1, "learned", "adamw")


def bf16_config(stage: int, tp: int, folder: Path) -> Config:
    config = config_of(layout(stage, tp), folder)
    return dataclasses.replace(config, precision=PrecisionConfig(bf16=True))


def offloaded_config(stage: int, tp: int, remote: str, folder: Path) -> Config:
    config = config_of(layout(stage, tp), folder)
    deepspeed = dataclasses.replace(config.deepspeed, cpu_optimizer=True, remote_device=remote)
    return complete_config(dataclasses.replace(config, deepspeed=deepspeed), 2)


def accumulating_config(stage: int, in_fp32: bool, folder: Path) -> Config:
    """Two data-parallel ranks, many micro-batches of one sample, plain SGD."""
    config = config_of(Case(2, stage, 1, 1, "learned", "sgd"), folder)
    return dataclasses.replace(
        config,
        precision=PrecisionConfig(bf16=True, accumulate_allreduce_grads_in_fp32=in_fp32),
        schedule=ScheduleConfig(
            micro_batch_size=1, global_batch_size=2 * MICRO_BATCHES, train_iters=1
        ),
    )


ONE_LONG_STEP = [StepPlan(1, 2 * MICRO_BATCHES, MICRO_BATCHES, 1.0, 0.0, seq_length=99)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    folder = tmp_path_factory.mktemp("precision")
    jobs = []
    for stage, tp in LAYOUTS:
        config, plans = bf16_config(stage, tp, folder), plans_of(layout(stage, tp))
        jobs.append(Job(f"bf16-{stage}-{tp}", config, plans, SAMPLES))
    for stage, tp, remote in OFFLOADED:
        config = offloaded_config(stage, tp, remote, folder)
        plans = plans_of(layout(stage, tp))
        jobs.append(Job(f"offloaded-{stage}-{tp}-{remote}", config, plans, SAMPLES))
    for stage, in_fp32 in itertools.product((1, 2, 3), (True, False)):
        config = accumulating_config(stage, in_fp32, folder)
        jobs.append(Job(f"accumulating-{stage}-{in_fp32}", config, ONE_LONG_STEP, EQUAL_SAMPLES))
    return run_jobs(2, jobs, folder)


@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_bf16_follows_fp32(stage: int, tp: int, outcomes: JobResults, tmp_path: Path) -> None:
    reference = train_reference(
        config_of(layout(stage, tp), tmp_path), SAMPLES, plans_of(layout(stage, tp))
    )
    for run in outcomes.of(f"bf16-{stage}-{tp}"):
        assert run.notes["types"] == ["torch.bfloat16", "torch.float32"]
        assert run.losses == pytest.approx(reference.losses, rel=0, abs=1e-2)
        assert run.losses != reference.losses
        assert run.norms == pytest.approx(reference.norms, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_gradients_are_accumulated_in_fp32(
    stage: int, outcomes: JobResults, tmp_path: Path
) -> None:
    """The tolerance leaves room for the bf16 arithmetic of the model itself."""
    reference = train_reference(
        accumulating_config(stage, True, tmp_path), EQUAL_SAMPLES, ONE_LONG_STEP
    )
    (wanted,) = reference.gradients
    for run in outcomes.of(f"accumulating-{stage}-True"):
        assert run.notes["types"] == ["torch.bfloat16", "torch.float32"]
        assert distance(run.gradients[0], wanted) < 0.01
    for run in outcomes.of(f"accumulating-{stage}-False"):
        assert run.notes["types"] == ["torch.bfloat16", "torch.bfloat16"]
        assert distance(run.gradients[0], wanted) > 0.03


def distance(one: Tensors, other: Tensors) -> float:
    """Norm of the difference of all tensors, relative to the norm of `other`."""
    off = sum((one[name] - other[name]).square().sum() for name in other)
    return float(torch.as_tensor(off / sum(x.square().sum() for x in other.values())).sqrt())


@pytest.mark.parametrize(("stage", "tp", "remote"), OFFLOADED)
def test_offloading_changes_nothing(
    stage: int, tp: int, remote: str, outcomes: JobResults, tmp_path: Path
) -> None:
    """The process it is held against knows no offloading; the parity cases run without it equal the
    same process."""
    reference = train_reference(
        config_of(layout(stage, tp), tmp_path), SAMPLES, plans_of(layout(stage, tp))
    )
    for run in outcomes.of(f"offloaded-{stage}-{tp}-{remote}"):
        assert differences(run, reference) == []


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_0_is_fp32_only(kind: str, stage: int, tmp_path: Path) -> None:
    config = config_of(layout(max(stage, 1), 1), tmp_path)
    config = dataclasses.replace(
        config,
        precision=PrecisionConfig(**{kind: True}),
        deepspeed=DeepSpeedConfig(zero_stage=stage),
    )
    _, problems = merge_file(config, 2)
    assert codes(problems) == (["zero0-with-half-precision"] if stage == 0 else [])
