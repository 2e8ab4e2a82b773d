"""Ends a run that no longer learns because its steps are skipped one after another.

Owns the counter, the search for the first non-finite gradient, and the error message. The engine
decides whether a step is skipped, and all ranks get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ds.config import PrecisionConfig
from megatron_ds.config.problems import Problem, option
from megatron_ds.engine.protocol import Engine
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.train_state import StepPlan, StepResult, TrainState


@dataclass(frozen=True)
class _RankObservation:
    """A skipped step as one rank saw it."""

    loss: float
    parameter: str | None
    """First parameter with a non-finite gradient, in the order of the backward pass."""


class SkippedSteps:
    """Counts consecutive skipped steps. Every rank makes the same calls.

    Args:
        config: Limit and minimum loss scale.
        engine: Engine whose gradients are recorded.
    """

    def __init__(self, config: PrecisionConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._count = 0
        self._is_scale_minimal = False
        self._finite: dict[str, torch.Tensor] = {}

    @contextmanager
    def record_gradients(self) -> Iterator[None]:
        """Around a step: records which gradients are finite if the step may reach the limit.

        The gradients of the engine are averaged over ranks, and gone once the step is skipped.
        """
        self._finite = {}
        limit = self._config.max_consecutive_skipped_steps
        if limit == 0 or (self._count < limit - 1 and not self._is_scale_minimal):
            yield
            return
        with self._engine.watch_gradients() as self._finite:
            yield

    def limit_reached(self, result: StepResult) -> bool:
        """Counts a step. Returns whether the run must end, the same on all ranks."""
        self._count = self._count + 1 if result.skipped else 0
        scale, lowest = result.loss_scale, self._config.min_loss_scale
        self._is_scale_minimal = scale is not None and scale <= lowest
        limit = self._config.max_consecutive_skipped_steps
        return limit > 0 and (self._count >= limit or result.loss_scale_exhausted)

    def make_error(
        self, plan: StepPlan, result: StepResult, state: TrainState, checkpoint: Path | None
    ) -> RunAborted:
        """The error that ends the run. Collective.

        Args:
            plan: Plan of the last step.
            result: Result of the last step.
            state: State after it.
            checkpoint: Checkpoint to resume from, if there is one.
        """
        own = _RankObservation(
            loss=float(result.loss),
            parameter=next((name for name, ok in self._finite.items() if not ok), None),
        )
        observations: list[_RankObservation] = [own] * dist.get_world_size()
        dist.all_gather_object(observations, own)
        text = "\n  ".join(
            [
                self._summary(plan, result),
                *_origin_lines(observations),
                *self._recovery_lines(plan, state, checkpoint),
                "Try: " + "; ".join(self._advice()),
            ]
        )
        problem = Problem("too-many-skipped-steps", text=text)
        return RunAborted(problem.render(), ExitCode.SKIPPED_STEPS)

    def _summary(self, plan: StepPlan, result: StepResult) -> str:
        steps = "1 step" if self._count == 1 else f"{self._count} consecutive steps"
        text = f"iteration {plan.iteration}: {steps} skipped because of non-finite gradients"
        if result.loss_scale_exhausted:
            return (
                f"{text}, with the loss scale at its minimum ({option('min_loss_scale')} "
                f"{self._config.min_loss_scale:g})"
            )
        limit = self._config.max_consecutive_skipped_steps
        text += f" ({option('max_consecutive_skipped_steps')} {limit})"
        return text if result.loss_scale is None else f"{text}; loss scale {result.loss_scale:g}"

    def _recovery_lines(
        self, plan: StepPlan, state: TrainState, checkpoint: Path | None
    ) -> Iterator[str]:
        first = plan.iteration - self._count + 1
        yield (
            f"Skipped steps change neither weights nor optimizer states: both are those before "
            f"iteration {first}. Data read since: {self._count * plan.global_batch_size} samples "
            f"up to {state.consumed_samples}"
        )
        if checkpoint is None:
            yield "This run has no checkpoint to resume from; none was saved now"
        else:
            yield f"Resume from {checkpoint}; no checkpoint was saved now"

    def _advice(self) -> Iterator[str]:
        yield f"a lower {option('lr')} or a longer warm-up"
        if self._config.fp16:
            yield f"a new run with {option('bf16')}, which needs no loss scale"
        if self._config.fp16 and self._config.loss_scale is not None:
            yield (
                f"a dynamic loss scale instead of {option('loss_scale')} "
                f"{self._config.loss_scale:g}"
            )
        yield "other data from there on (check its token ids)"
        yield f"a higher {option('max_consecutive_skipped_steps')}, or 0 for no limit"


def _origin_lines(observations: list[_RankObservation]) -> Iterator[str]:
    """The first rank with a non-finite loss, and the first with a non-finite gradient."""
    for rank, each in enumerate(observations):
        if not math.isfinite(each.loss):
            yield f"The loss of rank {rank} is {each.loss}"
            break
    for rank, each in enumerate(observations):
        if each.parameter is not None:
            yield f"First non-finite gradient: {each.parameter} on rank {rank}"
            break
