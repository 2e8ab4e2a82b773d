"""Decisions that a run's ranks record, and that its one-process reference takes over.

A router's choice of experts is discontinuous: where two experts are nearly equal, a rounding error
sends a token elsewhere, and every later number differs by more than rounding. So the reference
routes as the run did, and measures how far each recorded choice is from its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_ds.model.moe import Router
from megatron_ds.parallel.mesh import Mesh


@dataclass
class Recorded:
    """What a rank decided in each forward pass of the training, in order."""

    place: tuple[int, int, int]
    """Data-, sequence- and tensor-parallel rank."""
    experts: dict[str, list[Tensor]] = field(default_factory=dict)
    """By the name of the router [T, K]: each token's experts."""


def record(model: nn.Module, mesh: Mesh) -> Recorded:
    """Records what a model decides from now on, on this rank."""
    recorded = Recorded((mesh.dp.rank, mesh.sp.rank, mesh.tp.rank))

    def record_experts(found: list[Tensor], router: nn.Module, _: Any, output: Any) -> None:
        if router.training and not _is_recomputing():
            found.append(output.experts_TK.clone())

    for name, module in model.named_modules():
        if isinstance(module, Router):
            recorded.experts[name] = []
            module.register_forward_hook(partial(record_experts, recorded.experts[name]))
    return recorded


def _is_recomputing() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)  # a backward pass is running


class Replay:
    """The decisions of all ranks of a run, for the model of one process.

    Its forward passes are the run's micro-batches in the order of the data.

    Args:
        ranks: What the ranks recorded.
    """

    def __init__(self, ranks: Sequence[Recorded]) -> None:
        self._ranks = sorted(ranks, key=lambda rank: rank.place)
        self._dp_size = 1 + max(rank.place[0] for rank in ranks)
        self.gap = 0.0
        """Largest difference between the score of a token's K-th expert here, and that of the worst
        expert that the run chose."""

    def install(self, model: nn.Module) -> None:
        """Makes a model decide as the run did."""
        for name, module in model.named_modules():
            if isinstance(module, Router):
                forward = partial(self._route, name, module.forward, iter(range(10**6)))
                module.forward = forward  # type: ignore[method-assign]

    def _route(
        self, name: str, forward: Callable[[Tensor], Any], numbers: Iterator[int], x_TH: Tensor
    ) -> Any:
        step, dp_rank = divmod(next(numbers), self._dp_size)
        ranks = [rank for rank in self._ranks if rank.place[0] == dp_rank and name in rank.experts]
        parts = [rank.experts[name][step] for rank in ranks]
        own = [part for rank, part in zip(ranks, parts, strict=True) if rank.place[2] == 0]
        # Tensor-parallel ranks route the same tokens, or each a slice of the sequence.
        experts_TK = torch.cat(own)
        if len(experts_TK) < len(x_TH):
            experts_TK = torch.cat(parts)
        with _Choice(experts_TK) as choice:
            routing = forward(x_TH)
        self.gap = max(self.gap, choice.gap)
        return routing


class _Choice(TorchFunctionMode):
    """Makes `topk` return given indices."""

    def __init__(self, indices: Tensor) -> None:
        super().__init__()
        self.indices, self.gap = indices, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.topk:
            return result
        chosen = args[0].gather(-1, self.indices)
        self.gap = (result.values.amin(-1) - chosen.amin(-1)).max().item()
        return torch.return_types.topk((chosen, self.indices))
