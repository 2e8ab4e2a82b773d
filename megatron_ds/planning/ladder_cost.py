"""The ladder of small runs that leads to a planned run, and how long it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_ds.config.problems import UserError
from megatron_ds.dataclass import dataclass
from megatron_ds.launch.output import columns
from megatron_ds.planning.plan import Plan, make_plan
from megatron_ds.planning.settings import with_values
from megatron_ds.scaling.rungs import DEFAULT_BUDGET, Ladder, LadderSettings, ladder_of

HOUR = 3600.0


@dataclass(frozen=True)
class LadderCost:
    """A ladder of `DEFAULT_BUDGET` of the run's operations, or of the smallest sizes if they need
    more, with its time on one device."""

    ladder: Ladder
    plans: tuple[Plan, ...]
    """Plan of each of its runs on one device."""

    @property
    def hours(self) -> list[float]:
        """Hours of each run on one device."""
        pairs = zip(self.ladder.rungs, self.plans, strict=True)
        return [rung.steps * plan.seconds / HOUR for rung, plan in pairs]

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "operations": self.ladder.operations,
            "hours_on_one_device": sum(self.hours),
            "runs": [
                {
                    "layers": rung.config.model.num_layers,
                    "hidden_size": rung.config.model.hidden_size,
                    "parameters": plan.parameters,
                    "tokens": rung.tokens,
                    "samples_per_step": rung.samples,
                    "steps": rung.steps,
                    "hours_on_one_device": hours,
                }
                for rung, plan, hours in zip(self.ladder.rungs, self.plans, self.hours, strict=True)
            ],
        }

    def text(self) -> str:
        """A section of the page of a plan."""
        head = ("layers", "hidden", "parameters", "tokens", "batch", "steps", "hours")
        rows = [
            (
                str(run["layers"]),
                str(run["hidden_size"]),
                f"{run['parameters']:,}",
                f"{run['tokens']:,}",
                f"{run['samples_per_step']:,}",
                f"{run['steps']:,}",
                f"{run['hours_on_one_device']:,.3g}",
            )
            for run in self.values()["runs"]
        ]
        operations = self.ladder.operations
        share = operations / self.ladder.target.operations
        title = (
            f"ladder of small runs that predicts the loss (tools/ladder.py): {operations:.3g} "
            f"operations, {share:.2%} of the run's,\nin {sum(self.hours):,.3g} hours of one device"
        )
        return "\n".join([title, *(f"  {line}" for line in columns([head, *rows])), ""])


def ladder_cost(plan: Plan, tokens: float | None) -> LadderCost | None:
    """The ladder of a plan; None if its tokens are not known, or it has no ladder.

    Args:
        plan: Plan of the large run.
        tokens: Tokens of its complete training.
    """
    if tokens is None or plan.config.schedule.stages:
        return None
    lengths = {"train_tokens": round(tokens), "train_iters": None, "train_samples": None}
    config = with_values(plan.config, global_batch_size=plan.samples, **lengths)
    try:
        ladder = ladder_of(config, LadderSettings(share=DEFAULT_BUDGET, is_budget_raised=True))
        is_given = plan.efficiency_origin == "given"
        efficiency = plan.hardware.efficiency if is_given else 0.0  # by the size of the model
        device = dataclasses.replace(plan.hardware, efficiency=efficiency)
        plans = tuple(make_plan(rung.config, 1, device) for rung in ladder.rungs)
    except UserError:
        return None
    return LadderCost(ladder, plans)
