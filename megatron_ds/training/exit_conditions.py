"""Conditions that end a run before its last iteration, agreed between all ranks after each step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ds.config import LoggingConfig
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.lifecycle import StopReason, StopRequest


@dataclass(frozen=True)
class StopDecision:
    """Why a run ends early."""

    message: str
    code: ExitCode
    urgent: bool
    """Requested from outside: only a checkpoint is still written. The sender of a signal may kill
    the remaining processes after some seconds (launchers: 30)."""


class ExitConditions:
    """Signals, a lost launcher, the kill switch, the run time and the exit interval.

    Methods are collective: a condition that one rank sees ends all of them. With several ranks,
    each call waits for the device.

    Args:
        config: Flags with the conditions.
        total_iterations: Last iteration of the run, where it ends regularly.
        stop: Request to stop, set by signal handlers and monitors.
        device: Device of the process group.
        started_at: Start of the program, by time.monotonic().
    """

    def __init__(
        self,
        config: LoggingConfig,
        total_iterations: int,
        stop: StopRequest,
        device: torch.device,
        started_at: float,
    ) -> None:
        self._config = config
        self._total_iterations = total_iterations
        self._stop = stop
        self._device = device
        self._started_at = started_at

    def external_stop(self, iteration: int) -> StopDecision | None:
        """The external request to stop, if there is one. May be called at any time."""
        return self._any_rank(self._external_reasons(iteration))

    def after_step(self, iteration: int) -> StopDecision | None:
        """The first condition that holds after an iteration.

        In the last iteration, only external requests count: the run ends regularly.
        """
        reasons = self._external_reasons(iteration)
        if iteration < self._total_iterations:
            reasons += self._planned_reasons(iteration)
        return self._any_rank(reasons)

    def _planned_reasons(self, iteration: int) -> list[tuple[StopDecision, bool]]:
        limit, interval = self._config.exit_duration_in_mins, self._config.exit_interval
        minutes = (time.monotonic() - self._started_at) / 60
        duration = StopDecision(
            f"exiting program after {limit} minutes", ExitCode.FINISHED, urgent=False
        )
        reached = StopDecision(
            f"exiting program at iteration {iteration}", ExitCode.FINISHED, urgent=False
        )
        return [
            (duration, limit is not None and minutes > limit),
            (reached, interval is not None and iteration % interval == 0),
        ]

    def _external_reasons(self, iteration: int) -> list[tuple[StopDecision, bool]]:
        requests = [
            (
                StopDecision(f"exiting program {reason.value}", reason.exit_code, urgent=True),
                self._stop.reason is reason,
            )
            for reason in StopReason
        ]
        switch = self._config.kill_switch_path
        detected = StopDecision(
            f"Detected kill switch at {switch}. Exiting, iteration={iteration}",
            ExitCode.FINISHED,
            urgent=True,
        )
        return [*requests, (detected, switch is not None and os.path.exists(switch))]

    def _any_rank(self, reasons: list[tuple[StopDecision, bool]]) -> StopDecision | None:
        holds = [float(each) for _, each in reasons]
        if dist.get_world_size() > 1:
            seen = torch.tensor(holds, device=self._device)
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
            holds = seen.tolist()
        return next((stop for (stop, _), each in zip(reasons, holds, strict=True) if each), None)
