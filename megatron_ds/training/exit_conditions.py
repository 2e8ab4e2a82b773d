"""Conditions that end a run before its last iteration, agreed between all ranks after each step."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ds.config import StoppingConfig
from megatron_ds.config.problems import user_error
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process.stop_request import StopReason, StopRequest
from megatron_ds.train_state import TrainState
from megatron_ds.training.extensions import RunControl


@dataclass(frozen=True)
class StopDecision:
    """Reason that a run ends early."""

    message: str
    code: ExitCode = ExitCode.FINISHED
    urgent: bool = False
    """Requested from outside: only a checkpoint is still written. The sender of a signal may kill
    the remaining processes after some seconds (launchers: 30)."""


@dataclass(frozen=True)
class ExitConditions:
    """Signals, a lost launcher, the kill switch, the run time and the exit interval.

    Methods are collective: a condition that one rank sees ends all of them. The ranks agree over
    their hosts: an agreement on the device would have to wait until it has finished its work.
    """

    config: StoppingConfig
    total_iterations: int
    """Last iteration of the run, where it ends regularly."""
    stop: StopRequest
    """Request to stop, set by signal handlers and monitors."""
    group: dist.ProcessGroup | None
    """All ranks, for tensors in host memory; None: the default group."""
    started_at: float
    """Start of the program, by time.monotonic()."""
    progress: Callable[[int], object] = str
    """Called with the iteration whenever the ranks have agreed."""

    def external_stop(self, iteration: int) -> StopDecision | None:
        """The external request to stop, if there is one. May be called at any time."""
        return self._any_rank(self._external_conditions(iteration), iteration)

    def after_step(self, iteration: int) -> StopDecision | None:
        """The first condition that holds after an iteration.

        In the last iteration, only external requests count: the run ends regularly.
        """
        conditions = self._external_conditions(iteration)
        if iteration < self.total_iterations:
            limit = self.config.exit_duration_in_mins
            interval = self.config.exit_interval
            is_late = limit is not None and (time.monotonic() - self.started_at) / 60 > limit
            is_due = interval is not None and iteration % interval == 0
            conditions += [
                (is_late, StopDecision(f"exiting program after {limit} minutes")),
                (is_due, StopDecision(f"exiting program at iteration {iteration}")),
            ]
        return self._any_rank(conditions, iteration)

    def of_callbacks(
        self, control: RunControl, state: TrainState
    ) -> tuple[TrainState, StopDecision | None]:
        """The state with what callbacks have changed, and the stop that one of any rank asks for.

        Args:
            control: What they have asked for on this rank.
            state: State after a step.

        Raises:
            UserError: If the ranks have set different factors of the learning rate.
        """
        factor = control.learning_rate_factor
        is_stopped, largest, smallest = self._largest([float(control.is_stopped), factor, -factor])
        if largest != -smallest:
            raise user_error("learning-rate-factors-differ", smallest=-smallest, largest=largest)
        state = dataclasses.replace(state, learning_rate_factor=factor)
        if not is_stopped:
            return state, None
        reason = f": {control.reason}" if control.reason else ""
        text = f"exiting program at iteration {state.iteration} for a callback{reason}"
        return state, StopDecision(text)

    def seconds_left(self, seconds: float) -> float:
        """Seconds until the run ends if its steps take this long: --exit-duration-in-mins may end
        it earlier."""
        limit = self.config.exit_duration_in_mins
        if limit is None:
            return seconds
        return max(0.0, min(seconds, self.started_at + limit * 60 - time.monotonic()))

    def _external_conditions(self, iteration: int) -> list[tuple[bool, StopDecision]]:
        switch = self.config.kill_switch_path
        # One rank looks: a stat of every rank in every step is a load for a shared file system.
        is_killed = switch is not None and dist.get_rank() == 0 and os.path.exists(switch)
        detected = f"Detected kill switch at {switch}. Exiting, iteration={iteration}"
        return [
            *(
                (
                    self.stop.reason is reason,
                    StopDecision(f"exiting program {reason.value}", reason.exit_code, urgent=True),
                )
                for reason in StopReason
            ),
            (is_killed, StopDecision(detected, urgent=True)),
        ]

    def _any_rank(
        self, conditions: list[tuple[bool, StopDecision]], iteration: int
    ) -> StopDecision | None:
        holds = self._largest([float(holds_here) for holds_here, _ in conditions])
        self.progress(iteration)
        decisions = [decision for _, decision in conditions]
        return next(itertools.compress(decisions, holds), None)

    def _largest(self, values: list[float]) -> list[float]:
        """The largest value of all ranks, element by element. Collective."""
        if dist.get_world_size() > 1:
            largest = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
            values = largest.tolist()
        return values
