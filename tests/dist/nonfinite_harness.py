"""What the tests of skipped steps look at: a rank's optimizer states, and how a gradient is spoilt.

Layouts run one after the other in one set of processes; each leaves words if it failed.
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
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.engine.deepspeed_patches import require_precision
from megatron_ds.train_state import StepResult, TrainState
from tests.dist import parity_cases
from tests.dist.parity_cases import Case, completed, config_of
from tests.dist.engine_harness import CPU, prepare, whole_weights
from tests.dist.reference import Samples, Tensors
from tests.distributed import run_ranks

WORLD = 2
SPOILT = "fc_in.weight"
"""The gradient that is spoilt, of the first layer; its parameter is cut over tensor-parallel
ranks."""


@dataclass(frozen=True)
class Layout:
    precision: PrecisionConfig
    stage: int
    tp: int

    @property
    def name(self) -> str:
        return f"{self.precision.name}-zero{self.stage}-tp{self.tp}"

    def config(self, folder: Path) -> Config:
        """Two micro-batches a step, and a learning rate that every applied step moves."""
        case = Case(WORLD, self.stage, self.tp, 2, "learned", "adamw")
        config = dataclasses.replace(config_of(case, folder), precision=self.precision)
        schedule = ScheduleConfig(
            micro_batch_size=case.micro_batch_size,
            global_batch_size=parity_cases.SAMPLES_PER_STEP,
            train_iters=100,
            lr_warmup_iters=50,
            lr_warmup_init=1e-3,
        )
        return completed(dataclasses.replace(config, schedule=schedule), WORLD)


class Training:
    """An engine that is driven step by step, as the loop does it."""

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

    def pass_over(self) -> None:
        """Lets a step's samples go by."""
        for _ in range(2):
            next(self.batches)

    def kept(self) -> Tensors:
        """Everything that a step moves: whole weights, this rank's master weights and moments."""
        return {**whole_weights(self.engine, self.mesh), **_optimizer_tensors(self.engine)}

    def close(self) -> None:
        self.engine._engine.destroy()


def _optimizer_tensors(engine: ZeroEngine) -> Tensors:
    """Of the torch optimizer below DeepSpeed's: its parameters and its state, in order; there is
    none before the first applied step."""
    kept: Tensors = {}
    for index, (master, state) in enumerate(engine._engine.basic_optimizer.state.items()):
        kept[f"master {index}"] = master.detach().clone()
        for name, value in state.items():
            kept[f"{name} {index}"] = torch.as_tensor(value).detach().clone()
    return kept


@contextmanager
def spoilt(engine: ZeroEngine, value: float) -> Iterator[None]:
    """Inside, one element of one gradient of the last rank is `value` in the first micro-batch."""
    fresh = True

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal fresh
        if not fresh:
            return gradient
        fresh = False
        changed = gradient.clone()
        changed.view(-1)[-1] = value
        return changed

    named = engine._engine.module.named_parameters()
    parameter = next(parameter for name, parameter in named if name.endswith(SPOILT))
    hook = parameter.register_hook(spoil) if dist.get_rank() == WORLD - 1 else None
    yield
    if hook is not None:
        assert not fresh
        hook.remove()


def same(one: Tensors, other: Tensors) -> list[str]:
    """Names of what is not equal, bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


Look = Callable[[Layout, dict[int, Mesh], Path], Any]


def run_layouts(look: Look, layouts: list[Layout], folder: Path) -> dict[str, list[Any]]:
    """What `look` gave for each layout on each rank; a text where it failed."""
    ranks = run_ranks(_run, WORLD, look, layouts, folder)
    return {layout.name: [rank[layout.name] for rank in ranks] for layout in layouts}


def _run(rank: int, look: Look, layouts: list[Layout], folder: Path) -> dict[str, Any]:
    meshes = prepare((1, 2))
    require_precision(PrecisionConfig(fp16=True, allow_fp16_on_cpu=True))
    results: dict[str, Any] = {}
    for layout in layouts:
        try:
            results[layout.name] = look(layout, meshes, folder)
        except Exception:
            results[layout.name] = traceback.format_exc()
        dist.barrier()
    return results
