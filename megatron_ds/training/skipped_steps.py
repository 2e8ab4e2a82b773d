"""When steps are skipped one after another: a run that no longer learns is ended with words.

Owns the count, the look for the first gradient that is not finite, and the words. Whether a step
was skipped is the engine's to say, and all ranks are told the same.
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
from megatron_ds.engine.protocol import Engine
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.train_state import StepPlan, StepResult, TrainState


@dataclass(frozen=True)
class _RankObservation:
    """What a rank saw of a skipped step."""

    loss: float
    parameter: str | None
    """The first in the order of the backward pass whose gradient was not finite."""


class SkippedSteps:
    """Counts the steps that were skipped in a row; built and asked alike on all ranks."""

    def __init__(self, config: PrecisionConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._count = 0
        self._scale_may_be_spent = False
        self._finite: dict[str, torch.Tensor] = {}

    @contextmanager
    def record_gradients(self) -> Iterator[None]:
        """Around a step: in one that may be the last, each parameter's own gradient is looked at.

        The engine's are averaged over ranks, and gone when it has skipped the step.
        """
        self._finite = {}
        limit = self._config.max_consecutive_skipped_steps
        if limit == 0 or (self._count < limit - 1 and not self._scale_may_be_spent):
            yield
            return
        with self._engine.watch_gradients() as self._finite:
            yield

    def limit_reached(self, result: StepResult) -> bool:
        """Counts a step. Whether the run must end, on all ranks alike."""
        self._count = self._count + 1 if result.skipped else 0
        scale, lowest = result.loss_scale, self._config.min_loss_scale
        self._scale_may_be_spent = scale is not None and scale <= lowest
        limit = self._config.max_consecutive_skipped_steps
        return limit > 0 and (self._count >= limit or result.loss_scale_exhausted)

    def make_error(
        self, plan: StepPlan, result: StepResult, state: TrainState, checkpoint: Path | None
    ) -> RunAborted:
        """How the run ends. Collective.

        state: after the step. checkpoint: the last one that was saved.
        """
        mine = _RankObservation(
            loss=float(result.loss),
            parameter=next((name for name, ok in self._finite.items() if not ok), None),
        )
        sights: list[_RankObservation] = [mine] * dist.get_world_size()
        dist.all_gather_object(sights, mine)
        lines = [
            self._what(plan, result),
            *_origin_lines(sights),
            *self._recovery_lines(plan, state, checkpoint),
            "Try: " + "; ".join(self._advice()),
        ]
        return RunAborted("\n  ".join(lines), ExitCode.SKIPPED_STEPS)

    def _what(self, plan: StepPlan, result: StepResult) -> str:
        steps = "1 step" if self._count == 1 else f"{self._count} steps in a row"
        words = f"iteration {plan.iteration}: {steps} skipped, as the gradient was not finite"
        if result.loss_scale_exhausted:
            return (
                f"{words}, and the loss scale is at its lowest already (--min-loss-scale "
                f"{self._config.min_loss_scale:g})"
            )
        words += f" (--max-consecutive-skipped-steps {self._config.max_consecutive_skipped_steps})"
        return words if result.loss_scale is None else f"{words}; loss scale {result.loss_scale:g}"

    def _recovery_lines(
        self, plan: StepPlan, state: TrainState, checkpoint: Path | None
    ) -> Iterator[str]:
        first = plan.iteration - self._count + 1
        yield (
            f"A skipped step changes nothing: weights and optimizer are those before iteration "
            f"{first}. Data read since: {self._count * plan.global_batch_size} samples up to "
            f"{state.consumed_samples}"
        )
        if checkpoint is None:
            yield "There is no checkpoint of this run to go back to; nothing was saved now"
        else:
            yield f"Go back to {checkpoint}; nothing was saved now"

    def _advice(self) -> Iterator[str]:
        yield "a lower --lr or a longer warm-up"
        if self._config.fp16:
            yield "--bf16, which needs no loss scale, in a new run"
        if self._config.fp16 and self._config.loss_scale is not None:
            yield (
                f"no --loss-scale {self._config.loss_scale:g}: a dynamic one finds what can be "
                "represented"
            )
        yield "the data from there on (token ids, blends)"
        yield "--max-consecutive-skipped-steps N to allow more, 0 to never stop"


def _origin_lines(sights: list[_RankObservation]) -> Iterator[str]:
    for rank, sight in enumerate(sights):
        if not math.isfinite(sight.loss):
            yield f"The loss of rank {rank} is {sight.loss}"
            break
    for rank, sight in enumerate(sights):
        if sight.parameter is not None:
            yield f"First gradient that was not finite: {sight.parameter} on rank {rank}"
            break
