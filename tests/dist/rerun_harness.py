"""Steps with a fault on one rank or in the data, taken by `Rerun` on two ranks."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

from megatron_ds import schedules, spike_limits
from megatron_ds.launch import output
from megatron_ds.launch.exit_codes import RunAborted
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepResult
from megatron_ds.training.rerun import Rerun
from megatron_ds.training.skipped_steps import SkippedSteps
from tests.dist.compare import differing_names
from tests.dist.engine_harness import Meshes, batches_of
from tests.dist.nonfinite_harness import Layout, Training

STEPS = 3
FAULTY_STEP = 2
CHANGED = "layers.0.mlp.fc_in.weight"
"""Parameter that a fault of the weights changes."""


class Fault(NamedTuple):
    """What goes wrong in the second step, and the options with which it is found."""

    options: dict[str, Any]
    weight: float | None
    """Value of an element of a weight from then on."""
    ranks: tuple[int, ...]
    """Ranks whose weight it is."""


class Repeating(Training):
    """A run whose steps are taken by `Rerun`."""

    def __init__(self, layout: Layout, mesh: Mesh, options: dict[str, Any]) -> None:
        super().__init__(layout.config().with_values(options), mesh, STEPS)
        self.problems: list[str] = []
        self.skipped: list[bool] = []
        self.rerun = Rerun(
            self.config,
            mesh,
            self.engine,
            SkippedSteps(self.config.precision, self.engine),
            lambda consumed, shift: batches_of(self.config, mesh, self.samples, consumed, shift),
            lambda: "Resume from global_step0",
            nullcontext,
        )
        if self.config.rerun.check_for_spiky_loss:  # every loss is a spike
            few = (0.01,) * spike_limits.FEWEST
            self.state = dataclasses.replace(self.state, recent_losses=few, recent_norms=few)

    def step(self) -> StepResult:
        plan = schedules.plan(self.config, self.state, self.mesh.dp.size)
        result = self.rerun.step(self.batches, plan, self.state.consumed_samples)
        self.state = self.state.advance(plan, result)
        self.skipped.append(result.skipped)
        return result

    def run(self, fault: Fault | None) -> None:
        """Takes the steps, until a fault ends them."""
        with mock.patch.object(output, "print_on_rank", self.problems.append):
            for step in range(1, STEPS + 1):
                if fault is not None and fault.weight is not None and step == FAULTY_STEP:
                    weight = dict(self.engine._steps.norms.parameters)[CHANGED]
                    if self.mesh.rank in fault.ranks:
                        weight.data.view(-1)[0] = fault.weight
                try:
                    self.step()
                except RunAborted as aborted:
                    self.problems.append(f"{aborted} {aborted.code.value}")
                    return

    def counters(self) -> list[Any]:
        """What DeepSpeed counts, and its loss scale."""
        engine = self.engine._engine
        scale = self.engine._steps.loss_scale
        names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
        return [*(getattr(engine, name) for name in names), scale and scale.state]


def take_steps(layout: Layout, fault: Fault, meshes: Meshes) -> dict[str, Any]:
    """Three steps with a fault, and the same ones without.

    Returns:
        The problems and whether each step was skipped, with the fault; counters of both, and the
        names of the weights and states that differ, unless the fault changes weights.
    """
    mesh = meshes.of(layout.config().parallel)
    faulty, clean = (Repeating(layout, mesh, options) for options in (fault.options, {}))
    faulty.run(fault)
    clean.run(None)
    outcome = {
        "problems": faulty.problems,
        "skipped": faulty.skipped,
        "counters": (faulty.counters(), clean.counters()),
        "differences": differing_names(faulty.state_tensors(), clean.state_tensors())
        if fault.weight is None
        else None,
    }
    faulty.close()
    clean.close()
    return outcome
