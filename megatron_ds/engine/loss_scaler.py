"""The dynamic loss scale of fp16, as DeepSpeed's ZeRO optimizers keep it.

Owns what DeepSpeed leaves to chance: at the lowest scale it raises a bare exception in the middle
of a step, and a checkpoint brings the settings of the run that wrote it. It decides nothing: when a
run ends for its skipped steps stands in `training/skips`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

POSITION = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What of a dynamic scaler moves; the rest are settings."""


class LossScale:
    """The scaler of an fp16 optimizer. optimizer: what DeepSpeed's engine holds."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        if self._scaler.dynamic:
            # A step at the lowest scale is then skipped like any other, on all ranks.
            self._scaler.raise_error_at_min_scale = False

    @property
    def value(self) -> float:
        return float(self._scaler.cur_scale)

    @property
    def is_exhausted(self) -> bool:
        """Whether the next overflow finds the scale at its lowest and no hysteresis left."""
        scaler = self._scaler
        return bool(
            scaler.dynamic
            and scaler.cur_scale == scaler.min_scale
            and 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
        )

    @contextmanager
    def keep_settings_on_load(self) -> Iterator[None]:
        """Around loading a checkpoint: the scale and its counts come from there, the settings stay
        this run's. Between a static and a dynamic scale nothing is carried over.
        """
        mine = self._scaler
        yield
        theirs = self._scaler
        if mine.dynamic and theirs.dynamic:
            for name in POSITION:
                setattr(mine, name, getattr(theirs, name))
            mine.cur_scale = max(mine.cur_scale, mine.min_scale)
            mine.cur_hysteresis = min(mine.cur_hysteresis, mine.delayed_shift)
        self._optimizer.loss_scaler = mine
        self._optimizer.dynamic_loss_scale = mine.dynamic

    @property
    def _scaler(self) -> Any:
        return self._optimizer.loss_scaler
