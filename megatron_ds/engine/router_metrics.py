"""The metrics of a step that routers report, under the names that are logged."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def router_metrics(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics by name, for `StepResult.extras`.

    Args:
        means: Means over layers and micro-batches, as `RouterLog.take` returns them; empty for a
            dense model.
    """
    if not means:
        return {}
    load_E = means["load"] * means["load"].numel()
    return {
        "load_balancing_loss": means["load_balancing_loss"],
        "router_z_loss": means["z_loss"],
        "token_drop_rate": means["dropped"],
        "max_expert_load": means["largest"] * load_E.numel(),
        **{f"expert_load/{expert}": load for expert, load in enumerate(load_E.unbind())},
    }
