"""Options of number formats and loss scaling."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from megatron_ds.config.fields import (
    ANY_VALUE,
    Condition,
    Decides,
    exclusive_problem,
    option_field,
    when,
)
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

FP16 = when(fp16=True)
FP8 = when(fp8_format=ANY_VALUE)
DYNAMIC_SCALE = (FP16, Condition({"loss_scale": (None,)}, without_flags=True))

FP8_MULTIPLE = 16
"""Kernels of fp8 take matrices whose sizes are multiples of it."""

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

    fp8_format: str | None = option_field(None, choices=("e4m3", "hybrid"))
    """Multiply in fp8 in the linear layers of attention, of feed-forward layers and of experts, in
    training: with gradients in E4M3, or in E5M2 (hybrid)."""
    fp8_recipe: str | None = option_field(
        None, choices=("tensorwise", "rowwise", "blockwise"), only_with=FP8
    )
    """Scales of fp8, from the current values: one for a tensor, one for each row or column, or one
    for each block."""
    fp8_block_size: int = option_field(128, minimum=1, only_with=when(fp8_recipe="blockwise"))
    """Features or tokens of a block that has a scale; a block of weights has the square of it.
    Devices have kernels for 128."""
    first_last_layers_bf16: bool = option_field(False, only_with=FP8)
    """Leave the first and the last transformer layers out of fp8."""
    num_layers_at_start_in_bf16: int = option_field(
        1, minimum=0, only_with=when(first_last_layers_bf16=True)
    )
    """First transformer layers that are left out of fp8."""
    num_layers_at_end_in_bf16: int = option_field(
        1, minimum=0, only_with=when(first_last_layers_bf16=True)
    )
    """Last transformer layers that are left out of fp8."""

    fp8_min_features: int = option_field(1024, minimum=1, only_with=FP8)
    """Leave linear layers out of fp8 whose input and output features, multiplied and divided by
    their sum, are fewer, or are no multiples of 16; a layer of 2,048 to 2,048 features has 1024."""

    def fp8_layers(self, num_layers: int) -> range:
        """Numbers of the transformer layers with linear layers in fp8, of a model with so many."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)

    @property
    def fp8_block(self) -> int | None:
        """Length of the blocks of rows that have scales, and side of those of weights; None: no
        blocks have."""
        return self.fp8_block_size if self.fp8_recipe == "blockwise" else None

    def rounds(self, rows: int, columns: int) -> bool:
        """Whether a matrix of this size is large enough for fp8, and has sizes for its kernels.

        Products save time by the product of both sizes, and casts take it by their sum.
        """
        is_aligned = rows % FP8_MULTIPLE == columns % FP8_MULTIPLE == 0
        return is_aligned and rows * columns >= self.fp8_min_features * (rows + columns)

    @property
    def name(self) -> str:
        """ "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    def problems(self) -> Iterator[Problem]:
        if self.fp16 and self.bf16:
            yield exclusive_problem("fp16", "bf16")
        if self.fp8_format is not None and self.fp8_recipe is None:
            yield Problem("fp8-without-recipe", settings=self)
        if self.min_loss_scale >= 1 and self.min_loss_scale != int(self.min_loss_scale):
            yield Problem("min-loss-scale-not-an-integer", settings=self)
