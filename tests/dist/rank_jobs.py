"""Runs many trainings on one set of ranks.

Each job writes a file per rank, so that a job that fails or hangs hides no other.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ds.config import Config
from megatron_ds.train_state import StepPlan
from tests.dist.engine_harness import EngineProbe, prepare, train
from tests.dist.reference import Run, Samples
from tests.distributed import run_ranks


@dataclass(frozen=True)
class Job:
    """One training. `probe` must be a function at the top level of a module."""

    name: str
    config: Config
    plans: list[StepPlan]
    samples: Samples
    probe: EngineProbe | None = None


def run_jobs(world: int, jobs: list[Job], folder: Path) -> JobResults:
    """Runs the jobs one after the other on `world` ranks. Failures are raised by the results."""
    try:
        run_ranks(_run_jobs, world, jobs, folder, timeout=300.0 + 15.0 * len(jobs))
    except Exception:
        (folder / f"{world}-ranks.txt").write_text(traceback.format_exc(), encoding="utf-8")
    return JobResults(world, folder)


def _run_jobs(rank: int, jobs: list[Job], folder: Path) -> None:
    meshes = prepare(tuple(sorted({_tp_size(job) for job in jobs})))
    for job in jobs:
        mesh = meshes[_tp_size(job)]
        try:
            run = train(job.config, mesh, job.samples, job.plans, job.probe)
            torch.save(run, folder / f"{job.name}.{rank}.pt")
        except Exception:
            (folder / f"{job.name}.{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        dist.barrier()


def _tp_size(job: Job) -> int:
    return job.config.parallel.tensor_model_parallel_size


@dataclass(frozen=True)
class JobResults:
    """What the ranks of one world wrote to a folder."""

    world: int
    folder: Path

    def of(self, name: str) -> list[Run]:
        """Each rank's run of a job; fails the test with the ranks' tracebacks if there is none."""
        paths = [self.folder / f"{name}.{rank}.pt" for rank in range(self.world)]
        if not all(path.exists() for path in paths):
            texts = [path.with_suffix(".txt") for path in paths]
            texts.append(self.folder / f"{self.world}-ranks.txt")
            reports = [text.read_text(encoding="utf-8") for text in texts if text.exists()]
            pytest.fail("\n".join([f"{name} did not finish", *reports]))
        return [torch.load(path, weights_only=False) for path in paths]
