"""Configurations that offload, and a job that saves and resumes one in the middle of a run."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from megatron_ds.config import Config
from megatron_ds.engine.deepspeed.checkpoint_io import write_tensors
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.planning import swap_disk
from tests.dist.engine_harness import Meshes, batches_of, full_weights
from tests.dist.nonfinite_harness import Training
from tests.dist.parity_cases import SAMPLES, Case, config_of, ds_file, plans_of
from tests.dist.rank_jobs import Job, training
from tests.dist.reference import Tensors

SMALLEST_SWAPPED = 1024
"""Bytes of the smallest tensor in a file, in these tests; DeepSpeed's own limit is a megabyte."""
WITHOUT_LIBAIO = swap_disk.find_problem()
"""Why this machine cannot offload to NVMe."""
STEPS = 2
"""Steps before the checkpoint, and after it."""
TAG = "saved"
"""Name of the checkpoint."""
POISONED = "poisoned"
"""Name of a copy with a NaN."""


@dataclass(frozen=True)
class Offload:
    """A layout that offloads."""

    tp: int = 1
    accumulation: int = 4
    optimizer: str = "nvme"
    parameters: str = "none"
    model: str = "learned"
    stage: int = 3
    zero: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return Case(2, self.stage, self.tp, self.accumulation, self.model, "adamw")

    def config(self, folder: Path, **changes: dict[str, Any]) -> Config:
        """The configuration, whose DeepSpeed file makes even this small model swap.

        Args:
            folder: For the swapped states.
            changes: Changed fields by group.
        """
        offload: dict[str, Any] = {"offload_optimizer": {"device": self.optimizer}}
        if self.parameters == "nvme":
            offload["offload_param"] = {"device": "nvme", "max_in_cpu": 0}
        elif self.parameters == "cpu":
            offload["offload_param"] = {"device": "cpu"}
        zero = {
            "stage": self.stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 4000,
            **offload,
            **self.zero,
        }
        values = {"zero_optimization": zero, "aio": {"block_size": SMALLEST_SWAPPED}}
        deepspeed: dict[str, Any] = {"deepspeed_config": ds_file(values)}
        if "nvme" in (self.optimizer, self.parameters):
            deepspeed["nvme_path"] = str(folder / "disk")
        return config_of(self.case, **{"deepspeed": deepspeed, **self.changes, **changes})


def swap_small_tensors() -> None:
    """Make DeepSpeed swap tensors of SMALLEST_SWAPPED bytes in this process."""
    optimizer_utils.MIN_AIO_BYTES = SMALLEST_SWAPPED
    partitioned_param_swapper.MIN_AIO_BYTES = SMALLEST_SWAPPED


def parity_job(offload: Offload, folder: Path) -> Job:
    """The training of a layout, which also checks that what should be in files is."""
    probe = partial(assert_swapped, offload)
    config = offload.config(folder)
    case = offload.case
    return swapping(training(config, plans_of(case), SAMPLES, probe))


def swapping(job: Job) -> Job:
    """A job in whose ranks even small tensors are swapped."""
    return partial(_swapping, job)


def _swapping(job: Job, meshes: Meshes) -> Any:
    swap_small_tensors()
    return job(meshes)


def assert_swapped(offload: Offload, engine: Any) -> None:
    """Weights of matrices, and their optimizer states, are in files if the layout says so."""
    optimizer = engine.optimizer
    swapped = offload.stage == 3 and any(_are_swapped(optimizer))
    assert swapped == (offload.optimizer == "nvme")
    remote = [
        parameter.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
        for parameter in engine.module.parameters()
        if offload.stage == 3
    ]
    assert any(remote) == (offload.parameters == "nvme")
    assert not all(remote)


def _are_swapped(optimizer: Any) -> list[bool]:
    """Whether each flat tensor of ZeRO-3 is in a file."""
    groups = range(len(optimizer.fp32_partitioned_groups_flat))
    return [optimizer._swappable_optimizer_subgroup(group) for group in groups]


Resumed = dict[str, tuple[list[tuple[float, float]], Tensors, list[bool]]]
"""By run: loss and norm of each step after a checkpoint, the weights then, and whether those of a
poisoned and of the right checkpoint were finite."""


def resume(saved: Offload, loaded: dict[str, Offload], folder: Path, meshes: Meshes) -> Resumed:
    """Saves in the middle of a run of a layout, and continues it in new engines.

    Args:
        saved: Layout of the run.
        loaded: Layouts that load its checkpoint.
        folder: For files; the ranks share it.
        meshes: Those of this rank.
    """
    mesh = meshes[saved.tp]
    schedule = {"train_iters": 100}
    first = Training(saved.config(folder, schedule=schedule), mesh, 100)
    for _ in range(STEPS):
        first.step()
    swapped = _are_swapped(first.engine._engine.optimizer)
    assert set(swapped) == {True, False}
    first.engine.snapshot(copy=False).write(Path(folder) / TAG)
    state = first.state
    seen: Resumed = {"saved": ([], full_weights(first.engine, mesh), [])}
    seen["continued"] = _continue(first, [])
    if dist.get_rank() == 0:
        _poison(Path(folder))
    dist.barrier()
    for name, layout in loaded.items():
        config = layout.config(folder, schedule=schedule)
        run = Training(config, mesh, 100)
        finite = []
        for tag in (POISONED, TAG):
            run.engine.load(folder, tag)
            finite.append(run.engine.has_finite_weights())
        run.state = state
        run.batches = batches_of(config, mesh, run.samples, state.consumed_samples)
        seen[name] = _continue(run, finite)
    return seen


def _poison(folder: Path) -> None:
    """Copies the checkpoint, with a NaN among the largest weights of the second rank."""
    shutil.copytree(folder / TAG, folder / POISONED)
    (path,) = (folder / POISONED).glob("*mp_rank_01_optim_states.pt")
    states = read_tensors(path)
    groups = states["optimizer_state_dict"]["fp32_flat_groups"]
    max(groups, key=len)[5] = math.nan
    write_tensors(states, path)


def _continue(
    run: Training, finite: list[bool]
) -> tuple[list[tuple[float, float]], Tensors, list[bool]]:
    results = [run.step() for _ in range(STEPS)]
    weights = full_weights(run.engine, run.mesh)
    run.close()
    return [(float(each.loss), float(each.grad_norm or 0)) for each in results], weights, finite
