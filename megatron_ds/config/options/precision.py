"""Options of number formats and loss scaling."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import Condition, exclusive_problem, option_field, when
from megatron_ds.config.problems import Problem

FP16 = when(fp16=True)
DYNAMIC_SCALE = (FP16, Condition({"loss_scale": (None,)}, without_flags=True))

_of_dynamic_scale = functools.partial(option_field, only_with=DYNAMIC_SCALE)


@dataclass(frozen=True)
class PrecisionConfig:
    """Mixed precision. fp16 keeps fp32 master weights; so does bf16, unless configured
    otherwise."""

    fp16: bool = option_field(False, "train in fp16 with loss scaling")
    bf16: bool = option_field(False, "train in bf16")
    bf16_master_weights: bool = option_field(
        False,
        "keep master weights and optimizer states in bf16, which rounds small updates away "
        "(bf16_master_weights_and_grads, bf16_optimizer_states)",
        only_with=when(bf16=True),
    )
    loss_scale: float | None = option_field(
        None,
        "static loss scale of fp16 (default: dynamic loss scaling)",
        above=0,
        zero_is_off=True,
        only_with=FP16,
    )
    initial_loss_scale: float = _of_dynamic_scale(2.0**16, "initial dynamic loss scale", above=0)
    min_loss_scale: float = _of_dynamic_scale(1.0, "minimum dynamic loss scale", minimum=1)
    loss_scale_window: int = _of_dynamic_scale(
        1000,
        "number of consecutive steps without overflow before the loss scale is doubled; one more "
        "at the start and after an overflow, as in DeepSpeed",
        minimum=1,
    )
    hysteresis: int = _of_dynamic_scale(
        2, "number of overflows before the loss scale is halved", minimum=1
    )
    max_consecutive_skipped_steps: int = option_field(
        50,
        "exit (status 3) after this many consecutive steps with non-finite gradients, or one at "
        "the minimum loss scale; 0 disables",
        minimum=0,
    )
    accumulate_allreduce_grads_in_fp32: bool = option_field(
        True,
        "accumulate gradients in bf16 or fp16 instead of fp32",
        only_with=when(bf16=True, fp16=True),
    )
    allow_fp16_on_cpu: bool = option_field(
        False, "allow fp16 on a CPU, where it is slow", only_with=FP16
    )

    @property
    def name(self) -> str:
        """ "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    def problems(self) -> Iterator[Problem]:
        if self.fp16 and self.bf16:
            yield exclusive_problem("fp16", "bf16")
        if self.min_loss_scale >= 1 and self.min_loss_scale != int(self.min_loss_scale):
            yield Problem("min-loss-scale-not-an-integer", settings=self)
