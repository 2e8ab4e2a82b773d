"""--sequence-parallel: norms, dropout and residuals on S / TP train as one process.

Among the cases, each ZeRO stage, model, accumulation and optimizer occurs, and 2 and 4
tensor-parallel ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch._inductor import config as inductor

from megatron_ds.model.packed_attention import FlexKernel, PackingOptions
from megatron_ds.train_state import StepPlan
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, config_of, plans_of, reference_of
from tests.dist.rank_jobs import Job, JobResults, case_training, run_jobs, training
from tests.dist.reference import EOD, train_reference
from tests.unit.model.dense import dense_flex

CASES = [
    Case(2, 0, 2, 4, "learned", "adamw"),
    Case(2, 0, 2, 1, "rope", "sgd"),
    Case(2, 1, 2, 1, "alibi", "sgd"),
    Case(2, 1, 2, 4, "swiglu", "adamw"),
    Case(2, 2, 2, 4, "gqa", "sgd"),
    Case(2, 2, 2, 1, "learned", "adamw"),
    Case(2, 3, 2, 1, "tied", "adamw"),
    Case(2, 3, 2, 4, "untied", "sgd"),
    Case(4, 3, 2, 1, "learned", "adamw"),
    Case(4, 2, 2, 4, "alibi", "adamw"),
    Case(4, 1, 4, 1, "rope", "sgd"),
]
LEARNED = Case(2, 1, 2, 4, "learned", "adamw")
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
FULL = {"recompute_granularity": "full"}
HIDDEN_DROPOUT_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "stored": {},
    "selective": {"recompute": {"recompute_granularity": "selective"}},
    "full": {"recompute": FULL},
    "by DeepSpeed": {"recompute": {**FULL, "deepspeed_activation_checkpointing": True}},
    "compiled": {"runtime": {"compile": True}},
}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True}
PACKED = parity_cases.SAMPLES.with_document_ends(0.2)
LENGTHS = (8, 12, 16)
"""Tokens of a sample in each step of a curriculum."""


def check_shapes(engine: Any) -> None:
    """Every layer's output is S / TP of the sequence."""

    def check(layer: Any, inputs: Any, output: Any) -> None:
        assert layer.group.sequence_parallel
        lengths = {length // layer.group.size for length in LENGTHS}
        assert output.shape[0] in lengths
        assert inputs[0].shape == output.shape

    for layer in engine.module.layers.values():
        layer.register_forward_hook(check)


def use_torch_random_numbers(engine: Any) -> None:
    """Compiled dropout draws the numbers of eager dropout."""
    inductor.fallback_random = True


def job(case: Case, *, shard: bool = True, probe: Any = check_shapes, **changes: Any) -> Job:
    parallel = {"sequence_parallel": shard}
    return case_training(case, probe if shard else None, parallel=parallel, **changes)


def curriculum() -> list[StepPlan]:
    plans = zip(plans_of(LEARNED), LENGTHS, strict=True)
    return [dataclasses.replace(plan, seq_length=length) for plan, length in plans]


def jobs() -> dict[str, Job]:
    """The trainings on two ranks other than `CASES`."""
    sharded = {"sequence_parallel": True}
    packed = config_of(LEARNED, parallel=sharded, data=DOCUMENTS)
    found = {
        "dropout": job(LEARNED, model=DROPOUT),
        "replicated": job(LEARNED, model=DROPOUT, shard=False),
        "documents": training(packed, plans_of(LEARNED), PACKED, check_shapes),
        "curriculum": training(config_of(LEARNED, parallel=sharded), curriculum()),
    }
    for name, changes in HIDDEN_DROPOUT_CASES.items():
        probe = check_shapes if name != "compiled" else use_torch_random_numbers
        found[name] = job(LEARNED, probe=probe, model={"hidden_dropout": 0.2}, **changes)
    return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[int, JobResults]:
    """What the selected tests need."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    needed: dict[int, dict[str, Job]] = {2: {}, 4: {}}
    for case in CASES:
        if case in selected:
            needed[case.world][case.name] = job(case)
    if any(item.originalname != test_layout_equals_one_process.__name__ for item in items):
        needed[2] |= jobs()
    return {world: run_jobs(world, needed[world]) for world in needed if needed[world]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(case: Case, outcomes: dict[int, JobResults]) -> None:
    for rank, run in enumerate(outcomes[case.world].of(case.name)):
        assert differences(run, reference_of(case.model, case.optimizer)) == [], f"rank {rank}"


@pytest.mark.parametrize("name", HIDDEN_DROPOUT_CASES)
def test_dropout_masks_are_those_of_one_process(name: str, outcomes: dict[int, JobResults]) -> None:
    reference = train_reference(
        config_of(LEARNED, model={"hidden_dropout": 0.2}),
        parity_cases.SAMPLES,
        plans_of(LEARNED),
        micro_batch_size=LEARNED.micro_batch_size,
    )
    for run in outcomes[2].of(name):
        assert differences(run, reference) == []
        assert (run.notes["compiled"] > 0) == (name == "compiled")
        assert run.notes["graph breaks"] == 0


def test_attention_dropout_is_that_without_sequence_parallelism(
    outcomes: dict[int, JobResults],
) -> None:
    pairs = zip(outcomes[2].of("dropout"), outcomes[2].of("replicated"), strict=True)
    for run, replicated in pairs:
        assert differences(run, replicated) == []


def test_packed_documents_equal_one_process(outcomes: dict[int, JobResults]) -> None:
    rules = PackingOptions(EOD, True, True, FlexKernel(dense_flex))
    config = config_of(LEARNED, data=DOCUMENTS)
    reference = train_reference(config, PACKED, plans_of(LEARNED), rules)
    for run in outcomes[2].of("documents"):
        assert differences(run, reference) == []


def test_changing_lengths_equal_one_process(outcomes: dict[int, JobResults]) -> None:
    reference = train_reference(config_of(LEARNED), parity_cases.SAMPLES, curriculum())
    for run in outcomes[2].of("curriculum"):
        assert differences(run, reference) == []
