"""Packed documents in every layout: two ranks train as one process with a dense mask.

Among the cases, each position embedding, ZeRO stage, tensor-parallel size, recompute granularity,
optimizer and flag occurs; one case is compiled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ds.config import Config
from megatron_ds.engine.build import build_engine
from megatron_ds.model.packed_attention import FlexKernel, PackingOptions
from megatron_ds.parallel.mesh import Mesh
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, config_of, plans_of
from tests.dist.rank_jobs import JobResults, run_jobs, training
from tests.dist.reference import EOD, train_reference
from tests.problems import raises_problem
from tests.unit.model.dense import dense_flex

SAMPLES = parity_cases.SAMPLES.with_document_ends(0.2)
BOTH = (True, True)
CASES: dict[str, tuple[Case, tuple[bool, bool], str | None]] = {
    # First, because ZeRO-3 leaves DeepSpeed's linear layer in torch, which some torch miscompiles.
    "compiled": (Case(2, 1, 2, 1, "gqa", "adamw"), BOTH, None),
    "zero0 learned full": (Case(2, 0, 2, 1, "learned", "sgd"), BOTH, "full"),
    "zero1 rope selective": (Case(2, 1, 2, 4, "rope", "adamw"), BOTH, "selective"),
    "zero2 alibi": (Case(2, 2, 2, 1, "alibi", "adamw"), (False, True), None),
    "zero3 learned": (Case(2, 3, 1, 4, "learned", "adamw"), BOTH, None),
    "zero3 gqa": (Case(2, 3, 1, 1, "gqa", "sgd"), (False, True), "full"),
    "zero1 rope positions": (Case(2, 1, 1, 1, "rope", "sgd"), (True, False), None),
    "dropout": (Case(2, 1, 2, 4, "learned", "adamw"), BOTH, None),
    "dropout selective": (Case(2, 1, 2, 4, "learned", "adamw"), BOTH, "selective"),
    "dropout full": (Case(2, 1, 2, 4, "learned", "adamw"), BOTH, "full"),
}
"""By name: layout, whether positions and attention end with a document, recompute granularity."""
WITH_DROPOUT = [name for name in CASES if name.startswith("dropout")]


def config(name: str) -> Config:
    case, (positions, attention), granularity = CASES[name]
    dropout = 0.1 if name in WITH_DROPOUT else 0.0
    return config_of(
        case,
        model={"attention_dropout": dropout, "hidden_dropout": dropout},
        data={"reset_position_ids": positions, "reset_attention_mask": attention},
        recompute={"recompute_granularity": granularity},
        runtime={"seed": parity_cases.SEED, "compile": name == "compiled"},
    )


def check_no_kernel(engine: Any) -> None:
    packing: PackingOptions = engine.module.packing
    assert packing.kernel is None


@pytest.fixture(scope="module")
def outcomes() -> JobResults:
    jobs = {
        name: training(config(name), plans_of(case), SAMPLES, check_no_kernel)
        for name, (case, *_) in CASES.items()
    }
    return run_jobs(2, jobs)


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITH_DROPOUT])
def test_layout_equals_one_process_with_a_dense_mask(name: str, outcomes: JobResults) -> None:
    case, flags, _ = CASES[name]
    rules = PackingOptions(EOD, *flags, FlexKernel(dense_flex))
    reference = train_reference(config(name), SAMPLES, plans_of(case), rules)
    for rank, run in enumerate(outcomes.of(name)):
        assert differences(run, reference) == [], f"rank {rank}"
        # Each layer is compiled in two parts, before and after its attention, once for all
        # micro-batches, whatever their document lengths.
        assert (run.notes["compiled"] > 0) == (name == "compiled")
        assert run.notes["compiled"] <= 6 * parity_cases.SHAPE["num_layers"]


@pytest.mark.parametrize("name", WITH_DROPOUT[1:])
def test_recomputation_drops_what_was_dropped(name: str, outcomes: JobResults) -> None:
    for run, stored in zip(outcomes.of(name), outcomes.of(WITH_DROPOUT[0]), strict=True):
        assert run.losses == stored.losses
        assert run.norms == stored.norms


def test_bounds_change_what_is_learned() -> None:
    settings, plans = config("zero3 learned"), plans_of(CASES["zero3 learned"][0])[:1]
    losses = [
        train_reference(settings, SAMPLES, plans, rules).losses
        for rules in (None, PackingOptions(EOD, True, True))
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_tokenizer_without_eod_is_rejected() -> None:
    with raises_problem("tokenizer-without-eod"):
        build_engine(config("zero3 learned"), Mesh.single(), torch.device("cpu"), eod=None)
