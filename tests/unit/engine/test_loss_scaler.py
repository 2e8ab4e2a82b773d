"""What a checkpoint brings of a loss scale, and what stays this run's."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from megatron_ds.engine.loss_scaler import LossScale


class Optimizer:
    def __init__(self, scaler: Any) -> None:
        self.loss_scaler = scaler
        self.dynamic_loss_scale = scaler.dynamic


def dynamic(scale: float, window: int = 10, lowest: float = 1.0, hysteresis: int = 2) -> Any:
    return DynamicLossScaler(scale, window, lowest, hysteresis, consecutive_hysteresis=False)


def moved(scaler: Any) -> Any:
    scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 7, 4, 2
    return scaler


def loaded(mine: Any, theirs: Any) -> tuple[Any, Optimizer]:
    optimizer = Optimizer(mine)
    scale = LossScale(optimizer)
    with scale.keep_settings_on_load():
        optimizer.loss_scaler, optimizer.dynamic_loss_scale = theirs, theirs.dynamic
    return optimizer.loss_scaler, optimizer


def test_the_scale_comes_from_the_checkpoint_and_the_settings_from_the_run() -> None:
    scaler, optimizer = loaded(dynamic(2.0**16, window=3), moved(dynamic(64.0, window=1000)))
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (64.0, 7, 4)
    assert (scaler.scale_window, scaler.cur_hysteresis) == (3, 2)
    assert optimizer.dynamic_loss_scale is True
    assert scaler.raise_error_at_min_scale is False


def test_the_run_s_limits_hold_for_what_is_loaded() -> None:
    scaler, _ = loaded(dynamic(2.0**16, lowest=128.0, hysteresis=1), moved(dynamic(64.0)))
    assert (scaler.cur_scale, scaler.cur_hysteresis) == (128.0, 1)


@pytest.mark.parametrize("static_now", [True, False])
def test_between_static_and_dynamic_nothing_is_carried_over(static_now: bool) -> None:
    both = (LossScaler(8.0), dynamic(2.0**16))
    mine, theirs = both if static_now else both[::-1]
    scaler, optimizer = loaded(mine, theirs)
    assert scaler is mine
    assert scaler.cur_scale == (8.0 if static_now else 2.0**16)
    assert optimizer.dynamic_loss_scale is not static_now


@pytest.mark.parametrize(
    ("scaler", "spent"),
    [
        (dynamic(1.0, hysteresis=1), True),
        (dynamic(1.0, hysteresis=2), False),
        (dynamic(2.0, hysteresis=1), False),
        (LossScaler(1.0), False),
    ],
)
def test_a_scale_is_spent_where_deepspeed_would_give_up(scaler: Any, spent: bool) -> None:
    assert LossScale(Optimizer(scaler)).is_exhausted is spent
