"""--compile: compiled layers give the losses and weights of eager layers.

On a CPU compiled layers draw the dropout masks of eager ones. Inductor's own numbers, which other
devices use, are compared between stored and recomputed activations.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ds.model import block
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.engine_harness import Meshes
from tests.dist.parity_cases import Case
from tests.dist.rank_jobs import (
    Job,
    JobResults,
    Jobs,
    case_training,
    has_proofs,
    run_by_world,
)
from tests.dist.reference import Run

ONE_PROCESS = Case(1, 1, 1, 4, "learned", "adamw")
ZERO3 = Case(2, 3, 1, 1, "learned", "adamw")
FOLDED = {"parallel": {"pipeline_schedule": "dualpipev"}}
TWO_STAGES = Case(2, 1, 1, 4, "learned", "adamw", FOLDED, pp=2)
STAGED_MODEL = {"num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.2}
WITH_DROPOUT = Case(2, 1, 2, 1, "latent", "adamw")
MOE = {"num_experts": (4,), "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 24}
EXPERTS = Case(2, 1, 1, 1, "swiglu", "adamw", {"moe": MOE}, ep=2)
CONTEXT = Case(2, 1, 1, 1, "gqa", "adamw", cp=2)
BY_LAYER = {"parallel": {"cp_comm_type": ("p2p", "a2a")}}
IN_MAKE_TEST = {"context": CONTEXT}
LAYOUTS = {
    **IN_MAKE_TEST,
    "experts": EXPERTS,
    "context by layer with zero3": Case(2, 3, 1, 1, "learned", "adamw", BY_LAYER, cp=2),
    "context with latent attention": Case(2, 1, 1, 1, "latent", "adamw", cp=2),
    "ulysses": Case(2, 1, 1, 1, "learned", "adamw", sp=2),
    "ulysses with experts": Case(2, 1, 1, 1, "swiglu", "adamw", {"moe": MOE}, sp=2),
    "sequence-parallel": Case(
        2, 1, 2, 1, "learned", "adamw", {"parallel": {"sequence_parallel": True}}
    ),
    "zero3 with tensor parallelism": Case(2, 3, 2, 1, "gqa", "adamw"),
    "zero3": ZERO3,
}
LOSS_GRAPHS = 3
"""Softmax, and the products with the gradients of the hidden states and of the weight."""
LAYER_GRAPHS = {
    # Before attention, after it, after the experts; their activation, and the shared expert; their
    # choice, the order of the rows, the rows in it, and the sum of the outputs.
    "experts": 9,
    "context": 2,  # before and after attention
    "context by layer with zero3": 3,  # after attention two: the order in memory is another
    "context with latent attention": 2,
    "ulysses": 2,
    "ulysses with experts": 9,
    "sequence-parallel": 1,
    "zero3 with tensor parallelism": 1,
    "zero3": 1,
}
GRAPHS_AFTER_TRIAL = {"experts": 6, "ulysses with experts": 6, "context by layer with zero3": 1}
"""Graphs that the trial, which has no experts and one order in memory, does not compile."""


def job(case: Case, compiled: bool, probe: Any = None, **changes: Any) -> Job:
    runtime = {"seed": parity_cases.SEED, "compile": compiled}
    return case_training(case, probe, runtime=runtime, **changes)


def with_dropout(granularity: str | None, compiled: bool) -> Job:
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    recompute = {"recompute_granularity": granularity}
    return job(WITH_DROPOUT, compiled, model=dropout, recompute=recompute)


def with_inductor_random_numbers(training: Job, meshes: Meshes) -> Any:
    """A training whose compiled dropout draws its own numbers, as on an accelerator."""
    with mock.patch.object(block, "TORCH_RANDOM", {}):
        return training(meshes)


def of_one_process() -> Jobs:
    """The jobs of one rank, which only proofs need."""
    return Jobs((f"one-{on}", job(ONE_PROCESS, on, model=STAGED_MODEL)) for on in (False, True))


def of_layout(name: str, case: Case) -> Jobs:
    probe = expect_release if case is ZERO3 else None
    return Jobs((f"{name}-{compiled}", job(case, compiled, probe)) for compiled in (True, False))


def expect_release(engine: Any) -> None:
    """No layer keeps what ZeRO-3 has gathered for it until the backward pass."""
    gathered: list[StorageWeakRef] = []

    def note(block: nn.Module, _: Any) -> None:
        gathered.extend(StorageWeakRef(each.untyped_storage()) for each in block.parameters())

    def check(*_: Any) -> None:
        assert gathered
        assert all(storage.expired() for storage in gathered)
        for hook in hooks:
            hook.remove()

    model = engine.module
    hooks = [block.register_forward_pre_hook(note) for block in model.blocks()]
    hooks.append(model.final_norm.register_forward_pre_hook(check))


def by_default(training: Job, meshes: Meshes) -> Any:
    """A training as on an accelerator with Triton, without `--compile`."""
    accelerator = type(get_accelerator())
    with mock.patch.object(accelerator, "is_triton_supported", return_value=True):
        return training(meshes)


def expect_compiled_layers(engine: Any) -> None:
    assert engine.module.has_compiled_layers


def proofs() -> Jobs:
    """The jobs of two ranks that `make test` leaves out."""
    jobs = Jobs(
        (f"own-{kept}", partial(with_inductor_random_numbers, with_dropout(kept, True)))
        for kept in (None, "full")
    )
    jobs["stages"] = job(TWO_STAGES, True, model=STAGED_MODEL)
    for name, case in LAYOUTS.items():
        if name not in IN_MAKE_TEST:
            jobs |= of_layout(name, case)
        default = partial(by_default, job(case, False, expect_compiled_layers))
        jobs |= Jobs([(f"{name} by default", default)])
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    two = Jobs(
        (f"selective-{compiled}", with_dropout("selective", compiled)) for compiled in (True, False)
    )
    for name, case in IN_MAKE_TEST.items():
        two |= of_layout(name, case)
    if not has_proofs(request):
        return run_by_world({2: two})
    two |= proofs()
    return run_by_world({1: of_one_process(), 2: two})


def assert_same(compiled: list[Run], others: list[Run]) -> None:
    for run, other in zip(compiled, others, strict=True):
        assert run.notes["compiled"] > 0
        assert differences(run, other) == []


def assert_eager(runs: list[Run]) -> list[Run]:
    assert [run.notes["compiled"] for run in runs] == [0] * len(runs)
    return runs


PROOFS = ("one-True", "own-None", "own-full", "stages")


@pytest.mark.parametrize(
    "name", ["selective-True", *(pytest.param(n, marks=pytest.mark.proof) for n in PROOFS)]
)
def test_there_is_no_graph_break(name: str, outcomes: JobResults) -> None:
    """Claim (precision): compiled layers have no graph breaks, with attention dropout too"""
    for run in outcomes.of(name):
        assert run.notes["compiled"] > 0
        assert run.notes["graph breaks"] == 0


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.proof)
        for name in LAYOUTS
    ],
)
def test_layers_are_compiled_around_exchanges(name: str, outcomes: JobResults) -> None:
    """The sums of tensor parallelism are in the graphs; what gathers parameters is between them.

    Claim (precision): `--compile` equals eager execution with experts, context parallelism,
    DeepSpeed-Ulysses, ZeRO 3 and tensor parallelism, and all layers share one graph, or two around
    attention, or those around the experts, too
    """
    runs = outcomes.of(f"{name}-True")
    assert_same(runs, assert_eager(outcomes.of(f"{name}-False")))
    for run in runs:
        assert run.notes["graph breaks"] == 0
        assert run.notes["compiled"] == LAYER_GRAPHS[name] + LOSS_GRAPHS


@pytest.mark.proof
@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_of_each_layout_pass_their_trial(name: str, outcomes: JobResults) -> None:
    """Experts' layers compile what is between their exchanges and products in the first step.

    Claim (precision): on a device with Triton, layers are compiled by default in all of these
    layouts, after a trial with whose graphs the steps run
    """
    runs = outcomes.of(f"{name} by default")
    for run, other in zip(runs, assert_eager(outcomes.of(f"{name}-False")), strict=True):
        assert differences(run, other) == []
        assert run.notes["graph breaks"] == 0
        assert run.notes["compiled"] == GRAPHS_AFTER_TRIAL.get(name, 0)


@pytest.mark.proof
def test_one_process_matches_eager(outcomes: JobResults) -> None:
    """Claim (precision): `--compile` equals eager execution, within 1e-5 in fp32"""
    assert_same(outcomes.of("one-True"), assert_eager(outcomes.of("one-False")))


@pytest.mark.proof
def test_stages_match_one_eager_process(outcomes: JobResults) -> None:
    assert_same(outcomes.of("stages"), outcomes.of("one-False") * 2)


def test_tensor_parallel_recomputed_dropout_matches_eager(outcomes: JobResults) -> None:
    """Claim (precision): and so it does with tensor parallelism, dropout and activation
    checkpointing (on a CPU, where compiled layers draw the masks of eager ones)

    Claim (precision): `--compile` equals eager execution, within 1e-5 in fp32
    """
    assert_same(outcomes.of("selective-True"), assert_eager(outcomes.of("selective-False")))


@pytest.mark.proof
def test_full_recomputation_repeats_compiled_dropout_masks(outcomes: JobResults) -> None:
    assert_same(outcomes.of("own-full"), outcomes.of("own-None"))
