"""Limits of loss and gradient norm, from the last steps."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.spike_limits import spike_limits
from megatron_ds.train_state import SpikeLimits, StepResult, TrainState


def config_with(schedule: dict[str, Any], optimizer: dict[str, Any] | None = None) -> Config:
    values = {"seq_length": 10, "micro_batch_size": 1, "lr": 1.0}
    return Config().with_values({**values, **schedule, **(optimizer or {})})


def spike_config(sigma: float | None, window: int) -> Config:
    spikes = {"skip_loss_spikes": sigma, "skip_loss_spikes_window": window}
    return config_with({"train_iters": 50}, spikes)


def after_steps(config: Config, compared: list[tuple[float, float] | None]) -> TrainState:
    state = TrainState()
    for each in compared:
        plan = schedules.plan(config, state, 1)
        state = state.advance(plan, StepResult(0.0, 0.0, skipped=each is None, compared=each))
    return state


def test_limits_are_the_mean_and_deviations_of_the_last_steps() -> None:
    config = spike_config(3.0, 4)
    assert spike_limits(spike_config(None, 4), TrainState()) is None
    unknown = spike_limits(config, after_steps(config, [(1.0, 2.0)]))
    assert unknown == SpikeLimits(math.inf, math.inf, 4)
    losses = [90.0, 1.0, 2.0, None, 3.0, 4.0]
    state = after_steps(config, [None if loss is None else (loss, 5.0) for loss in losses])
    assert (state.recent_losses, state.recent_norms) == ((1.0, 2.0, 3.0, 4.0), (5.0,) * 4)
    found = spike_limits(config, state)
    deviation = statistics.stdev([1.0, 2.0, 3.0, 4.0])
    loss = pytest.approx(2.5 + 3.0 * deviation)
    assert found == (loss, 5.0, 4, (loss, 5.0))


def test_checked_values_are_at_most_ten_times_the_largest_recorded_ones() -> None:
    """Claim (non-finite): `--check-for-spiky-loss` and `--check-for-large-grads` find values above
    ten times the largest one of the last 100 steps"""
    both = {"train_iters": 200, "check_for_spiky_loss": True, "check_for_large_grads": True}
    steps: list[tuple[float, float] | None] = [(9.0, 8.0), *[(2.0, 0.5)] * 98, (4.0, 1.0)]
    few = after_steps(config_with(both), steps[:9])
    assert spike_limits(config_with(both), few) == SpikeLimits(math.inf, math.inf, 100)
    known = after_steps(config_with(both), steps)
    infinite = (math.inf, math.inf)
    assert spike_limits(config_with(both), known) == (90.0, 80.0, 100, infinite)
    later = after_steps(config_with(both), [*steps, (3.0, 0.1)])
    assert spike_limits(config_with(both), later) == (40.0, 10.0, 100, infinite)
    loss = config_with({**both, "check_for_large_grads": False, "skip_loss_spikes": 4.0})
    limits = spike_limits(loss, later)
    assert limits is not None
    assert limits == (limits.accepted[0], limits.accepted[1], 128, limits.accepted)
    assert limits.loss < 40.0
    off = config_with({**both, "rerun_mode": "disabled"})
    assert spike_limits(off, later) is None


def test_history_of_losses_survives_a_checkpoint_exactly() -> None:
    config = spike_config(3.0, 4)
    state = after_steps(config, [(1 / 3, 0.1), (2 / 3, 1e-300), (math.pi, 1e30)])
    values = json.loads(json.dumps(state.to_dict()))
    assert TrainState.from_dict(values) == state
    del values["recent_losses"], values["recent_norms"]
    assert TrainState.from_dict(values).recent_losses == ()
