"""Parity cases: small models on layouts, which are compared with one process.

All cases have the same global batches, so that one run of one process serves all layouts of a model
and an optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds import schedules
from megatron_ds.config import (
    Config,
    DeepSpeedConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
)
from megatron_ds.config.options.optimizer_specs import ADAM, NAMES
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from tests.dist.recorded import Replay
from tests.dist.reference import Run, Samples, train_reference
from tests.optimizers import TRAINED
from tests.tables import tables

TABLES = tables(__file__, tuple)

STEPS = 3
SAMPLES_PER_STEP = 16
"""Global batch of every case."""
SEED = 5

SHAPE: dict[str, Any] = TABLES["shape"]
SAMPLES = Samples(STEPS * SAMPLES_PER_STEP, SHAPE)
MODELS: dict[str, dict[str, Any]] = TABLES["models"]


def _options(optimizer: str = ADAM.name, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"optimizer": optimizer, **TRAINED[optimizer], **changes})


OPTIMIZERS = {name: _options(name) for name in NAMES} | {
    name: _options(**row) for name, row in TABLES["optimizers"].items()
}
RATES = {
    name: (options.lr, 2 * options.lr, options.lr / 2) for name, options in OPTIMIZERS.items()
} | {"sgd": (1.0, 0.5, 0.25)}
"""Learning rate of each step."""


Changes = Mapping[str, Mapping[str, Any]]
"""Changed fields of a configuration by group."""


@dataclass(frozen=True)
class Case:
    """A layout, a model and an optimizer, and the steps of the training."""

    world: int
    stage: int
    tp: int
    accumulation: int
    model: str
    optimizer: str
    changes: Changes = field(default_factory=dict, hash=False)
    pp: int = 1
    sp: int = 1
    """Ranks that share every sequence (DeepSpeed-Ulysses)."""
    cp: int = 1
    """Context-parallel ranks."""
    ep: int = 1
    batches: tuple[int, ...] = ()
    """Samples of each step, if they change."""
    lengths: tuple[int, ...] = ()
    """Tokens per sample of each step, if they change."""
    ends: float = 0.0
    """Part of the tokens that end a document."""

    @property
    def name(self) -> str:
        """The sizes of the layout, those of some axes only where they are not 1, and the rest."""
        sizes = {"pp": self.pp, "cp": self.cp, "sp": self.sp, "ep": self.ep}
        layout = [f"{self.world}ranks", f"zero{self.stage}", f"tp{self.tp}"]
        layout += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        return "-".join([*layout, f"accumulate{self.accumulation}", self.model, self.optimizer])

    @property
    def micro_batch_size(self) -> int:
        return SAMPLES_PER_STEP // (self.dp * self.accumulation)

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp * self.sp)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def folder() -> Path:
    """For DeepSpeed files; it is removed when this process ends."""
    return Path(_folder().name)


def ds_file(values: Mapping[str, Any]) -> str:
    """A DeepSpeed file with these keys."""
    text = json.dumps(values)
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def scheduled_plans(config: Config, world: int, steps: int | None = None) -> list[StepPlan]:
    """The first steps of the training loop, or all."""
    dp_size = config.parallel.data_parallel_size(world)
    state = TrainState()
    plans = []
    for _ in range(steps or schedules.total_iterations(config, dp_size)):
        plans.append(schedules.plan(config, state, dp_size))
        state = state.advance(plans[-1], StepResult(0.0, 0.0))
    return plans


def config_of(case: Case, **changes: Mapping[str, Any]) -> Config:
    """The configuration of a case, the ZeRO stage taken from a DeepSpeed file as a user would.

    The file lowers the thresholds: ZeRO-3 partitions even toy parameters, and gradients are reduced
    in several buckets.

    Args:
        case: The case.
        changes: Fields that are changed besides those of the case: `model={"hidden_dropout": 0.1}`.
    """
    zero = {
        "stage": case.stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 4000,
        "allgather_bucket_size": 4000,
    }
    config = Config(
        model=ModelConfig(**SHAPE, **MODELS[case.model]),
        parallel=ParallelConfig(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            context_parallel_size=case.cp,
            ds_sequence_parallel_size=case.sp,
            expert_model_parallel_size=case.ep,
        ),
        optimizer=OPTIMIZERS[case.optimizer],
        schedule=ScheduleConfig(
            micro_batch_size=case.micro_batch_size,
            global_batch_size=SAMPLES_PER_STEP,
            train_iters=STEPS,
        ),
        deepspeed=DeepSpeedConfig(deepspeed_config=ds_file({"zero_optimization": zero})),
    )
    groups = {
        name: dataclasses.replace(
            getattr(config, name), **{**case.changes.get(name, {}), **changes.get(name, {})}
        )
        for name in {**case.changes, **changes}
    }
    # Completed and checked as by the command line, except for the data.
    config, problems = merge_file(dataclasses.replace(config, **groups), case.world)
    problems += config.model.problems(config.parallel.tensor_model_parallel_size)
    problems += config.optimizer.problems()
    problems += config.schedule.problems(config.parallel, case.world)
    assert problems == [], problems
    return config


def plans_of(case: Case) -> list[StepPlan]:
    """The steps of a case."""
    count = max(len(case.batches), len(case.lengths)) or STEPS
    batches = case.batches or (SAMPLES_PER_STEP,) * count
    lengths = case.lengths or (SHAPE["seq_length"],) * count
    rates = itertools.cycle(RATES[case.optimizer])
    return [
        StepPlan(
            iteration=iteration,
            global_batch_size=size,
            num_micro_batches=size // (case.micro_batch_size * case.dp),
            lr=rate,
            weight_decay=OPTIMIZERS[case.optimizer].weight_decay,
            seq_length=length,
            decoupled_lr=3 * rate if case.optimizer == "grouped" else None,
        )
        for iteration, (size, length, rate) in enumerate(
            zip(batches, lengths, rates, strict=False), 1
        )
    ]


def samples_of(case: Case) -> Samples:
    """The samples of all steps."""
    samples = Samples(sum(plan.global_batch_size for plan in plans_of(case)), SHAPE)
    return samples.with_document_ends(case.ends) if case.ends else samples


def is_global(case: Case) -> bool:
    """Whether the experts of a step are balanced over all ranks."""
    return case.changes.get("moe", {}).get("moe_router_load_balancing_type") == "global_aux_loss"


def train_alone(case: Case, replay: Replay | None = None) -> Run:
    """The run of one process."""
    config = config_of(case)
    # Without the loss per token, it is the mean over micro-batches of their means.
    is_per_token = config.optimizer.calculate_per_token_loss
    size = config.schedule.micro_batch_size * (case.dp if is_global(case) else 1)
    return train_reference(
        config, samples_of(case), plans_of(case), None if is_per_token else size, replay
    )


@functools.cache
def reference_of(model: str, optimizer: str, moved: int | None = None) -> Run:
    """The run of one process, which all layouts of a model and an optimizer share.

    Args:
        model: Name of the model.
        optimizer: Name of the optimizer.
        moved: As for `train_reference`.
    """
    case = Case(1, 0, 1, 1, model, optimizer)
    return train_reference(config_of(case), SAMPLES, plans_of(case), moved=moved)
