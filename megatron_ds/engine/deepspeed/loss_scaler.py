"""The loss scaler of fp16 in DeepSpeed's ZeRO optimizers.

Corrects two behaviours of DeepSpeed: at the minimum scale its scaler raises an exception in the
middle of a step, and loading a checkpoint replaces the run's settings by the saved ones. When
skipped steps end a run is decided in `training/skipped_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of a dynamic scaler that change during a run; further ones are settings."""


class LossScale:
    """The loss scaler of an fp16 optimizer.

    Args:
        optimizer: ZeRO optimizer of DeepSpeed's engine.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        if self._scaler.dynamic:
            # An overflow at the minimum scale then skips the step on all ranks, as any other does.
            self._scaler.raise_error_at_min_scale = False

    @property
    def value(self) -> float:
        return float(self._scaler.cur_scale)

    @property
    def state(self) -> dict[str, Any]:
        """State that changes from step to step, by name; empty for a static scale."""
        names = STATE if self._scaler.dynamic else ()
        return {name: getattr(self._scaler, name) for name in names}

    @state.setter
    def state(self, values: Mapping[str, Any]) -> None:
        vars(self._scaler).update(values)

    @property
    def is_exhausted(self) -> bool:
        """Whether the scale is at its minimum and the next overflow would lower it."""
        scaler = self._scaler
        return bool(
            scaler.dynamic
            and scaler.cur_scale == scaler.min_scale
            and 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
        )

    @contextmanager
    def keep_settings_on_load(self) -> Iterator[None]:
        """Restore the run's settings after a checkpoint is loaded inside.

        The scale and its counters come from the checkpoint. Nothing is restored from a static
        scale into a dynamic one, or the other way round.
        """
        scaler = self._scaler
        yield
        loaded = self._scaler
        if scaler.dynamic and loaded.dynamic:
            vars(scaler).update({name: getattr(loaded, name) for name in STATE})
            scaler.cur_scale = max(scaler.cur_scale, scaler.min_scale)
            scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)
        self._optimizer.loss_scaler = scaler
        self._optimizer.dynamic_loss_scale = scaler.dynamic

    @property
    def _scaler(self) -> Any:
        return self._optimizer.loss_scaler
