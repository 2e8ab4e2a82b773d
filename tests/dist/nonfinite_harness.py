"""Trains with a corrupted gradient on one rank, and reads the states of the optimizer.

The layouts of a test run one after the other on one set of ranks; a failed one returns its
traceback.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ds import schedules
from megatron_ds.config import Config, PrecisionConfig, ScheduleConfig
from megatron_ds.data.micro_batches import Batch, MicroBatchIterator
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.deepspeed_patches import require_precision
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepResult, TrainState
from tests.dist import parity_cases
from tests.dist.engine_harness import CPU, full_weights, prepare
from tests.dist.parity_cases import Case, complete_config, config_of
from tests.dist.reference import Samples, Tensors
from tests.distributed import run_ranks

WORLD = 2
CORRUPTED_PARAMETER = "fc_in.weight"
"""Parameter of the first layer whose gradient is corrupted; sharded over tensor-parallel ranks."""


@dataclass(frozen=True)
class Layout:
    precision: PrecisionConfig
    stage: int
    tp: int

    @property
    def name(self) -> str:
        return f"{self.precision.name}-zero{self.stage}-tp{self.tp}"

    def config(self, folder: Path) -> Config:
        """Two micro-batches per step, and a learning rate that every applied step changes."""
        case = Case(WORLD, self.stage, self.tp, 2, "learned", "adamw")
        config = dataclasses.replace(config_of(case, folder), precision=self.precision)
        schedule = ScheduleConfig(
            micro_batch_size=case.micro_batch_size,
            global_batch_size=parity_cases.SAMPLES_PER_STEP,
            train_iters=100,
            lr_warmup_iters=50,
            lr_warmup_init=1e-3,
        )
        return complete_config(dataclasses.replace(config, schedule=schedule), WORLD)


class Training:
    """An engine that is driven step by step, as by the training loop."""

    def __init__(self, config: Config, mesh: Mesh, steps: int) -> None:
        self.config, self.mesh = config, mesh
        self.engine = build_engine(config, mesh, CPU)
        self.state = TrainState()
        self.rates: list[float] = []
        micro = config.schedule.micro_batch_size
        assert micro is not None
        self.batches: Iterator[Batch] = MicroBatchIterator(
            Samples(steps * parity_cases.SAMPLES_PER_STEP, parity_cases.SHAPE),
            consumed=0,
            micro_batch_size=micro,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp.size,
        )

    def step(self) -> StepResult:
        plan = schedules.plan(self.config, self.state, self.mesh.dp.size)
        result = self.engine.train_step(self.batches, plan)
        self.state = self.state.advance(plan, result)
        self.rates.append(plan.lr)
        return result

    def skip_samples(self) -> None:
        """Skips the samples of one step."""
        for _ in range(2):
            next(self.batches)

    def state_tensors(self) -> Tensors:
        """Everything that a step changes: full weights, this rank's master weights and moments."""
        return {**full_weights(self.engine, self.mesh), **_optimizer_tensors(self.engine)}

    def close(self) -> None:
        self.engine._engine.destroy()


def _optimizer_tensors(engine: ZeroEngine) -> Tensors:
    """Parameters and states of torch's optimizer; empty before the first applied step."""
    tensors: Tensors = {}
    for index, (master, state) in enumerate(engine._engine.basic_optimizer.state.items()):
        tensors[f"master {index}"] = master.detach().clone()
        for name, value in state.items():
            tensors[f"{name} {index}"] = torch.as_tensor(value).detach().clone()
    return tensors


@contextmanager
def corrupt_gradient(engine: ZeroEngine, value: float) -> Iterator[None]:
    """Sets one element of one gradient to `value` on the last rank in the first micro-batch."""
    pending = True

    def corrupt(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal pending
        if not pending:
            return gradient
        pending = False
        changed = gradient.clone()
        changed.view(-1)[-1] = value
        return changed

    named = engine._engine.module.named_parameters()
    parameter = next(parameter for name, parameter in named if name.endswith(CORRUPTED_PARAMETER))
    hook = parameter.register_hook(corrupt) if dist.get_rank() == WORLD - 1 else None
    yield
    if hook is not None:
        assert not pending
        hook.remove()


def differing_names(one: Tensors, other: Tensors) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


LayoutJob = Callable[[Layout, dict[int, Mesh], Path], Any]


def run_layouts(job: LayoutJob, layouts: list[Layout], folder: Path) -> dict[str, list[Any]]:
    """Returns what the job returned for each layout on each rank; a traceback where it failed."""
    ranks = run_ranks(_run, WORLD, job, layouts, folder)
    return {layout.name: [rank[layout.name] for rank in ranks] for layout in layouts}


def _run(rank: int, job: LayoutJob, layouts: list[Layout], folder: Path) -> dict[str, Any]:
    meshes = prepare((1, 2))
    require_precision(PrecisionConfig(fp16=True, allow_fp16_on_cpu=True))
    results: dict[str, Any] = {}
    for layout in layouts:
        try:
            results[layout.name] = job(layout, meshes, folder)
        except Exception:
            results[layout.name] = traceback.format_exc()
        dist.barrier()
    return results
