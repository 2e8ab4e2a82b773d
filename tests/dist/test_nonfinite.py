"""A gradient that is not finite, or a spike, on one rank: all ranks skip the step, and nothing
changes.

Claim (non-finite): a non-finite gradient on one rank leaves no trace, in fp32 and bf16, with
optimizer states on the device or the host
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ds.config import Config
from megatron_ds.engine.spike_guard import SpikeGuard
from megatron_ds.train_state import SpikeLimits
from tests.dist.compare import differing_names
from tests.dist.engine_harness import Meshes, full_weights
from tests.dist.nonfinite_harness import (
    RATES,
    WORLD,
    Layout,
    Training,
    corrupt_each_parameter,
)
from tests.dist.offload_harness import WITHOUT_LIBAIO, Offload, swapping
from tests.dist.rank_jobs import JobResults, Jobs, has_proofs, run_by_world, run_jobs, selected
from tests.dist.rerun_harness import Fault, take_steps
from tests.tables import tables

LAYOUTS = [
    Layout("fp32", 0, 1),
    Layout("bf16", 2, 2),
    Layout("bf16", 1, 1, pp=2),
    Layout("fp32", 1, 1, ulysses=2, rank=0),
    Layout("bf16", 3, 1, offload=True),
]
PROOFS = [
    Layout("fp32", 1, 2),
    Layout("bf16", 3, 1),
    Layout("bf16", 2, 1, ep=2),
    Layout("fp32", 0, 2),
    Layout("fp32", 2, 1),
    Layout("fp32", 3, 2),
    Layout("bf16", 1, 1),
    Layout("bf16", 3, 2, True),
    Layout("fp32", 0, 1, pp=2, rank=0),
    Layout("bf16", 3, 1, ulysses=2),
    Layout("fp32", 1, 1, ep=2),
    Layout("bf16", 1, 1, pp=2, offload=True),
    Layout("bf16", 2, 2, offload=True),
    Layout("fp32", 2, 1, offload=True),
]
"""With them, every supported pair of precision, ZeRO stage and tensor-parallel size."""
SPIKES = [Layout("fp32", 2, 2, True), Layout("fp16", 3, 2), Layout("bf16", 1, 1, ep=2, rank=0)]
SPIKE_PROOFS = [
    Layout("fp32", 0, 2),
    Layout("bf16", 1, 1, pp=2),
    Layout("fp32", 1, 1),
    Layout("bf16", 3, 1),
    Layout("fp32", 0, 1, pp=2),
    Layout("fp32", 2, 1, ep=2),
    Layout("fp16", 1, 1, offload=True),
    Layout("bf16", 1, 2),
    Layout("fp32", 2, 1, ulysses=2),
    Layout("bf16", 3, 1, offload=True),
]
COPIES = [
    Layout("fp32", 0, 2),
    Layout("fp32", 1, 2, True, experts=2),
    Layout("fp32", 2, 2, offload=True),
    Layout("bf16", 3, 2),
    Layout("fp32", 1, 1, pp=2),
    Layout("bf16", 2, 1, ep=2),
]
COPY_PROOFS = [
    Layout("bf16", 1, 2),
    Layout("fp32", 2, 2),
    Layout("fp32", 3, 2, True, experts=2),
    Layout("fp32", 1, 1),
    Layout("bf16", 1, 2, True, experts=2),
    Layout("bf16", 2, 2),
    Layout("fp16", 1, 2),
    Layout("fp16", 3, 2),
    Layout("fp32", 3, 2, offload=True),
    Layout("fp32", 0, 1, pp=2),
    Layout("bf16", 1, 1, pp=2),
    Layout("bf16", 1, 1, pp=2, offload=True),
    Layout("fp32", 1, 1, ulysses=2),
    Layout("fp32", 1, 2, rank=3, world=4),
    Layout("bf16", 1, 2, ep=2, rank=1, world=4),
    Layout("fp32", 2, 2, True, ep=2, rank=3, world=4),
    Layout("bf16", 3, 2, rank=3, world=4),
    Layout("fp32", 0, 2, rank=1, world=4),
    Layout("fp32", 1, 2, True, pp=2, rank=3, world=4),
]
SHARDED = (
    "word.weight",
    "qkv.weight",
    "qkv.bias",
    "proj.weight",
    "fc_in.weight",
    "fc_in.bias",
    "fc_out.weight",
)
"""Ends of the names of parameters that tensor-parallel ranks shard."""
ON_DISK = pytest.param("disk", marks=pytest.mark.libaio)
SIGMA = 50.0
WINDOW = 4
FAULTS = tables(__file__)["faults"]
FAULT_PROOFS = tables(__file__)["proofs"]


@dataclass(frozen=True)
class OnDisk:
    """ZeRO-3 with parameters and states in files."""

    folder: Path
    rank: int = WORLD - 1

    def config(self, **optimizer: Any) -> Config:
        """As `Layout.config`."""
        offload = Offload(accumulation=2, parameters="nvme")
        return offload.config(self.folder, schedule=RATES, optimizer=optimizer)


def train_with_skipped_step(
    layout: Layout | OnDisk,
    value: float,
    good_steps: int,
    optimizer: dict[str, Any],
    meshes: Meshes,
) -> dict[str, Any]:
    """Good steps, one with a corrupted gradient, a good one, and a run that omits the corrupted."""
    config = layout.config(**optimizer)
    steps = good_steps + 2
    mesh = meshes.of(config.parallel)
    run = Training(config, mesh, steps)
    good = [run.step() for _ in range(good_steps)]
    before = full_weights(run.engine, mesh)
    has_moments = run.has_moments()
    skipped, changed = run.corrupted_step(value, layout.rank)
    last = run.step()
    end = full_weights(run.engine, mesh)
    run.close()
    results = [*good, skipped, last]

    reference = Training(config, mesh, steps)
    for _ in range(good_steps):
        reference.step()
    for _ in range(2):  # the samples of one step
        next(reference.batches)
    expected = reference.step()
    differences = differing_names(end, full_weights(reference.engine, mesh))
    reference.close()
    return {
        "skipped": [result.skipped for result in results],
        "spikes": [result.is_spike for result in results],
        "compared": [result.compared for result in results],
        "losses": [float(result.loss) for result in results],
        "norm": skipped.grad_norm,
        "loss scales": [result.loss_scale for result in results],
        "has moments": has_moments,
        "changed by the skipped step": changed,
        "trained": differing_names(before, end),
        "differences": differences,
        "norms": (last.grad_norm, expected.grad_norm),
        "rates": (run.rates[good_steps:], reference.rates[good_steps:]),
        "state": run.state,
    }


def compare_with_limits(meshes: Meshes) -> list[tuple[bool, tuple[float, float] | None]]:
    """Two data-parallel ranks with the losses 1 and 5."""
    seen = []
    for limits in (SpikeLimits(3.5, 2.5, 4), SpikeLimits(2.5, 2.5, 4), SpikeLimits(3.5, 1.5, 4)):
        guard = SpikeGuard(limits, torch.device("cpu"))
        guard.losses += [torch.tensor(loss + 4.0 * meshes[1].dp.rank) for loss in (0.0, 2.0)]
        seen.append((guard.exceeds(2.0), guard.compared))
    return seen


def cases(layouts: list[Layout], proofs: list[Layout]) -> list[Any]:
    return [*layouts, *(pytest.param(each, marks=pytest.mark.proof) for each in proofs), ON_DISK]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> JobResults:
    jobs = Jobs({"limits": compare_with_limits})
    proofs = has_proofs(request)
    for layout in (*LAYOUTS, *(PROOFS if proofs else ())):
        value = math.inf if layout.stage % 2 else math.nan
        jobs[str(layout)] = partial(train_with_skipped_step, layout, value, 1, {})
    guard = {"skip_loss_spikes": SIGMA, "skip_loss_spikes_window": WINDOW}
    for layout in (*SPIKES, *(SPIKE_PROOFS if proofs else ())):
        value = 1e4 if layout.precision == "fp16" else 1e6
        jobs[f"spike {layout}"] = partial(train_with_skipped_step, layout, value, 3, guard)
    for item in (*FAULTS, *(FAULT_PROOFS if proofs else ())):
        fault = Fault(item["options"], item.get("weight"), tuple(item.get("ranks", range(WORLD))))
        jobs[item["name"]] = partial(take_steps, Layout(**item["layout"]), fault)
    if WITHOUT_LIBAIO is None:
        disk = OnDisk(tmp_path_factory.mktemp("disk"))
        jobs["disk"] = swapping(partial(train_with_skipped_step, disk, math.nan, 1, {}))
        jobs["spike disk"] = swapping(partial(train_with_skipped_step, disk, 1e6, 3, guard))
    return run_jobs(WORLD, jobs)


@pytest.fixture(scope="module")
def copies(request: pytest.FixtureRequest) -> JobResults:
    jobs = {2: Jobs(), 4: Jobs()}
    for name, params in selected(request):
        if name == test_every_value_of_every_rank_is_checked.__name__:
            layout = params["layout"]
            jobs[layout.world][str(layout)] = partial(corrupt_each_parameter, layout)
    return run_by_world(jobs)


def ranks_with_copies(layout: Layout, name: str) -> int:
    """Number of ranks that have the same elements of a parameter of `layout.rank`."""
    stages = layout.pp if name == "embedding.word.weight" else 1  # tied
    tensor = 1 if name.endswith(SHARDED) else layout.tp
    replicas = layout.world // (layout.tp * layout.pp)
    return stages * tensor * (replicas // (layout.ep if ".experts." in name else 1))


def check_skip(seen: dict[str, Any], good_steps: int) -> None:
    """The step after the good ones changed nothing but the position in the data."""
    assert seen["skipped"] == [False] * good_steps + [True, False]
    assert seen["has moments"]
    assert seen["changed by the skipped step"] == []
    assert seen["trained"] != []
    assert seen["differences"] == []
    assert seen["norms"][0] == seen["norms"][1]
    # The learning rate stays for the skipped step, and the data advances.
    (skipped_rate, last_rate), (expected_rate,) = seen["rates"]
    assert skipped_rate == last_rate == expected_rate
    state = seen["state"]
    steps = good_steps + 1
    assert (state.applied_samples, state.consumed_samples) == (16 * steps, 16 * (steps + 1))
    assert state.skipped_iterations == 1


@pytest.mark.parametrize("layout", cases(LAYOUTS, PROOFS), ids=str)
def test_step_with_nonfinite_gradient_changes_nothing(
    layout: Layout | str, outcomes: JobResults
) -> None:
    for seen in outcomes.of(str(layout)):
        check_skip(seen, 1)
        assert not math.isfinite(seen["norm"])
        assert seen["spikes"] == [False] * 3


@pytest.mark.parametrize(
    "layout",
    [*COPIES, *(pytest.param(each, marks=pytest.mark.proof) for each in COPY_PROOFS)],
    ids=str,
)
def test_every_value_of_every_rank_is_checked(layout: Layout, copies: JobResults) -> None:
    """Claim (non-finite): a gradient that is not finite in any parameter of any rank, counted in
    the norm or not, is skipped by all ranks; the checks of weights before a save and after a load
    see each of them on all ranks, and `--check-weight-hash-across-dp-replicas-interval` compares
    the copies of tensor-parallel ranks and of tied pipeline stages, too
    """
    results = copies.of(str(layout))
    assert len(results[0]) > 13
    for rank, seen in enumerate(results):
        intact = seen.pop("")
        for name, copy in seen.items():
            first = name if rank == layout.rank else None
            assert copy[:4] == (False, [], False, first), name
            count = ranks_with_copies(layout, name) if layout.stage < 3 else 1
            if count == 1:
                assert copy.differs is None
            else:
                assert copy.differs is not None
                differs, ranks = copy.differs
                assert differs == name
                assert ranks == [layout.rank] or (count == len(ranks) == 2 and layout.rank in ranks)
        assert intact.applied
        assert intact[1:] == (intact.changed, True, None, None)
        assert intact.changed


@pytest.mark.parametrize("layout", cases(SPIKES, SPIKE_PROOFS), ids=str)
def test_spike_on_one_rank_changes_nothing(layout: Layout | str, outcomes: JobResults) -> None:
    """Claim (non-finite): a spike of loss or gradient norm on one rank (`--skip-loss-spikes`) is
    skipped by all ranks and changes nothing but the position in the data, at every ZeRO stage and
    precision"""
    results = outcomes.of(f"spike {layout}")
    mean_losses = np.mean([seen["losses"] for seen in results], axis=0)
    for seen in results:
        check_skip(seen, 3)
        assert seen["spikes"] == [False, False, False, True, False]
        assert seen["compared"] == results[0]["compared"]
        compared = [loss for loss, _ in seen["compared"]]
        assert compared == pytest.approx(mean_losses, rel=1e-6)
        assert seen["compared"][3][1] == seen["norm"] > 10
        assert all(norm < 10 for _, norm in seen["compared"][:3])  # without the loss scale
        assert seen["state"].recent_norms == tuple(norm for _, norm in seen["compared"][-WINDOW:])
        # The gradients did not overflow.
        assert len(set(seen["loss scales"])) == 1


def test_ranks_compare_the_mean_of_their_losses(outcomes: JobResults) -> None:
    for seen in outcomes.of("limits"):
        assert seen == [(False, (3.0, 2.0)), (True, (3.0, 2.0)), (True, (3.0, 2.0))]


@pytest.mark.parametrize(
    "fault",
    [*FAULTS, *(pytest.param(item, marks=pytest.mark.proof) for item in FAULT_PROOFS)],
    ids=lambda item: item["name"],
)
def test_the_cause_of_a_bad_step_is_found(fault: dict[str, Any], outcomes: JobResults) -> None:
    """Claim (non-finite): with `--rerun-mode validate_results`, a step that is not finite or a
    spike is repeated on the same and on exchanged ranks, at every ZeRO stage and with pipeline
    stages, and the message names the rank that failed once, the device that always fails, or else
    the data or the weights; `report_stats` and steps that are repeated well change nothing

    Claim (non-finite): `--check-weight-hash-across-dp-replicas-interval` ends a run whose
    data-parallel ranks have different weights, and names the iteration, the parameter and the ranks
    """
    for seen in outcomes.of(fault["name"]):
        (message,) = seen["problems"] or [""]
        assert [words for words in fault["message"] if words not in message] == []
        assert bool(message) == bool(fault["message"])
        assert seen["skipped"] == fault["skipped"]
        if fault.get("equal"):
            assert seen["differences"] == []
            assert seen["counters"][0] == seen["counters"][1]
