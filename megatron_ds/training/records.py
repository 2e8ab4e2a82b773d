"""What a run reports: one record per step, per log interval and per evaluation, and who takes them.

The records are plain numbers, averaged over the data-parallel ranks already. This file knows
neither how they were measured nor how they are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SPLITS = ("validation", "test")


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Its fields, in this order, are the keys of the JSONL file."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    """Mean over the global batch, nats per token."""
    grad_norm: float | None
    """Before clipping; not finite for a skipped step, None if the engine does not know it."""
    learning_rate: float
    """The rate that this step used."""
    weight_decay: float
    global_batch_size: int
    loss_scale: float | None
    """Of fp16; None otherwise."""
    skipped: bool
    """The weights were left as they were, because the gradient was not finite."""
    nan: bool
    """The loss was not finite."""
    seconds: float
    """Of the step alone, without evaluation and saving."""
    tokens_per_second: float
    """Of all devices together."""
    tflops: float
    """10^12 model floating-point operations per second and device, recomputation not counted."""
    warm_up: bool
    """Its time says nothing of the others': the first step of a process, or one that compiled."""
    curriculum_seqlen: int | None = None
    """Tokens of each sample in this step; None without --curriculum-seqlen."""


@dataclass(frozen=True)
class IntervalRecord:
    """The steps since the last one of its kind."""

    last: StepRecord
    """The interval's last step; counters and settings are read from it."""
    total_iterations: int
    lm_loss: float | None
    """Mean over the steps that were not skipped; None if all were."""
    params_norm: float | None
    """After the last step; None if it was not asked for."""
    skipped: int
    nan: int
    seconds_per_iteration: float
    """Over the steps that are no warm-up; over all if there are no others."""
    samples_per_second: float | None
    """Over the steps that are no warm-up, as are the next two; None if there are no others."""
    tokens_per_second_per_device: float | None
    tflops: float | None


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    split: str
    """ "validation" or "test"."""
    label: str
    """In words: "iteration 100", "the end of training for test data"."""
    loss: float
    group: str = ""
    """Name of the group of data, where the user gave one."""

    @property
    def ppl(self) -> float:
        """Perplexity, its exponent held at 20 as in Megatron so that it stays printable."""
        return math.exp(min(20.0, self.loss))


class Logger:
    """Takes records on the one rank that reports; this one drops them all."""

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        """Takes the steps since the last call; they must be safe when this returns."""

    def log_interval(self, record: IntervalRecord) -> None:
        """Takes a log interval; the steps of it came before."""

    def log_eval(self, record: EvalRecord) -> None:
        """Takes an evaluation; the steps before it came before."""

    def close(self) -> None:
        """Nothing comes after this."""
