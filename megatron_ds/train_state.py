"""What changes during a run: a few numbers. Everything else is a function of them and of the
configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat


@dataclass(frozen=True)
class StepPlan:
    """What one optimizer step is to do; computed from the configuration and the state before the
    step.
    """

    iteration: int
    """Number of this step, from 1."""
    global_batch_size: int
    """Samples of this step, all data-parallel ranks together."""
    num_micro_batches: int
    """Forward passes of each data-parallel rank."""
    lr: float
    weight_decay: float
    seq_length: int
    """Tokens of each sample; the engine leaves out what a sample has beyond them."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: SupportsFloat
    """This data-parallel rank's mean loss, nats per token; a tensor that nobody has waited for."""
    grad_norm: float | None
    """Global norm of the gradient before clipping; None if it is not known (a skipped step gives
    inf or nan).
    """
    skipped: bool = False
    """The step was dropped because its gradient was not finite."""
    loss_scale: float | None = None
    """Loss scale of fp16."""
    loss_scale_exhausted: bool = False
    """The step was dropped though the dynamic loss scale stood at its lowest."""
    extras: Mapping[str, SupportsFloat] = dataclasses.field(default_factory=dict)
    """Further metrics of this data-parallel rank by name, such as auxiliary losses. Every rank has
    the same names; means over the data-parallel ranks are logged."""


@dataclass(frozen=True)
class TrainState:
    """Where a run stands. It is saved as JSON; all that a resume needs beside the weights and
    optimizer states.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Tokens of these samples that were trained on; a sample cut by --curriculum-seqlen counts with
    what was left of it.
    """
    applied_samples: int = 0
    """Samples of the steps that were not skipped: the clock of the learning rate."""
    applied_tokens: int = 0
    """Tokens of these steps: its clock where a length of its course is given in tokens."""
    applied_iterations: int = 0
    skipped_iterations: int = 0

    def advance(self, plan: StepPlan, result: StepResult) -> TrainState:
        """The state after a step. A skipped step moves the data forward, the learning rate's
        clocks not.
        """
        done = 0 if result.skipped else 1
        tokens = plan.global_batch_size * plan.seq_length
        return TrainState(
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + plan.global_batch_size,
            consumed_tokens=self.consumed_tokens + tokens,
            applied_samples=self.applied_samples + done * plan.global_batch_size,
            applied_tokens=self.applied_tokens + done * tokens,
            applied_iterations=self.applied_iterations + done,
            skipped_iterations=self.skipped_iterations + 1 - done,
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Raises ValueError if a key is missing or unknown.

        A state of before the tokens were counted twice has no applied_tokens; all of its samples
        had one length.
        """
        names = {item.name for item in dataclasses.fields(cls)}
        if set(values) != names and set(values) != names - {"applied_tokens"}:
            raise ValueError(f"state has the keys {sorted(values)}, expected {sorted(names)}")
        state = cls(**{name: int(value) for name, value in values.items()})
        if "applied_tokens" in values or state.consumed_samples <= 0:
            return state
        tokens = state.applied_samples * state.consumed_tokens // state.consumed_samples
        return dataclasses.replace(state, applied_tokens=tokens)
