"""The settings of the steps of another trainer's run, which a run that continues it must have.

Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepSettings:
    """What the files of a run state of its steps. The run that continues it takes over what is not
    given, and must not contradict it otherwise."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options by field: `lr` and `weight_decay`, the largest of all weights, Adam's betas and
    epsilon, clipping, the batch size in samples."""
    lr: Mapping[str, float] = field(default_factory=dict)
    """Maximum learning rate of each weight by canonical name; empty if unknown."""
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    """Weight decay of each weight, likewise."""
    rates: Mapping[int, float] = field(default_factory=dict)
    """Learning rates by iteration, as far as the files have them, of weights with the maximum
    `options["lr"]`."""
    schedule: Callable[[int], float] | None = None
    """Learning rate of such weights in any iteration; None if the files have no schedule."""
    schedule_name: str = ""
    """The trainer's name of the schedule."""
    schedule_flags: str = ""
    """Flags with which a run here has this schedule; empty if there are none."""
    tokens_of_rank: int | None = None
    """Tokens that one data-parallel rank has read, if the files do not state how many there are;
    the samples of the run then follow from its batch size."""
    data: str = ""
    """The trainer's order of the data, for the message that a run here has another one."""
