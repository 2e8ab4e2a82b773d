"""Mistakes that a step of another trainer makes, which a second opinion must name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

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
DECAY = 0.1
"""Further weight decay of norms."""


class Place(NamedTuple):
    """Where an optimizer has a weight: in a tensor of its own, or in a part of a flat one."""

    tensor: Tensor
    part: slice
    shape: torch.Size

    def of(self, values: Tensor) -> Tensor:
        """The weight's part of a tensor of the same size, such as a state."""
        return values[self.part].view(self.shape)


class Mistakes:
    """Makes the mistake of a step.

    Args:
        parameters: Parameters by name.
        tensors: Names of the ones with a stale moment, swapped halves and a doubled gradient.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], tensors: tuple[str, str, str]) -> None:
        self.mistake = ""
        self.norm = 0.0
        self.parameters = parameters
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

    def places(self, optimizer: Optimizer) -> dict[str, Place]:
        """Where an optimizer has the weights that it steps, by name."""
        stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        return {
            name: Place(weight, slice(None), weight.shape)
            for name, weight in self.parameters.items()
            if id(weight) in stepped
        }

    @torch.no_grad()
    def _before_update(self, optimizer: Optimizer, *arguments: Any) -> None:
        if type(optimizer) is not torch.optim.AdamW:  # a container of it
            return
        places = self.places(optimizer)
        if self.mistake == "doubled gradient" and self._doubled in places:
            place = places[self._doubled]
            assert place.tensor.grad is not None
            place.of(place.tensor.grad).mul_(2)
        if self.mistake == "stale moment" and self._stale in places:
            place = places[self._stale]
            self._moment = place.of(optimizer.state[place.tensor]["exp_avg"]).clone()

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer, *arguments: Any) -> None:
        if type(optimizer) is not torch.optim.AdamW:
            return
        places = self.places(optimizer)
        if self.mistake == "stale moment" and self._stale in places:
            place = places[self._stale]
            place.of(optimizer.state[place.tensor]["exp_avg"]).copy_(self._moment)
        if self.mistake == "swapped rank" and self._swapped in places:
            weight = places[self._swapped].of(places[self._swapped].tensor)
            weight.copy_(torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
        if self.mistake == "decay of norms":
            rate = optimizer.param_groups[0]["lr"]
            for name, place in places.items():
                if "norm" in name:
                    place.of(place.tensor).mul_(1 - rate * DECAY)


class Log:
    """Losses and gradient norms of a run."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def add(self, step: int, loss: float, norm: float) -> None:
        self.steps.append({"step": step, "loss": loss, "norm": norm})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.steps), encoding="utf-8")
