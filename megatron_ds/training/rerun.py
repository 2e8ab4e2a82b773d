"""Repeats a bad step, on the same and on exchanged ranks, to find its cause: --rerun-mode.

Owns what is compared of the attempts, and the verdict: the data or the model, arithmetic that is
not deterministic, a device, or the weights. The engine skips a bad step before it changes anything,
so every attempt begins where the first one did. Dropout is seeded by the position in the data: a
micro-batch has the same masks on every rank.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ds.config import Config
from megatron_ds.config.options.logging import CORRECT, DISABLED, REPORT_STATS, TRANSIENT
from megatron_ds.config.problems import Problem, counted
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.launch import output
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.ranks.launched_hosts import ranks_text
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import SpikeLimits, StepPlan, StepResult
from megatron_ds.training.skipped_steps import SkippedSteps

SKIPPED = SpikeLimits(-math.inf, -math.inf, 1)
"""Limits that every step exceeds."""
EXCHANGED = 2
"""The attempt in which each data-parallel rank computes the part of the next one."""
ACCEPTED = 3
"""The attempt without the limits that the step has exceeded."""
TOLERANCE = 1e-3
"""Relative difference of equal results, since kernels may add in another order. Gradients are
compared relative to the norm of all: some consist of rounding errors alone."""
GRADIENT = "the gradient of "
Values = Mapping[str, float]
"""Losses of the micro-batches, and norms of the gradients of each parameter, of one rank."""


class Attempt(NamedTuple):
    """A step as this rank has computed it."""

    result: StepResult
    losses: list[Tensor]
    norms: list[tuple[str, Tensor]]

    def values(self) -> Values:
        """Values that attempts compare, in the order of computation. Waits for the device."""
        named = [(f"the loss of micro-batch {n}", loss) for n, loss in enumerate(self.losses, 1)]
        values: dict[str, float] = {}
        for name, value in named + [(GRADIENT + name, norm) for name, norm in self.norms]:
            values[name] = math.hypot(values.get(name, 0.0), float(value))
        return values


class Difference(NamedTuple):
    """A value that was computed differently, first well and then badly."""

    name: str
    good: float
    bad: float

    def __str__(self) -> str:
        return f"{self.name} is {self.bad:.6g} and not {self.good:.6g}"


class Finding(NamedTuple):
    """Observations of one rank about a bad step."""

    host: str
    changed: Difference | None
    """Difference between two attempts of the rank; None if they agree."""
    moved: Difference | None
    """Difference between the ranks that have computed its micro-batches; None if they agree."""
    suspect: int
    """The rank with the worse value of these."""
    worst: tuple[float, str]
    """`badness` of its worst value, and a description of the value."""
    weight: str | None
    """Its first parameter that is not finite."""


def badness(value: float) -> float:
    """The larger a value the worse; the worst ones are not finite."""
    return abs(value) if math.isfinite(value) else math.inf


def differences(first: Values, second: Values, tolerance: float) -> Iterator[Difference]:
    """The values that differ by more than a tolerance; those that are not finite are equal."""
    norms = [norm for name, norm in first.items() if name.startswith(GRADIENT)]
    norm = math.hypot(*filter(math.isfinite, norms))
    for name, value in first.items():
        good, bad = sorted((value, second[name]), key=badness)
        scale = norm if name.startswith(GRADIENT) else abs(value)
        if math.isfinite(good) and not abs(bad - good) <= tolerance * scale:
            yield Difference(name, good, bad)


@dataclass
class Rerun:
    """Takes the steps of a run, and repeats bad ones. Every rank makes the same calls."""

    config: Config
    mesh: Mesh
    engine: ZeroEngine
    skips: SkippedSteps
    batches_of: Callable[[int, int], DeviceBatches]
    """Opens the micro-batches after a number of samples, for the data-parallel rank at an offset
    from this one."""
    finish_saves: Callable[[], str]
    """Completes saves before the run ends, and says from where to resume."""
    patient: Callable[[], AbstractContextManager[None]]
    """Around work that takes long."""
    was_repeated: bool = False
    """Whether the last step was."""
    _repeated: int = 0
    _largest: dict[str, float] = field(default_factory=dict)

    def step(self, batches: Iterator[DeviceBatch], plan: StepPlan, consumed: int) -> StepResult:
        """Takes a step, with as many attempts as it needs.

        Args:
            batches: The micro-batches of this rank.
            plan: Plan of the step.
            consumed: Samples before it.

        Raises:
            RunAborted: If a device or the weights are at fault.
        """
        mode = self.config.rerun.mode
        self.was_repeated = False
        if mode == DISABLED:
            with self.skips.record_gradients():
                return self._take(batches, plan)
        stats = mode == REPORT_STATS
        first = self._attempt(0, batches, replace(plan, limits=SKIPPED) if stats else plan)
        if not (stats or self._is_bad(first.result)):
            return first.result
        self.was_repeated = True
        with self.patient():
            second = self._repeat(1, plan, consumed)
            if stats:
                self._report_stats(plan.iteration, first, second)
                return second.result
            last = self._search(plan, consumed, first, second)
            if last.result.is_spike and plan.limits is not None:
                limits = SpikeLimits(*plan.limits.accepted, plan.limits.window)
                last = self._repeat(ACCEPTED, replace(plan, limits=limits), consumed)
            return last.result

    def record_gradients(self, plan: StepPlan, consumed: int) -> None:
        """Repeats a skipped step to record its gradients for an error message."""
        with (
            closing(self.batches_of(consumed, 0)) as batches,
            self.skips.record_gradients(always=True),
        ):
            self.engine.train_step(batches, plan)

    def _take(self, batches: Iterator[DeviceBatch], plan: StepPlan) -> StepResult:
        interval = self.config.in_effect("check_weight_hash_across_dp_replicas_interval")
        if interval is None or plan.iteration % interval:
            return self.engine.train_step(batches, plan)
        return self.engine.train_step(batches, plan, partial(self._compare_weights, plan.iteration))

    def _attempt(self, count: int, batches: Iterator[DeviceBatch], plan: StepPlan) -> Attempt:
        options = self.config.rerun
        world = self.mesh.world_size
        rate = options.error_injection_rate
        error = options.error_injection_type
        shift = 1 if error == CORRECT and count == EXCHANGED else 0
        rank = self.mesh.dp.ranks[(self.mesh.dp.rank + shift) % self.mesh.dp.size]
        is_due = rate and plan.iteration % rate == 0 and not (error == TRANSIENT and count)
        is_wrong = bool(is_due) and rank == plan.iteration // rate % world
        with self.engine.watch_gradients(is_wrong=is_wrong) as norms:
            result = self._take(batches, plan)
        return Attempt(result, self.engine.losses, norms)

    def _repeat(self, count: int, plan: StepPlan, consumed: int) -> Attempt:
        self.engine.undo_skipped_step()
        with closing(self.batches_of(consumed, int(count == EXCHANGED))) as batches:
            return self._attempt(count, batches, plan)

    def _is_bad(self, result: StepResult) -> bool:
        """Whether a step was skipped, except to find a dynamic loss scale."""
        scaled = result.loss_scale is not None and self.config.precision.loss_scale is None
        is_expected = scaled and not (result.is_spike or result.loss_scale_exhausted)
        return result.skipped and not is_expected

    def _search(self, plan: StepPlan, consumed: int, first: Attempt, second: Attempt) -> Attempt:
        """Searches the cause of a bad step. Returns the last attempt."""
        last = second
        mine = second.values()
        theirs = None
        dp = self.mesh.dp
        repeated = "on the same ranks" if self._is_bad(second.result) else ""
        if repeated and dp.size > 1 and self.mesh.ep.size == 1:  # experts compute for all ranks
            repeated = "on the same and on exchanged ranks"
            last = self._repeat(EXCHANGED, plan, consumed)
            # The rank before this one has computed its part.
            rank_values = gather_objects([*last.values().values()], dp)
            theirs = dict(zip(mine, rank_values[dp.rank - 1], strict=True))
        moved = next(differences(mine, theirs or mine, TOLERANCE), None)
        is_mine = moved is None or badness(mine[moved.name]) == badness(moved.bad)
        name = max(mine, key=lambda name: badness(mine[name]))
        finding = Finding(
            socket.gethostname(),
            next(differences(mine, first.values(), TOLERANCE), None),
            moved,
            self.mesh.rank if is_mine else dp.ranks[dp.rank - 1],
            (badness(mine[name]), f"{name} is {mine[name]:.6g} on rank {self.mesh.rank}"),
            self.engine.first_nonfinite_weight(),
        )
        if repeated and self.config.zero_stage < 3:
            self._compare_weights(plan.iteration)
        self._conclude(plan.iteration, first.result, gather_objects(finding), repeated)
        return last

    def _compare_weights(self, iteration: int) -> None:
        """Ends the run if the weights that it uses in an iteration differ between ranks."""
        with self.patient():
            difference = self.engine.find_different_weights()
        if difference is not None:
            name, ranks = difference
            values = {"name": name, "ranks": _on_hosts(ranks), "resume": self.finish_saves()}
            problem = Problem("weights-differ", iteration=iteration, **values)
            raise RunAborted(problem.render(), ExitCode.FAULTY_RANK)

    def _conclude(
        self, iteration: int, result: StepResult, findings: list[Finding], repeated: str
    ) -> None:
        """Reports the cause of a bad step, and ends the run if it is a device or the weights.

        Args:
            iteration: Number of the step.
            result: Result of the first attempt.
            findings: Findings of all ranks.
            repeated: Ranks on which a repetition of the step was bad as well, as text; "" if it was
                good.
        """
        broken = {rank: item.weight for rank, item in enumerate(findings) if item.weight}
        moved = {item.suspect: item.moved for item in findings if item.moved}
        changed = {rank: item.changed for rank, item in enumerate(findings) if item.changed}
        values: dict[str, Any] = {"iteration": iteration, "bad": _describe(result)}
        named: dict[int, Any] = {**(broken or moved or changed)}
        where = _on_hosts({rank: findings[rank].host for rank in named})
        what = f"on {where} {next(iter(named.values()))}" if named else "only a sum differs"
        if broken or moved:
            values |= {"what": what, "resume": self.finish_saves()}
            problem = Problem("weights-not-finite-in-step", **values)
            status = ExitCode.SKIPPED_STEPS
            if not broken:
                problem = Problem("rank-at-fault", **values)
                status = ExitCode.FAULTY_RANK
            raise RunAborted(problem.render(), status)
        if changed or not repeated:
            output.warn_on_rank(Problem("step-not-reproduced", what=what, **values))
            return
        also = "" if "exchanged" in repeated else ", or a device, which no other rank replaces"
        values |= {"repeated": repeated, "also": also, "worst": max(i.worst for i in findings)[1]}
        output.warn_on_rank(Problem("step-reproduced", **values))

    def _report_stats(self, iteration: int, first: Attempt, second: Attempt) -> None:
        """Adds the differences of a step, and prints the largest one at each log interval."""
        self._repeated += 1
        for name, good, bad in differences(first.values(), second.values(), 0.0):
            self._largest[name] = max(abs((bad - good) / bad), self._largest.get(name, 0.0))
        if iteration % self.config.logging.log_interval == 0:
            here = [
                (size, f"{name} on rank {self.mesh.rank}") for name, size in self._largest.items()
            ]
            size, name = max(gather_objects(max(here, default=(0.0, ""))))
            what = f"differ by at most {size:.3g} ({name})" if name else "are equal"
            steps = counted(self._repeated, "step")
            output.print_on_rank(f"  losses and gradients of {steps} taken twice {what}")
            self._repeated = 0
            self._largest = {}


def _on_hosts(ranks: Mapping[int, str]) -> str:
    """The ranks with their hosts, such as `rank 3 (node1)`."""
    return f"{ranks_text(ranks)} ({', '.join(sorted({*ranks.values()}))})"


def _describe(result: StepResult) -> str:
    if result.compared is None or not result.is_spike:
        return "the gradient is not finite"
    return "a spike, with loss {:.6g} and gradient norm {:.6g}".format(*result.compared)
