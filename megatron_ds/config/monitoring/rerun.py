"""Options of what is checked of a step, and of the repetition of a bad one."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron_ds.config.fields import NON_ZERO, option_field, when

MODES = DISABLED, VALIDATE_RESULTS, REPORT_STATS = "disabled", "validate_results", "report_stats"
ERRORS = TRANSIENT, PERSISTENT, CORRECT = "transient_error", "persistent_error", "correct_result"

_validated = functools.partial(option_field, only_with=when(rerun_mode=(None, VALIDATE_RESULTS)))


@dataclass(frozen=True)
class RerunConfig:
    """What is repeated or compared to find a device, a rank or data that is at fault."""

    rerun_mode: str | None = option_field(None, choices=MODES)
    check_for_spiky_loss: bool = _validated(False)
    check_for_large_grads: bool = _validated(False)
    error_injection_rate: int = _validated(0, minimum=0)
    error_injection_type: str = option_field(
        TRANSIENT, choices=ERRORS, only_with=when(error_injection_rate=NON_ZERO)
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option_field(
        None, minimum=1, zero_is_off=True, only_with=when(zero_stage=(None, 0, 1, 2))
    )

    @property
    def mode(self) -> str:
        """The mode in effect: checks of a step imply that bad ones are repeated."""
        checks = self.check_for_spiky_loss or self.check_for_large_grads
        implied = VALIDATE_RESULTS if checks or self.error_injection_rate else DISABLED
        return implied if self.rerun_mode is None else self.rerun_mode

    @property
    def checked_values(self) -> tuple[bool, bool]:
        """Whether the loss and the gradient norm of each step are compared with earlier ones."""
        is_on = self.mode == VALIDATE_RESULTS
        return is_on and self.check_for_spiky_loss, is_on and self.check_for_large_grads
