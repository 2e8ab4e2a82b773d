"""Options of the end of a run before its last iteration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config.fields import option_field


@dataclass(frozen=True)
class StoppingConfig:
    """Conditions that end a run early, after a save."""

    exit_interval: int | None = option_field(None, minimum=1, zero_is_off=True)
    exit_duration_in_mins: float | None = option_field(None, above=0, zero_is_off=True)
    kill_switch_path: str | None = option_field(None, aliases=("kill-switch-file",), metavar="FILE")
