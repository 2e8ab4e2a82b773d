"""Trains with a corrupted gradient on one rank, and reads the states of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepResult, TrainState
from tests.dist import parity_cases
from tests.dist.compare import differing_names
from tests.dist.engine_harness import batches_of, build, full_weights
from tests.dist.parity_cases import Case, config_of
from tests.dist.reference import Samples, Tensors

WORLD = 2
CORRUPTED_PARAMETER = "fc_in.weight"
"""Parameter of the first layer whose gradient is corrupted; sharded over tensor-parallel ranks."""


RATES = {"train_iters": 100, "lr_warmup_iters": 50, "lr_warmup_init": 1e-3}
"""A learning rate that every applied step changes."""


class Layout(NamedTuple):
    """Precision, ZeRO stage and parallel sizes."""

    precision: str
    stage: int
    tp: int
    sequence: bool = False
    """Sequence parallelism."""
    pp: int = 1
    ulysses: int = 1
    ep: int = 1
    """Expert-parallel size of a model with two experts; 1: without experts."""
    rank: int = WORLD - 1
    """Whose gradient is corrupted."""
    offload: bool = False
    """Whether optimizer states are on the host."""

    def config(self, **optimizer: Any) -> Config:
        """Args:
        optimizer: Changed fields of the OptimizerConfig.
        """
        half = {} if self.precision == "fp32" else {self.precision: True}
        if self.precision == "fp16":
            half |= {"allow_fp16_on_cpu": True, "initial_loss_scale": 256.0, "hysteresis": 1}
        case = Case(
            *(WORLD, self.stage, self.tp, 2, "learned", "adamw"),
            pp=self.pp,
            sp=self.ulysses,
            ep=self.ep,
        )
        return config_of(
            case,
            precision=half,
            schedule=RATES,
            parallel={"sequence_parallel": self.sequence},
            moe={} if self.ep == 1 else {"num_experts": (2,)},
            deepspeed={"cpu_optimizer": self.offload},
            optimizer=optimizer,
        )


class Training:
    """An engine that is driven step by step, as by the training loop."""

    def __init__(self, config: Config, mesh: Mesh, steps: int) -> None:
        self.config, self.mesh = config, mesh
        self.engine = build(config, mesh)
        self.state = TrainState()
        self.rates: list[float] = []
        self.samples = Samples(steps * parity_cases.SAMPLES_PER_STEP, parity_cases.SHAPE)
        self.batches = batches_of(config, mesh, self.samples)

    def step(self) -> StepResult:
        plan = schedules.plan(self.config, self.state, self.mesh.dp.size)
        result = self.engine.train_step(self.batches, plan)
        self.state = self.state.advance(plan, result)
        self.rates.append(plan.lr)
        return result

    def corrupted_step(self, value: float, rank: int = WORLD - 1) -> tuple[StepResult, list[str]]:
        """A step with a corrupted gradient of a rank, and the names of the tensors it changes."""
        before = self.state_tensors()
        with corrupt_gradient(self.engine, value, rank):
            result = self.step()
        return result, differing_names(before, self.state_tensors())

    def state_tensors(self) -> Tensors:
        """Everything that a step changes: full weights, this rank's master weights and moments."""
        tensors = full_weights(self.engine, self.mesh)
        states = self.engine._engine.basic_optimizer.state
        for index, (master, state) in enumerate(states.items()):
            for name, value in {"master": master, **state}.items():
                tensors[f"{name} {index}"] = torch.as_tensor(value).detach().clone()
        return tensors

    def has_moments(self) -> bool:
        return any(name.startswith("exp_avg_sq") for name in self.state_tensors())

    def close(self) -> None:
        self.engine._engine.destroy()


@contextmanager
def corrupt_gradient(engine: ZeroEngine, value: float, rank: int = WORLD - 1) -> Iterator[None]:
    """Sets one element of one gradient to `value` on one rank in the first micro-batch."""
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
    hook = parameter.register_hook(corrupt) if dist.get_rank() == rank else None
    yield
    if hook is not None:
        assert not pending
        hook.remove()
