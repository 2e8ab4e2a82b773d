"""Sequence-length curriculum with a batch size schedule in tokens.

Lengths 4 to 16 and batches of 4, 8, 16 samples: every stage, layout and kind of activation
checkpointing equals one process that trains on the truncated samples, with the learning rates of
the token schedule. Attention inside documents equals one with a dense mask.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_ds import schedules
from megatron_ds.config import Config, DataConfig, OptimizerConfig, RecomputeConfig, ScheduleConfig
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, complete_config, config_of
from tests.dist.rank_jobs import Job, JobResults, run_jobs
from tests.dist.reference import EOD, Samples, train_reference
from tests.unit.model.dense import dense_flex

WORLD = 2
LENGTHS = [4, 8, 12, 16, 16, 16]
BATCHES = [4, 4, 4, 8, 8, 16]
BEFORE = [0, 16, 48, 96, 224, 352]
"""Tokens before each step: the warmup takes 64, the decay ends at 576."""
RATES = [0.1 + 0.3 * n / 64 if n < 64 else 0.4 * (576 - n) / 512 for n in BEFORE]
SAMPLES = Samples(sum(BATCHES), parity_cases.SHAPE).with_document_ends(0.2)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of a run."""

    stage: int
    tp: int
    model: str = "rope"
    recompute: RecomputeConfig = dataclasses.field(default_factory=RecomputeConfig)
    packed: bool = False
    """Attention and positions restart at document boundaries."""

    @property
    def name(self) -> str:
        recompute = (
            "partitioned"
            if self.recompute.is_by_deepspeed
            else self.recompute.recompute_granularity
        )
        attention = ["packed"] if self.packed else []
        parts = [f"zero{self.stage}", f"tp{self.tp}", self.model, recompute or "stored", *attention]
        return "-".join(parts)


FULL = RecomputeConfig(recompute_granularity="full")
SELECTIVE = RecomputeConfig(recompute_granularity="selective")
PARTITIONED = RecomputeConfig(recompute_granularity="full", partition_activations=True)
LAYOUTS = [
    Layout(0, 1, "learned"),
    Layout(1, 1, "alibi", SELECTIVE),
    Layout(2, 1, "learned"),
    Layout(3, 1, "rope", FULL),
    Layout(1, 2, "learned", FULL),
    Layout(1, 2, "alibi", PARTITIONED),
    Layout(3, 2, "gqa"),
    Layout(3, 1, "learned", FULL, packed=True),
    Layout(1, 2, "alibi", packed=True),
    Layout(1, 2, "gqa", SELECTIVE, packed=True),
]


def curriculum_config(layout: Layout, folder: Path) -> Config:
    config = config_of(Case(WORLD, layout.stage, layout.tp, 4, layout.model, "sgd"), folder)
    config = dataclasses.replace(
        config,
        optimizer=OptimizerConfig(
            optimizer="sgd", lr=0.4, sgd_momentum=0.9, weight_decay=0.01, clip_grad=0.5
        ),
        schedule=ScheduleConfig(
            micro_batch_size=2 * layout.tp,
            step_batch_size_schedule=("0:4 64:8 300:16",),
            curriculum_seqlen=(4, 16, 4),
            curriculum_seqlen_step=4,
            train_tokens=400,
            lr_decay_style="linear",
            lr_warmup_init=0.1,
            lr_warmup_tokens=64,
            lr_decay_tokens=576,
        ),
        data=DataConfig(reset_position_ids=layout.packed, reset_attention_mask=layout.packed),
        recompute=layout.recompute,
    )
    return complete_config(config, WORLD)


def plans_of(config: Config) -> list[StepPlan]:
    """The plans of the training loop."""
    dp_size = config.parallel.data_parallel_size(WORLD)
    state, plans = TrainState(), []
    while state.iteration < schedules.total_iterations(config, dp_size):
        plans.append(schedules.plan(config, state, dp_size))
        state = state.advance(plans[-1], StepResult(0.0, 0.0))
    return plans


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    folder = tmp_path_factory.mktemp("curriculum")
    jobs = []
    for layout in LAYOUTS:
        config = curriculum_config(layout, folder)
        jobs.append(Job(layout.name, config, plans_of(config), SAMPLES))
    return run_jobs(WORLD, jobs, folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_curriculum_equals_one_process(
    layout: Layout, outcomes: JobResults, tmp_path: Path
) -> None:
    config = curriculum_config(layout, tmp_path)
    plans = plans_of(config)
    assert [plan.seq_length for plan in plans] == LENGTHS
    assert [plan.global_batch_size for plan in plans] == BATCHES
    rules = PackingOptions(EOD, True, True, flex=dense_flex) if layout.packed else None
    reference = train_reference(config, SAMPLES, plans, rules)
    assert min(norm for norm in reference.norms if norm is not None) > config.optimizer.clip_grad
    for run in outcomes.of(layout.name):
        assert run.rates == pytest.approx(RATES, rel=1e-12)
        assert differences(run, reference) == []
