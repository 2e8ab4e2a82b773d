"""Ends a run that no longer learns because its steps are skipped one after another.

Owns the counter, the search for the first non-finite gradient, and the error message. The engine
decides whether a step is skipped, and all ranks get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_ds.config import PrecisionConfig
from megatron_ds.config.problems import Problem, option
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.launch import output
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.ranks.launched_hosts import ranks_text
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.train_state import StepPlan, StepResult, TrainState

LAST = 10
"""Steps skipped in a row at the end of a run, after which it has not finished as it should."""


class SkippedSteps:
    """Counts consecutive skipped steps. Every rank makes the same calls.

    Args:
        config: Limit and minimum loss scale.
        engine: Engine whose gradients are recorded.
    """

    def __init__(self, config: PrecisionConfig, engine: ZeroEngine) -> None:
        self._config = config
        self._engine = engine
        self._count = 0
        self._steps = 0
        self._skipped = 0
        self._norms: list[tuple[str, torch.Tensor]] = []

    @property
    def has_record(self) -> bool:
        """Whether the gradients of the last step were recorded."""
        return bool(self._norms)

    @property
    def last_was_skipped(self) -> bool:
        """Whether the last step was, unless it was a spike."""
        return self._count > 0

    def code_at_the_end(self, first: int, losses: Sequence[float]) -> ExitCode:
        """The status of a run that reached its end, after a warning if it stopped learning before.

        See `problem_at_the_end` for the arguments.
        """
        problem = self.problem_at_the_end(first, losses)
        if problem is None:
            return ExitCode.FINISHED
        output.warn_on_rank(problem)
        return ExitCode.SKIPPED_STEPS

    def problem_at_the_end(self, first: int, losses: Sequence[float]) -> Problem | None:
        """Why a run that reached its end has not learned to its end, if so.

        A loss scale that is too high skips one step now and then: at least half of the steps, or
        LAST of them, must have been skipped in a row at the end.

        Args:
            first: The first iteration.
            losses: The last losses of the validation.
        """
        if not self._steps:
            return None
        if self._steps == self._count:
            return Problem("all-steps-skipped", first=first)
        is_finite = all(map(math.isfinite, losses))
        is_skipping = self._count >= LAST or self._steps <= 2 * self._count
        if is_finite and not is_skipping:
            return None
        parts = []
        if self._skipped:
            last = f", the last {self._count} in a row" if self._count > 1 else ""
            parts.append(f"{self._skipped} of {self._steps} steps were skipped{last}")
        if not is_finite:
            parts.append("the validation loss is not finite")
        return Problem("steps-skipped-at-the-end", what="; ".join(parts))

    @contextmanager
    def record_gradients(self, *, always: bool = False) -> Iterator[None]:
        """Around a step: records which gradients are finite if the step may reach the limit.

        The gradients of the engine are averaged over ranks, and gone once the step is skipped. Any
        step at the minimum loss scale may be the last; such steps are not recorded, since there may
        be many. The one that ends the run can be repeated: it has changed nothing.

        Args:
            always: Record in any case.
        """
        self._norms = []
        limit = self._config.max_consecutive_skipped_steps
        if not always and (limit == 0 or self._count < limit - 1):
            yield
            return
        with self._engine.watch_gradients() as self._norms:
            yield

    def limit_reached(self, result: StepResult) -> bool:
        """Counts a step. Returns whether the run must end, the same on all ranks."""
        self._steps += 1
        self._skipped += result.skipped
        self._count = self._count + 1 if result.skipped and not result.is_spike else 0
        limit = self._config.max_consecutive_skipped_steps
        return limit > 0 and (self._count >= limit or result.loss_scale_exhausted)

    def make_error(
        self, plan: StepPlan, result: StepResult, state: TrainState, resume: str
    ) -> RunAborted:
        """The error that ends the run. Collective.

        Args:
            plan: Plan of the last step.
            result: Result of the last step.
            state: State after it.
            resume: Place from which to resume.
        """
        count = "1 step" if self._count == 1 else f"{self._count} consecutive steps"
        known = {"iteration": plan.iteration, "steps": count, "resume": resume}
        circumstances = self._circumstances(result)
        if weight := nonfinite_weight(self._engine):
            known |= {"circumstances": circumstances, "weight": weight}
            problem = Problem("skipped-because-of-weights", **known)
            return RunAborted(problem.render(), ExitCode.SKIPPED_STEPS)
        first_parameter = next((name for name, norm in self._norms if not norm.isfinite()), None)
        ranks = gather_objects((float(result.loss), first_parameter))
        losses = [
            f"\n  The loss of rank {rank} is {loss}"
            for rank, (loss, _) in enumerate(ranks)
            if not math.isfinite(loss)
        ]
        gradients = [
            f"\n  First non-finite gradient: {name} on rank {rank}"
            for rank, (_, name) in enumerate(ranks)
            if name is not None
        ]
        problem = Problem(
            "too-many-skipped-steps",
            **known,
            circumstances=circumstances,
            origin="".join([*losses[:1], *gradients[:1]]),
            first=plan.iteration - self._count + 1,
            samples=self._count * plan.global_batch_size,
            consumed=state.consumed_samples,
            advice="; ".join(self._advice()),
        )
        return RunAborted(problem.render(), ExitCode.SKIPPED_STEPS)

    def _circumstances(self, result: StepResult) -> str:
        config = self._config
        if result.loss_scale_exhausted:
            minimum = f"{option('min_loss_scale')} {config.min_loss_scale:g}"
            return f", with the loss scale at its minimum ({minimum})"
        limit = f"{option('max_consecutive_skipped_steps')} {config.max_consecutive_skipped_steps}"
        scale = "" if result.loss_scale is None else f"; loss scale {result.loss_scale:g}"
        return f" ({limit}){scale}"

    def _advice(self) -> Iterator[str]:
        yield f"a lower {option('lr')} or a longer warm-up"
        if self._config.fp16:
            yield f"a new run with {option('bf16')}, which needs no loss scale"
        if self._config.fp16 and self._config.loss_scale is not None:
            static = f"{option('loss_scale')} {self._config.loss_scale:g}"
            yield f"a dynamic loss scale instead of {static}"


def nonfinite_weight(engine: ZeroEngine) -> str:
    """A parameter that is not finite, with its ranks, such as " (final_norm.bias of rank 1)"; "" if
    all are finite. Collective."""
    names = dict(enumerate(gather_objects(engine.first_nonfinite_weight())))
    first = next(filter(None, names.values()), None)
    ranks = [rank for rank, name in names.items() if name == first]
    return "" if first is None else f" ({first} of {ranks_text(ranks)})"
