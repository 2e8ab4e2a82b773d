"""Options of number formats and loss scaling."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import Condition, Decides, exclusive_problem, option_field, when
from megatron_ds.config.problems import Problem

FP16 = when(fp16=True)
DYNAMIC_SCALE = (FP16, Condition({"loss_scale": (None,)}, without_flags=True))

_of_dynamic_scale = functools.partial(option_field, only_with=DYNAMIC_SCALE)


@dataclass(frozen=True)
class PrecisionConfig:
    """Mixed precision. fp16 keeps fp32 master weights; so does bf16, unless configured
    otherwise."""

    DECIDES = Decides.TRAINING

    fp16: bool = option_field(False, common=True, decides=Decides.FUNCTION)
    """Train in fp16 with loss scaling."""
    bf16: bool = option_field(False, common=True, decides=Decides.FUNCTION)
    """Train in bf16."""
    bf16_master_weights: bool = option_field(False, only_with=when(bf16=True))
    """Keep master weights and optimizer states in bf16, which rounds small updates away
    (bf16_master_weights_and_grads, bf16_optimizer_states)."""
    loss_scale: float | None = option_field(None, above=0, zero_is_off=True, only_with=FP16)
    """Static loss scale of fp16 (default: dynamic loss scaling)."""
    initial_loss_scale: float = _of_dynamic_scale(2.0**16, above=0)
    """Initial dynamic loss scale."""
    min_loss_scale: float = _of_dynamic_scale(1.0, minimum=1)
    """Minimum dynamic loss scale."""
    loss_scale_window: int = _of_dynamic_scale(1000, minimum=1)
    """Number of consecutive steps without overflow before the loss scale is doubled; one more at
    the start and after an overflow, as in DeepSpeed."""
    hysteresis: int = _of_dynamic_scale(2, minimum=1)
    """Number of overflows before the loss scale is halved."""
    max_consecutive_skipped_steps: int = option_field(50, minimum=0, decides=Decides.OPERATION)
    """Exit (status 3) after this many consecutive steps with non-finite gradients, or one at the
    minimum loss scale; 0 disables."""
    accumulate_allreduce_grads_in_fp32: bool = option_field(
        True, only_with=when(bf16=True, fp16=True)
    )
    """`--no-accumulate-allreduce-grads-in-fp32`: accumulate gradients in bf16 or fp16 instead of
    fp32."""
    allow_fp16_on_cpu: bool = option_field(False, only_with=FP16, decides=Decides.OPERATION)
    """Allow fp16 on a CPU, where it is slow."""

    @property
    def name(self) -> str:
        """ "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    def problems(self) -> Iterator[Problem]:
        if self.fp16 and self.bf16:
            yield exclusive_problem("fp16", "bf16")
        if self.min_loss_scale >= 1 and self.min_loss_scale != int(self.min_loss_scale):
            yield Problem("min-loss-scale-not-an-integer", settings=self)
