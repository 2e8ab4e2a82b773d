"""Runs many jobs on one set of ranks, so that a job that fails or hangs hides no other."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ds.config import Config
from megatron_ds.train_state import StepPlan
from tests.dist.compare import MovedRuns, differences
from tests.dist.engine_harness import EngineProbe, Meshes, prepare, train
from tests.dist.parity_cases import SAMPLES, Case, config_of, plans_of, samples_of
from tests.dist.reference import Run, Samples
from tests.distributed import run_ranks
from tests.tables import UniqueNames

Job = Callable[[Meshes], Any]
"""Called on every rank, with the meshes by tensor-parallel size. It is pickled."""
Jobs = UniqueNames[Job]
"""Jobs by name."""


def training(
    config: Config,
    plans: list[StepPlan],
    samples: Samples = SAMPLES,
    probe: EngineProbe | None = None,
    **options: Any,
) -> Job:
    """A job whose results are the `Run`s of the ranks. Arguments as for `train`."""
    return partial(train, config, plans, samples, probe, **options)


def case_training(
    case: Case,
    probe: EngineProbe | None = None,
    *,
    every_step: bool = False,
    **changes: Mapping[str, Any],
) -> Job:
    """The training of a parity case with changed fields, as `config_of` takes them.

    Tensors are recorded of the first and the last step, or of every one.
    """
    plans = plans_of(case)
    # Signs that rounding decides are searched in the weights after every step of Lion.
    is_complete = every_step or case.optimizer == "lion"
    recorded = None if is_complete else {1, len(plans)}
    config = config_of(case, **changes)
    samples = samples_of(case)
    return training(config, plans, samples, probe, tensors_of=recorded)


def selected(request: pytest.FixtureRequest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The selected tests of the file of a fixture: name of the function, and parameters."""
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            yield item.originalname, item.callspec.params if hasattr(item, "callspec") else {}


def has_proofs(request: pytest.FixtureRequest) -> bool:
    """Whether proofs of the file of a fixture are among the selected tests."""
    items = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("proof") for item in items)


class Failure(str):
    """The traceback of a job on a rank."""

    __slots__ = ()


@dataclass(frozen=True)
class JobResults:
    """What each job returned on each rank."""

    results: Mapping[str, list[Any]]

    def of(self, name: str) -> list[Any]:
        """Each rank's result of a job; fails the test with the tracebacks if there is none."""
        failures = [result for result in self.results[name] if isinstance(result, Failure)]
        if failures:
            pytest.fail("\n".join([f"{name} did not finish", *failures]))
        return self.results[name]

    def differences(self, name: str, reference: Run, moved: MovedRuns | None = None) -> list[str]:
        """How a training differs from a run of one process, on any rank.

        Args:
            name: Name of the job.
            reference: The run of one process.
            moved: As for `compare.differences`.
        """
        return [
            f"rank {rank}: {difference}"
            for rank, run in enumerate(self.of(name))
            for difference in differences(run, reference, moved=moved)
        ]


def run_jobs(world: int, jobs: Jobs, modules: tuple[str, ...] = ()) -> JobResults:
    """Runs the jobs one after the other on `world` ranks. Failures are raised by the results.

    Args:
        world: Number of ranks.
        jobs: The jobs.
        modules: As for `run_ranks`.
    """
    assert isinstance(jobs, UniqueNames), "a plain dictionary loses jobs whose names are equal"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        crash = Failure("")
        try:
            timeout = 600.0 + 30.0 * len(jobs)
            run_ranks(_run_jobs, world, dict(jobs), folder, timeout=timeout, modules=modules)
        except Exception:
            crash = Failure(traceback.format_exc())

        def load(path: Path) -> Any:
            return torch.load(path, weights_only=False) if path.exists() else crash

        return JobResults(
            {job: [load(folder / f"{job}.{rank}") for rank in range(world)] for job in jobs}
        )


def run_by_world(
    jobs: Mapping[int, Jobs], modules: Mapping[int, tuple[str, ...]] = MappingProxyType({})
) -> JobResults:
    """Runs the jobs of each number of ranks. Their names are unique.

    Args:
        jobs: The jobs.
        modules: As for `run_ranks`, by number of ranks.
    """
    results = UniqueNames[list[Any]]()
    for world, named in jobs.items():
        if named:
            results |= run_jobs(world, named, modules.get(world, ())).results
    return JobResults(results)


def _run_jobs(rank: int, jobs: dict[str, Job], folder: Path) -> None:
    meshes = prepare()
    for name, job in jobs.items():
        try:
            result = job(meshes)
        except Exception:
            result = Failure(traceback.format_exc())
        torch.save(result, folder / f"{name}.{rank}")
        dist.barrier()
