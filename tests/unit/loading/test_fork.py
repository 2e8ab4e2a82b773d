"""What a fork takes of the run that it continues."""

from __future__ import annotations

from megatron_ds.config import Config, ScheduleConfig
from megatron_ds.loading.fork import _forked
from megatron_ds.train_state import TrainState


def test_a_fork_starts_behind_the_samples_that_were_read() -> None:
    """Those of skipped steps, too. The ramp-up has batches of 4 up to there, which do not fit the
    fork's 8 ranks."""
    ramp = (4, 12, 24)
    schedule = ScheduleConfig(
        micro_batch_size=1, global_batch_size=16, rampup_batch_size=ramp, train_samples=104
    )
    state = TrainState(iteration=6, consumed_samples=24, applied_samples=20, skipped_iterations=1)
    config = _forked(Config(schedule=schedule), state, {"lr": 0.5}, "fork")
    assert config.start_samples == 24
    assert list(config.schedule.problems(config.parallel, 8, config.start_samples)) == []
    assert list(config.schedule.problems(config.parallel, 8, 20)) != []
