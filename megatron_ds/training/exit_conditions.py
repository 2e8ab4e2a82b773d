"""When a run ends before its last iteration: asked once per step, on all ranks together."""

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

    words: str
    code: ExitCode
    urgent: bool
    """Asked for from outside: what is left to do is to save. Whoever sent a signal may kill what
    is still there after seconds (launchers: 30)."""


class ExitConditions:
    """The reasons to end early: a signal, a lost launcher, the kill switch, the clock, the
    iteration.

    Every method is collective, and the ranks agree: what one of them saw ends all of them.
    began: when the program did, by time.monotonic().
    """

    def __init__(
        self, config: LoggingConfig, stop: StopRequest, device: torch.device, began: float
    ) -> None:
        self._config = config
        self._stop = stop
        self._device = device
        self._began = began

    def external_stop(self, iteration: int) -> StopDecision | None:
        """The reason to end that came from outside, at any moment; None to go on."""
        return self._any_rank(self._external_reasons(iteration))

    def after_step(self, iteration: int) -> StopDecision | None:
        """The reason to end after this iteration; None to go on."""
        config = self._config
        minutes = (time.monotonic() - self._began) / 60
        clock = StopDecision(
            f"exiting program after {config.exit_duration_in_mins} minutes",
            ExitCode.FINISHED,
            urgent=False,
        )
        interval = StopDecision(
            f"exiting program at iteration {iteration}", ExitCode.FINISHED, urgent=False
        )
        late = config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins
        there = config.exit_interval is not None and iteration % config.exit_interval == 0
        return self._any_rank(
            [*self._external_reasons(iteration), (clock, late), (interval, there)]
        )

    def _external_reasons(self, iteration: int) -> list[tuple[StopDecision, bool]]:
        switch = self._config.kill_switch_path
        pulled = StopDecision(
            f"Detected kill switch at {switch}. Exiting, iteration={iteration}",
            ExitCode.FINISHED,
            urgent=True,
        )
        causes = [
            (
                StopDecision(f"exiting program {cause.value}", cause.exit_code, urgent=True),
                self._stop.reason is cause,
            )
            for cause in StopReason
        ]
        return [*causes, (pulled, switch is not None and os.path.exists(switch))]

    def _any_rank(self, reasons: list[tuple[StopDecision, bool]]) -> StopDecision | None:
        seen = torch.tensor([float(hit) for _, hit in reasons], device=self._device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return next(
            (end for (end, _), hit in zip(reasons, seen.tolist(), strict=True) if hit), None
        )
