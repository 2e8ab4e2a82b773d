"""Which parts of a loss scaler a checkpoint restores."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from megatron_ds.engine.deepspeed.loss_scaler import LossScale


class Optimizer:
    def __init__(self, scaler: Any) -> None:
        self.loss_scaler = scaler
        self.dynamic_loss_scale = scaler.dynamic


def dynamic(scale: float, window: int = 10, lowest: float = 1.0, hysteresis: int = 2) -> Any:
    return DynamicLossScaler(scale, window, lowest, hysteresis, consecutive_hysteresis=False)


def after_steps(scaler: Any) -> Any:
    scaler.cur_iter = 7
    scaler.last_overflow_iter = 4
    scaler.cur_hysteresis = 2
    return scaler


def loaded(own: Any, saved: Any) -> tuple[Any, Optimizer]:
    optimizer = Optimizer(own)
    scale = LossScale(optimizer)
    with scale.keep_settings_on_load():
        optimizer.loss_scaler = saved
        optimizer.dynamic_loss_scale = saved.dynamic
    return optimizer.loss_scaler, optimizer


def test_scale_is_restored_and_settings_are_kept() -> None:
    scaler, optimizer = loaded(dynamic(2.0**16, window=3), after_steps(dynamic(64.0, window=1000)))
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (64.0, 7, 4)
    assert (scaler.scale_window, scaler.cur_hysteresis) == (3, 2)
    assert optimizer.dynamic_loss_scale is True
    assert scaler.raise_error_at_min_scale is False


def test_restored_scale_is_limited_by_settings() -> None:
    scaler, _ = loaded(dynamic(2.0**16, lowest=128.0, hysteresis=1), after_steps(dynamic(64.0)))
    assert (scaler.cur_scale, scaler.cur_hysteresis) == (128.0, 1)


def test_scale_grows_a_step_later_at_the_start_and_after_an_overflow() -> None:
    """As documented of --loss-scale-window: DeepSpeed's count of steps begins one step later."""
    scaler = dynamic(4.0, window=3, hysteresis=1)
    scales = []
    scaler.raise_error_at_min_scale = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
        for step in range(1, 16):
            scaler.update_scale(step == 9)
            scales.append(scaler.cur_scale)
    # After steps 4 and 7, halved after step 9, and after steps 13 and 16.
    assert scales == [4.0] * 3 + [8.0] * 3 + [16.0] * 2 + [8.0] * 4 + [16.0] * 3


@pytest.mark.parametrize("is_static", [True, False])
def test_nothing_is_restored_between_static_and_dynamic_scale(is_static: bool) -> None:
    both = (LossScaler(8.0), dynamic(2.0**16))
    own, saved = both if is_static else both[::-1]
    scaler, optimizer = loaded(own, saved)
    assert scaler is own
    assert scaler.cur_scale == (8.0 if is_static else 2.0**16)
    assert optimizer.dynamic_loss_scale is not is_static


@pytest.mark.parametrize(
    ("scaler", "exhausted"),
    [
        (dynamic(1.0, hysteresis=1), True),
        (dynamic(1.0, hysteresis=2), False),
        (dynamic(2.0, hysteresis=1), False),
        (LossScaler(1.0), False),
    ],
)
def test_scale_is_exhausted_where_deepspeed_would_raise(scaler: Any, exhausted: bool) -> None:
    assert LossScale(Optimizer(scaler)).is_exhausted is exhausted
