"""Pipeline stages train like one process: TP x PP x DP, ZeRO 0 and 1, every partition method, tied
embeddings, accumulation, clipping, dropout, recomputation, documents, batch sizes and lengths that
change.

The reference is that of `test_parity.py`, within 1e-5: loss, norm, every gradient, every weight,
and the evaluation loss after every step but the last. The engine then releases its parameters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.train_state import StepPlan
from tests.dist.compare import differences, differences_in_half_precision
from tests.dist.parity_cases import (
    SAMPLES,
    SAMPLES_PER_STEP,
    SHAPE,
    Case,
    config_of,
    plans_of,
)
from tests.dist.rank_jobs import JobResults, run_jobs, training
from tests.dist.reference import EOD, Samples, evaluate_reference, train_reference

FIVE_LAYERS = {"model": {"num_layers": 5}}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
PER_TOKEN = {"data": {"eod_mask_loss": True}, "optimizer": {"calculate_per_token_loss": True}}
OFFLOAD = {"deepspeed": {"zero_stage": 1, "cpu_optimizer": True}}
PACKED = SAMPLES.with_document_ends(0.1)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A layout, and the changed fields of the configuration by group."""

    name: str
    tp: int
    pp: int
    stage: int
    accumulation: int
    model: str
    optimizer: str
    method: str = "type:transformer"
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    """Samples of each step, if they change."""
    lengths: tuple[int, ...] = ()
    """Tokens per sample of each step, if they change."""
    sequence: bool = False
    """Sequence parallelism."""
    schedule: str = "1f1b"

    @property
    def samples(self) -> Samples:
        return PACKED if "data" in self.changes else SAMPLES

    @property
    def packing(self) -> PackingOptions | None:
        is_packed = self.config.data.reset_attention_mask
        return PackingOptions(EOD, True, True) if is_packed else None

    @property
    def samples_per_mean(self) -> int | None:
        """Samples over whose counted tokens a loss is averaged; None: all of a step."""
        options = self.config
        is_per_token = options.optimizer.calculate_per_token_loss
        return None if is_per_token else options.schedule.micro_batch_size

    @property
    def case(self) -> Case:
        sizes = (4, self.stage, self.tp * self.pp, self.accumulation)
        return Case(*sizes, self.model, self.optimizer)

    @property
    def config(self) -> Config:
        parallel = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "pp_partition_method": self.method,
            "sequence_parallel": self.sequence,
            "pipeline_schedule": self.schedule,
        }
        return config_of(self.case, parallel=parallel, **self.changes)

    @property
    def plans(self) -> list[StepPlan]:
        plans = plans_of(self.case)
        if self.batches:
            micro = self.case.micro_batch_size * (4 // (self.tp * self.pp))
            plans = [
                dataclasses.replace(
                    plan, global_batch_size=size, num_micro_batches=size // micro, seq_length=length
                )
                for plan, size, length in zip(plans, self.batches, self.lengths, strict=True)
            ]
        return plans


CASES = (
    Pipeline("tensor-and-stages", 2, 2, 1, 4, "tied", "grouped"),
    Pipeline(
        "data-and-stages", 1, 2, 1, 4, "gqa", "adamw", "uniform",
        batches=(16, 8, 16), lengths=(8, 16, 12), changes=PER_TOKEN,
    ),
    Pipeline("without-zero", 1, 2, 0, 4, "tied", "adamw", changes=PER_TOKEN),
    Pipeline("without-zero-sharded", 2, 2, 0, 1, "swiglu", "adamw"),
    Pipeline("plain-steps", 2, 2, 0, 4, "learned", "sgd"),
    Pipeline("plain-steps-partitioned", 2, 2, 1, 1, "tied", "sgd"),
    Pipeline("four-stages", 1, 4, 1, 4, "untied", "grouped", "parameters", FIVE_LAYERS),
    Pipeline("listed-layers", 1, 4, 0, 1, "alibi", "sgd", "1,1,2,1", FIVE_LAYERS),
    Pipeline("muon", 1, 4, 1, 4, "tied", "muon", changes=FIVE_LAYERS),
    Pipeline("offload", 1, 2, 1, 4, "rope", "adamw", changes=OFFLOAD),
    Pipeline(
        "lengths-and-batches", 1, 2, 1, 4, "tied", "adamw",
        batches=(16, 8, 16), lengths=(8, 16, 12), changes={"model": DROPOUT},
    ),
    Pipeline(
        "sequence-parallel", 2, 2, 1, 4, "tied", "adamw", sequence=True,
        batches=(16, 8, 16), lengths=(8, 16, 12), changes={"model": {"hidden_dropout": 0.1}},
    ),
    Pipeline("sequence-parallel-without-zero", 2, 2, 0, 1, "learned", "sgd", sequence=True),
    Pipeline(
        "documents", 2, 2, 1, 4, "learned", "adamw", sequence=True,
        changes={"data": DOCUMENTS, "recompute": {"recompute_granularity": "full"}},
    ),
    Pipeline(
        "folded", 2, 2, 1, 4, "tied", "grouped", schedule="dualpipev", sequence=True,
        changes={"model": {"num_layers": 5, "hidden_dropout": 0.1}},
    ),
    Pipeline(
        "folded-lengths-and-batches", 1, 2, 1, 8, "tied", "adamw", schedule="dualpipev",
        batches=(16, 8, 20), lengths=(8, 16, 12),
        changes={"model": {"num_layers": 4, **DROPOUT}},
    ),
    Pipeline(
        "folded-documents", 2, 2, 0, 4, "learned", "adamw", schedule="dualpipev",
        changes={
            "model": {"num_layers": 4},
            "data": DOCUMENTS,
            "recompute": {"recompute_granularity": "full"},
        },
    ),
    Pipeline(
        "folded-bf16", 1, 2, 1, 8, "tied", "adamw", schedule="dualpipev",
        changes={"model": {"num_layers": 4}, "precision": {"bf16": True}},
    ),
    Pipeline(
        "folded-without-zero", 1, 2, 0, 4, "untied", "sgd", "2,1,1,1", FIVE_LAYERS | PER_TOKEN,
        schedule="dualpipev",
    ),
    Pipeline(
        "recomputed-by-deepspeed", 2, 2, 1, 4, "rope", "adamw",
        changes={
            "model": {"hidden_dropout": 0.1},
            "recompute": {
                "recompute_granularity": "full",
                "partition_activations": True,
                "checkpoint_in_cpu": True,
            },
        },
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> JobResults:
    """The selected cases, trained by one set of four ranks."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    jobs = {
        case.name: training(
            case.config,
            case.plans,
            case.samples,
            partial(check_layers, case.sequence),
        )
        for case in dict.fromkeys(cases)
    }
    return run_jobs(4, jobs)


def check_layers(sequence: bool, engine: Any) -> None:
    for layer in engine.module.layers.values():
        assert layer.group.sequence_parallel == sequence


@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[0], marks=pytest.mark.smoke), *CASES[1:]],
    ids=lambda case: case.name,
)
def test_stages_equal_one_process(case: Pipeline, results: JobResults) -> None:
    config, options = case.config, (case.packing, case.samples_per_mean)
    reference = train_reference(config, case.samples, case.plans, *options)
    evaluated = SAMPLES_PER_STEP // min(case.accumulation, 2)
    evaluations = [
        evaluate_reference(config, case.samples, weights, *options, count=evaluated)
        for weights in reference.weights[1:-1]
    ]
    norm = sum(float(value.square().sum()) for value in reference.weights[-1].values()) ** 0.5
    is_exact = config.precision.name == "fp32"
    compare = differences if is_exact else differences_in_half_precision
    tolerance = 1e-5 if is_exact else 1e-2
    for rank, run in enumerate(results.of(case.name)):
        assert compare(run, reference) == [], f"rank {rank}"
        assert run.rates == reference.rates
        assert run.evaluations == pytest.approx(evaluations, rel=tolerance)
        assert run.notes["params norm"] == pytest.approx(norm, rel=tolerance)


def test_copies_of_a_tied_embedding_stay_equal_on_three_replicas() -> None:
    """The sum over three ranks depends on their order, which two stages may have differently.

    `train` compares the copies of weights and gradients bit by bit.
    """
    steps, replicas = 10, 3
    jobs, references = {}, {}
    for stage, precision in ((0, "fp32"), (1, "fp32"), (1, "bf16")):
        case = Case(2 * replicas, stage, 1, 1, "tied", "adamw")
        config = config_of(
            case,
            parallel={"pipeline_model_parallel_size": 2},
            schedule={"micro_batch_size": 1, "global_batch_size": replicas, "train_iters": steps},
            precision={"bf16": precision == "bf16"},
        )
        plan = dataclasses.replace(plans_of(case)[0], global_batch_size=replicas)
        plans = [dataclasses.replace(plan, iteration=number + 1) for number in range(steps)]
        samples = Samples(replicas * steps, SHAPE)
        name = f"zero{stage}-{precision}"
        jobs[name] = training(config, plans, samples, tensors_of={steps})
        references[name] = train_reference(config, samples, plans)
    results = run_jobs(2 * replicas, jobs)
    for name, reference in references.items():
        tolerance = 1e-5 if name.endswith("fp32") else 1e-2
        for run in results.of(name):
            assert run.losses == pytest.approx(reference.losses, rel=tolerance)
            assert run.norms == pytest.approx(reference.norms, rel=10 * tolerance)
