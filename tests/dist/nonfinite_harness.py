"""Trains with a corrupted gradient on one rank, and reads the states of the optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepResult, TrainState
from tests.dist import parity_cases
from tests.dist.compare import differing_names
from tests.dist.engine_harness import Meshes, batches_of, build, full_weights
from tests.dist.parity_cases import Case, config_of
from tests.dist.reference import Samples, Tensors

WORLD = 2
CORRUPTED_PARAMETER = "fc_in.weight"
"""Parameter of the first layer whose gradient is corrupted; sharded over tensor-parallel ranks."""


BIASES = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""With states, which no optimizer updates."""
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
    experts: int = 0
    """Experts on every rank, without expert parallelism."""
    world: int = WORLD

    def config(self, **optimizer: Any) -> Config:
        """Args:
        optimizer: Changed fields of the OptimizerConfig.
        """
        half = {} if self.precision == "fp32" else {self.precision: True}
        if self.precision == "fp16":
            half |= {"allow_fp16_on_cpu": True, "initial_loss_scale": 256.0, "hysteresis": 1}
        case = Case(
            self.world,
            self.stage,
            self.tp,
            2,
            "learned",
            "adamw",
            pp=self.pp,
            sp=self.ulysses,
            ep=self.ep,
        )
        return config_of(
            case,
            precision=half,
            schedule=RATES,
            parallel={"sequence_parallel": self.sequence},
            moe={"num_experts": (2,), **BIASES} if self.ep > 1 or self.experts else {},
            deepspeed={"cpu_optimizer": self.offload},
            optimizer=optimizer,
        )


class Training:
    """An engine that is driven step by step, as by the training loop."""

    def __init__(self, config: Config, mesh: Mesh, steps: int) -> None:
        self.config = config
        self.mesh = mesh
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

    def names_on(self, rank: int) -> list[str]:
        """The parameters and states of a rank, one of each kind: those of later layers are left
        out."""
        named = [name for name, _ in self.engine._steps.norms.weights()]
        kinds = {re.sub(r"layers\.\d+\.", "", name): name for name in reversed(named)}
        return gather_objects([*reversed(kinds.values())])[rank]

    def state_tensors(self) -> Tensors:
        """Everything that a step changes: full weights, this rank's master weights and moments.
        Collective, and an error if copies differ."""
        return {**full_weights(self.engine, self.mesh), **self.optimizer_tensors()}

    def local_tensors(self) -> Tensors:
        """What a step changes on this rank, whose copies may differ from those of other ranks."""
        weights = self.engine._steps.norms.weights()
        return {
            **{name: value.detach().clone() for name, value in weights},
            **self.optimizer_tensors(),
        }

    def optimizer_tensors(self) -> Tensors:
        """This rank's master weights and moments."""
        tensors: Tensors = {}
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
def corrupt_gradient(
    engine: ZeroEngine, value: float, rank: int = WORLD - 1, ends_with: str = CORRUPTED_PARAMETER
) -> Iterator[None]:
    """Sets one element of one gradient to `value` on one rank in the first micro-batch.

    If tensor-parallel ranks sum the gradient, it is set after that.
    """
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
    hook = None
    if dist.get_rank() == rank:
        parameter = next(parameter for name, parameter in named if name.endswith(ends_with))
        hook = parameter.register_hook(corrupt)
    yield
    if hook is not None:
        assert not pending
        hook.remove()


class Copy(NamedTuple):
    """What a rank saw of the copies of a parameter on another rank."""

    applied: bool
    """Whether a step with an element of its gradient that is not finite was applied."""
    changed: list[str]
    """The tensors that this step changed."""
    is_finite: bool
    """What the check of the weights found with an element of it that is not finite."""
    first: str | None
    """The parameter of this rank that is not finite."""
    differs: tuple[str, list[int]] | None
    """The parameter that differs from its copies, and on which ranks. Not at stage 3."""


def corrupt_each_parameter(layout: Layout, meshes: Meshes) -> dict[str, Copy]:
    """Corrupts a gradient of each kind of parameter of one rank in a step, and then its weight.

    Returns:
        What this rank saw, by parameter. The last entry, of no name, is a step without corruption.
    """
    config = layout.config()
    run = Training(config, meshes.of(config.parallel), steps=40)
    run.step()
    seen = {}
    before = run.local_tensors()
    for index, name in enumerate([*run.names_on(layout.rank), ""]):
        value = (math.nan, math.inf, -math.inf)[index % 3]
        rank = layout.rank if name else -1  # no rank
        skipped = True
        changed = list[str]()
        if not name.endswith("expert_bias"):  # which has no gradient
            with corrupt_gradient(run.engine, value, rank, name):
                skipped = run.step().skipped
            changed = differing_names(before, run.local_tensors())
        with _corrupt_weight(run.engine, value, rank, name):
            differs = run.engine.find_different_weights() if layout.stage < 3 else None
            seen[name] = Copy(
                not skipped,
                changed,
                run.engine.has_finite_weights(),
                run.engine.first_nonfinite_weight(),
                differs and (differs[0], sorted(differs[1])),
            )
    run.close()
    return seen


@contextmanager
def _corrupt_weight(engine: ZeroEngine, value: float, rank: int, name: str) -> Iterator[None]:
    """Within it, the first element of a rank's weight, or of its partition, has this value."""
    if dist.get_rank() != rank:
        yield
        return
    values = dict(engine._steps.norms.weights())[name].detach().view(-1)[:1]
    before = values.clone()
    values.fill_(value)
    yield
    values.copy_(before)
