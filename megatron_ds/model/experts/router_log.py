"""Values that the routers of a model report, and the scale of auxiliary losses' gradients.

The auxiliary losses are not part of the model's output: each mixture-of-experts layer adds their
gradient to its output's gradient in the backward pass. So activation checkpointing and ZeRO see one
output per layer, and the logged loss is the language model's alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.parallel.mesh import Group

ROUTER_VALUES = frozenset({"load_balancing_loss", "z_loss", "dropped", "largest", "load"})
"""Names of the values that a mixture-of-experts layer records."""


class RouterLog:
    """Collects the values of all layers over the micro-batches of a step.

    Args:
        shapes: Shape of each value by name.

    Attributes:
        gradient_scale: Factor of the auxiliary losses' gradients: the factor of a micro-batch's
            loss in the backward pass, which is one over the number of micro-batches, times the loss
            scale of fp16.
        keeps_all_tokens: Whether experts accept all tokens, whatever their capacity.
        is_recording: Whether a forward pass in training is running, and no recomputation.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.gradient_scale = 1.0
        self.keeps_all_tokens = False
        self._shapes = shapes
        self._totals: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._sums: dict[Hashable, tuple[Tensor, int]] = {}
        self._means: dict[Hashable, deque[Tensor]] = {}
        """Means that forward passes have returned, by layer, for the recomputation of these
        passes."""
        self.is_recording = False

    @contextmanager
    def recording(self, *, training: bool) -> Iterator[None]:
        """Record the layers that run in the context, in training.

        A recomputation is outside of it, so that nothing counts twice.
        """
        self.is_recording = training
        try:
            yield
        finally:
            self.is_recording = False

    def record(self, values: dict[str, Tensor]) -> None:
        """Add the values of a layer, which may have only some of the names."""
        if self.is_recording:
            self.add(values)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values outside of `recording`, such as a micro-batch's further losses."""
        self._counts.update(values.keys())
        for name, value in values.items():
            value = value.detach().float()
            self._totals[name] = self._totals.get(name, torch.zeros_like(value)) + value

    def mean_so_far(self, layer: Hashable, value: Tensor, group: Group) -> Tensor:
        """The mean of a layer's value over a group and the micro-batches since the last `take`.

        Collective, except in a recomputation, which receives what its first pass received.
        """
        if not self.is_recording:
            return self._means[layer].popleft()
        value = value.clone()
        if group.size > 1:
            dist.all_reduce(value, group=group.handle)
        total, count = self._sums.get(layer, (torch.zeros_like(value), 0))
        self._sums[layer] = (total + value / group.size, count + 1)
        mean = self._sums[layer][0] / (count + 1)
        self._means.setdefault(layer, deque()).append(mean)
        return mean

    def take(self) -> dict[str, Tensor]:
        """The mean of each value over the layers that recorded it and the micro-batches since the
        last call."""
        means = {name: total / self._counts[name] for name, total in self._totals.items()}
        self._clear()
        return means

    def take_of_stages(self, stages: Group, device: torch.device) -> dict[str, Tensor]:
        """The means over the layers of all pipeline stages; some may have no experts.

        Collective.

        Args:
            stages: Group of the stages.
            device: Where the sums are computed.
        """
        if not self._shapes:
            return {}
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        sums = torch.zeros(sum(sizes) + len(sizes), device=device)
        *parts, counts = sums.split([*sizes, len(sizes)])
        for index, (name, part) in enumerate(zip(self._shapes, parts, strict=True)):
            if name in self._totals:
                part += self._totals[name].flatten()
                counts[index] += self._counts[name]
        dist.all_reduce(sums, group=stages.handle)
        self._clear()
        means = zip(self._shapes.items(), parts, counts, strict=True)
        return {name: (part / count).view(shape) for (name, shape), part, count in means}

    def _clear(self) -> None:
        self._totals = {}
        self._counts = Counter()
        self._sums = {}
        self._means = {}

    def add_gradient(self, x: Tensor, loss: Tensor) -> Tensor:
        """Forward: x. Backward: the gradient of x, and the scaled gradient of the loss."""
        if not loss.requires_grad:
            return x
        result: Tensor = _AddGradient.apply(x, loss, self)
        return result


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, log: RouterLog) -> Tensor:
        ctx.log = log
        ctx.loss = loss.detach()  # a scalar, not worth saving
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.loss, ctx.log.gradient_scale), None


def router_metrics(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics by name, for `StepResult.extras`.

    Args:
        means: Means over layers and micro-batches, as `RouterLog.take` returns them. Names of no
            router are names of metrics.
    """
    others = {name: mean for name, mean in means.items() if name not in ROUTER_VALUES}
    if "load" not in means:
        return others
    load_E = means["load"] * means["load"].numel()
    return {
        **others,
        "load_balancing_loss": means["load_balancing_loss"],
        "router_z_loss": means["z_loss"],
        "token_drop_rate": means["dropped"],
        "max_expert_load": means["largest"] * load_E.numel(),
        **{f"expert_load/{expert}": load for expert, load in enumerate(load_E.unbind())},
    }
