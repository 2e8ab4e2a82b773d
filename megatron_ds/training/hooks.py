"""When a run ends before its last iteration: asked once per step, on all ranks together."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from megatron_ds.config import LoggingConfig
from megatron_ds.runtime import Stop

AFTER_SIGNAL = "exiting program after receiving SIGTERM."
"""The one reason that leaves only seconds: launchers kill what is still there after 30 s."""


class ExitConditions:
    """The reasons to end early: a signal, the kill switch, the clock, the iteration."""

    def __init__(self, config: LoggingConfig, stop: Stop, device: torch.device) -> None:
        self._config = config
        self._stop = stop
        self._device = device
        self._started = time.monotonic()

    def reason(self, iteration: int) -> str | None:
        """Why the run should end after this iteration, in words; None to go on. Collective.

        The ranks agree: what one of them saw ends all of them.
        """
        reasons = self._reasons(iteration)
        seen = torch.tensor([float(text is not None) for text in reasons], device=self._device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        words = self._words(iteration)
        return next((text for text, flag in zip(words, seen.tolist(), strict=True) if flag), None)

    def _reasons(self, iteration: int) -> list[str | None]:
        config = self._config
        minutes = (time.monotonic() - self._started) / 60
        hits = (
            self._stop.reason is not None,
            config.kill_switch_path is not None and os.path.exists(config.kill_switch_path),
            config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins,
            config.exit_interval is not None and iteration % config.exit_interval == 0,
        )
        words = self._words(iteration)
        return [text if hit else None for text, hit in zip(words, hits, strict=True)]

    def _words(self, iteration: int) -> list[str]:
        return [
            AFTER_SIGNAL,
            f"Detected kill switch at {self._config.kill_switch_path}. Exiting, "
            f"iteration={iteration}",
            f"exiting program after {self._config.exit_duration_in_mins} minutes",
            f"exiting program at iteration {iteration}",
        ]
