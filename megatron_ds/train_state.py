"""State of a training run: a few counters, from which everything else is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsFloat

from megatron_ds.config.problems import user_error
from megatron_ds.dataclass import dataclass

STEP = "step"
"""Name of the time of an entire step."""
COMMUNICATION = "communication"
"""Name of the time of a step's collectives."""


STAGE_COUNTERS = (
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "applied_samples",
    "applied_tokens",
)
"""Counters of the run that also count from the start of a stage."""
FACTOR = "learning_rate_factor"
"""Field that only a run whose callbacks have set it has in its file."""


class SpikeLimits(NamedTuple):
    """Upper limits on a step's loss and gradient norm; a step beyond them is skipped."""

    loss: float
    grad_norm: float
    window: int
    """Steps from whose losses and norms the next limits are computed."""
    accepted: tuple[float, float] = (math.inf, math.inf)
    """The limits of a loss and a norm that a repeated step had as well."""


@dataclass(frozen=True)
class StepPlan:
    """Settings of one optimizer step, computed from the configuration and the state before it."""

    iteration: int
    """Number of this step, from 1."""
    global_batch_size: int
    """Samples of this step over all data-parallel ranks."""
    num_micro_batches: int
    """Forward passes of each data-parallel rank."""
    lr: float
    weight_decay: float
    seq_length: int
    """Tokens of each sample; the engine truncates longer samples."""
    limits: SpikeLimits | None = None
    """None without --skip-loss-spikes."""
    decoupled_lr: float | None = None
    """Learning rate of the word embedding and the output layer; None: `lr`."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step."""

    loss: SupportsFloat
    """Mean loss of this data-parallel rank in nats per token; an unsynchronized device tensor."""
    grad_norm: SupportsFloat | None
    """Global gradient norm before clipping; None if unknown, inf or nan in a skipped step. May be
    an unsynchronized device tensor, as the loss."""
    skipped: bool = False
    """Whether the step was skipped, because its gradient was not finite or it was a spike."""
    is_spike: bool = False
    """Whether the step was skipped because it exceeds the plan's limits."""
    compared: tuple[float, float] | None = None
    """The loss and the gradient norm that were compared with the limits, the same on all ranks."""
    loss_scale: float | None = None
    """Loss scale; None without fp16."""
    loss_scale_exhausted: bool = False
    """Whether the step was skipped at the minimum dynamic loss scale."""
    extras: Mapping[str, SupportsFloat] = dataclasses.field(default_factory=dict)
    """Further metrics of this data-parallel rank by name, such as auxiliary losses. Every rank has
    the same names; means over the data-parallel ranks are logged."""
    record: Mapping[str, Any] | None = None
    """Record of this step for --record-every as plain values, the same on all ranks; None if no
    record is due."""


class LossSum(NamedTuple):
    """Loss of several micro-batches on one data-parallel rank, before the division."""

    total: SupportsFloat
    """Sum of the micro-batches' mean losses in nats per token or, with per-token loss, of all
    tokens' losses. An unsynchronized device tensor, as the weight."""
    weight: SupportsFloat
    """Number of micro-batches or, with per-token loss, of counted tokens."""
    nats: SupportsFloat = 0.0
    """Sum of all counted tokens' losses."""


@dataclass(frozen=True)
class TrainState:
    """Progress of a run. Saved as JSON; a resume needs nothing else besides weights and optimizer
    states.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Tokens of these samples; a sample truncated by --curriculum-seqlen counts with its truncated
    length.
    """
    applied_samples: int = 0
    """Samples in applied (not skipped) steps; drives the learning rate schedule."""
    applied_tokens: int = 0
    """Tokens in applied steps; drives the learning rate schedule if it counts tokens."""
    applied_iterations: int = 0
    skipped_iterations: int = 0
    recent_losses: tuple[float, ...] = ()
    """Losses of the last steps, skipped spikes included; empty without --skip-loss-spikes."""
    recent_norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""
    stage: int = 0
    """Position of the current stage in --stages."""
    stage_start: tuple[int, ...] = (0,) * len(STAGE_COUNTERS)
    """STAGE_COUNTERS before its first step."""
    learning_rate_factor: float = 1.0
    """Factor of the scheduled learning rates, which only callbacks change."""

    def advance(self, plan: StepPlan, result: StepResult) -> TrainState:
        """The state after a step. A skipped step advances the consumed counters only."""
        applied = 0 if result.skipped else 1
        tokens = plan.global_batch_size * plan.seq_length
        losses = self.recent_losses
        norms = self.recent_norms
        if plan.limits is not None and result.compared is not None:
            loss, norm = result.compared
            losses = (*losses, loss)[-plan.limits.window :]
            norms = (*norms, norm)[-plan.limits.window :]
        return TrainState(
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + plan.global_batch_size,
            consumed_tokens=self.consumed_tokens + tokens,
            applied_samples=self.applied_samples + applied * plan.global_batch_size,
            applied_tokens=self.applied_tokens + applied * tokens,
            applied_iterations=self.applied_iterations + applied,
            skipped_iterations=self.skipped_iterations + 1 - applied,
            recent_losses=losses,
            recent_norms=norms,
            stage=self.stage,
            stage_start=self.stage_start,
            learning_rate_factor=self.learning_rate_factor,
        )

    @property
    def of_stage(self) -> TrainState:
        """The state whose counters begin with the current stage."""
        starts = zip(STAGE_COUNTERS, self.stage_start, strict=True)
        counts = {name: getattr(self, name) - start for name, start in starts}
        return dataclasses.replace(self, **counts)

    def next_stage(self) -> TrainState:
        """The state before the first step of the next stage, whose losses may be others."""
        start = tuple(getattr(self, name) for name in STAGE_COUNTERS)
        following = dataclasses.replace(self, stage=self.stage + 1, stage_start=start)
        return dataclasses.replace(following, recent_losses=(), recent_norms=())

    def restarted(self) -> TrainState:
        """The state of --reset-iteration: at iteration 0, before the first sample.

        The position in the learning rate schedule is kept.
        """
        return TrainState(applied_samples=self.applied_samples, applied_tokens=self.applied_tokens)

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        later = set() if self.stage else {"stage", "stage_start"}
        if self.learning_rate_factor == 1.0:
            later.add(FACTOR)
        return {name: value for name, value in values.items() if name not in later}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Parse a saved state.

        States of older versions have no applied_tokens; it is derived from the samples, which then
        had one length. Nor have they recent losses.

        Raises:
            UserError: If a key is missing or unknown.
        """
        names = {item.name for item in dataclasses.fields(cls)}
        recent = {name for name in names if name.startswith("recent_")}
        optional = recent | {"applied_tokens", "stage", "stage_start", FACTOR}
        if not names - optional <= set(values) <= names:
            raise user_error(
                "train-state-keys-differ", found=sorted(values), expected=sorted(names)
            )
        others = recent | {"stage_start", FACTOR}
        parsed: dict[str, Any] = {name: int(values[name]) for name in values.keys() - others}
        parsed |= {name: float(values[name]) for name in values.keys() & {FACTOR}}
        parsed |= {name: tuple(map(int, values[name])) for name in values.keys() & {"stage_start"}}
        parsed |= {name: tuple(map(float, values[name])) for name in values.keys() & recent}
        state = cls(**parsed)
        if "applied_tokens" in values or state.consumed_samples <= 0:
            return state
        tokens = state.applied_samples * state.consumed_tokens // state.consumed_samples
        return dataclasses.replace(state, applied_tokens=tokens)
