"""The phases of a run one after the other: each has the schedules of its own configuration.

Counters of a phase begin where `TrainState.stage_start` has it, so a resume finds the phase in the
checkpoint and needs none of the earlier ones. A run without --stages is one phase. Knows no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.config.phases import phase_names
from megatron_ds.config.problems import counted
from megatron_ds.dataclass import dataclass
from megatron_ds.schedules import INITIAL_STATE, ConstantSegment, RunTotals
from megatron_ds.train_state import StepPlan, TrainState


@dataclass(frozen=True)
class RunPhases:
    """The phases of a run, and the steps at which they begin and end."""

    config: Config
    """Configuration of the run."""
    dp_size: int

    def at(self, state: TrainState) -> Config:
        """The configuration of the step after `state`."""
        return self.config.in_phase(state.stage)

    def entered(self, state: TrainState) -> TrainState:
        """`state`, or if its phase is complete the state before the first step of the next one."""
        while state.stage + 1 < len(self.config.schedule.stages) and self._is_complete(state):
            state = state.next_stage()
        return state

    def plan(self, state: TrainState) -> StepPlan:
        """Plan the step after `state`."""
        plan = schedules.plan(self.at(state), self._of_phase(state), self.dp_size)
        factor = state.learning_rate_factor
        decoupled = plan.decoupled_lr
        return dataclasses.replace(
            plan,
            iteration=state.iteration + 1,
            lr=plan.lr * factor,
            decoupled_lr=None if decoupled is None else decoupled * factor,
        )

    def total_iterations(self, state: TrainState = INITIAL_STATE) -> int:
        """Total steps of the run, as `schedules.total_iterations`."""
        if not self.config.schedule.stages:
            return schedules.total_iterations(self.config, self.dp_size, state)
        return self.totals(state)[-1].iterations

    def totals(self, state: TrainState = INITIAL_STATE) -> list[RunTotals]:
        """Counters of the run at the end of each phase, from the phase of `state` on."""
        result = []
        now = RunTotals(state.iteration, state.consumed_samples, state.consumed_tokens)
        for phase, before in self._remaining(state):
            end = schedules.run_totals(phase, self.dp_size, before)
            now = RunTotals(
                now.iterations + end.iterations - before.iteration,
                now.samples + end.samples - before.consumed_samples,
                now.tokens + end.tokens - before.consumed_tokens,
            )
            result.append(now)
        return result

    def tokens_left(self, state: TrainState) -> int:
        """Tokens of the steps that this process still runs, limited by --exit-interval; see
        `schedules.tokens_left`."""
        left = self.total_iterations(state) - state.iteration
        if (interval := self.config.stopping.exit_interval) is not None:
            left = min(left, -state.iteration % interval)
        return schedules.tokens_of_steps(self._segments(state), left)

    def planned_samples(self, state: TrainState) -> tuple[int, int, int]:
        """Samples of each split by the end of the phase, as `schedules.planned_samples`."""
        planned = schedules.planned_samples(self.at(state), self.dp_size, self._of_phase(state))
        if not self.config.schedule.stages:
            return planned
        return self.totals(state)[0].samples, *planned[1:]

    def starts(self, state: TrainState) -> Iterator[TrainState]:
        """`state`, then the states before the first steps of the later phases, which nothing was
        skipped in."""
        yield state
        for end in self.totals(state)[:-1]:
            counts = (*end, end.samples, end.tokens)
            state = dataclasses.replace(TrainState(*counts), stage=state.stage).next_stage()
            yield state

    def describe(self, state: TrainState = INITIAL_STATE) -> Iterator[tuple[str, str]]:
        """The phases from the phase of `state` on, each as (name, description)."""
        names = phase_names(self.config)
        first = state.iteration + 1
        for index, end in enumerate(self.totals(state) if names else (), state.stage):
            phase = self.config.in_phase(index)
            lr = f"learning rate {phase.optimizer.lr:g} {phase.schedule.lr_decay_style}"
            if phase.schedule.lr_decay_style != "constant":
                lr += f" to {phase.schedule.min_lr:g}"
            batch = counted(phase.final_global_batch_size(self.dp_size), "sample")
            yield (
                names[index],
                f"iterations {first:,} to {end.iterations:,}, {end.tokens:,} tokens at its end; "
                f"{lr}, sequence {phase.model.seq_length}, {batch} per step",
            )
            first = end.iterations + 1

    def _is_complete(self, state: TrainState) -> bool:
        """Whether the phase of `state` has no further step."""
        phase = self.at(state)
        before = self._of_phase(state)
        return next(schedules.constant_segments(phase, self.dp_size, before), None) is None

    def _of_phase(self, state: TrainState) -> TrainState:
        return state.of_stage if self.config.schedule.stages else state

    def _remaining(self, state: TrainState) -> Iterator[tuple[Config, TrainState]]:
        """The configuration of each phase from the phase of `state` on, with its counters."""
        yield self.at(state), self._of_phase(state)
        for phase in self.config.phase_configs[state.stage + 1 :]:
            yield phase, INITIAL_STATE

    def _segments(self, state: TrainState) -> Iterator[ConstantSegment]:
        for phase, before in self._remaining(state):
            yield from schedules.constant_segments(phase, self.dp_size, before)
