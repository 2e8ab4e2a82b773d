"""Mistakes that a step of another trainer makes, which a second opinion must name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

MISTAKES = (
    "decay of norms",
    "lost micro-batch",
    "stale moment",
    "clipping left out",
    "swapped rank",
    "doubled gradient",
    "schedule off by one",
    "wrong loss mean",
)
"""Mistakes in the order of steps, from `FIRST` on."""
FIRST = 7
"""The step of the first mistake; the steps before it are right."""
LAST = FIRST + len(MISTAKES) - 1
LOST = 1
"""Position in a step of the micro-batch that is lost, or counts 1.5 times."""


class Mistakes:
    """Makes the mistake of a step.

    Args:
        parameters: Parameters by name.
        tensors: Names of the ones with a stale moment, swapped halves and a doubled gradient.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], tensors: tuple[str, str, str]) -> None:
        self.mistake = ""
        self.norm = 0.0
        self._parameters = parameters
        self._stale, self._swapped, self._doubled = tensors
        self._passes = 0
        self._moment: Tensor | None = None
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)

    def begin(self, step: int) -> None:
        """Starts a step, counted from 1."""
        number = step - FIRST
        self.mistake = MISTAKES[number] if 0 <= number < len(MISTAKES) else ""
        self._passes = 0

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        factors = {"lost micro-batch": 0.0, "wrong loss mean": 1.5}
        is_lost = self._passes == LOST
        self._passes += 1
        return loss * factors.get(self.mistake, 1.0) if is_lost else loss

    @property
    def leaves_out_clipping(self) -> bool:
        return self.mistake == "clipping left out"

    @property
    def is_ahead(self) -> bool:
        """Whether the step has the learning rate of the next one."""
        return self.mistake == "schedule off by one"

    def _before_update(self, optimizer: Optimizer, *arguments: Any) -> None:
        if type(optimizer) is not torch.optim.AdamW:  # a container of it
            return
        if self.mistake == "doubled gradient":
            gradient = self._parameters[self._doubled].grad
            assert gradient is not None
            gradient *= 2
        if self.mistake == "stale moment":
            self._moment = optimizer.state[self._parameters[self._stale]]["exp_avg"].clone()

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer, *arguments: Any) -> None:
        if type(optimizer) is not torch.optim.AdamW:
            return
        if self.mistake == "stale moment":
            optimizer.state[self._parameters[self._stale]]["exp_avg"].copy_(self._moment)
        if self.mistake == "swapped rank":
            weight = self._parameters[self._swapped]
            weight.copy_(torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
        if self.mistake == "decay of norms":
            for group in optimizer.param_groups:
                names = {id(weight): name for name, weight in self._parameters.items()}
                for weight in group["params"]:
                    if "norm" in names[id(weight)]:
                        weight -= group["lr"] * 0.1 * weight


class Log:
    """Losses and gradient norms of a run."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def add(self, step: int, loss: float, norm: float) -> None:
        self.steps.append({"step": step, "loss": loss, "norm": norm})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.steps), encoding="utf-8")
