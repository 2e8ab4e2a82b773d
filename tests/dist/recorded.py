"""Decisions that a run's ranks record, and that its one-process reference takes over.

A router's choice of experts is discontinuous: where two experts are nearly equal, a rounding error
sends a token elsewhere, and every later number differs by more than rounding. So the reference
routes as the run did, and measures how far each recorded choice is from its own.

The masks of dropout differ with the number of ranks. The reference takes those of the ranks, and
measures whether any two that should differ are the same, and how much they drop.

Shapes: B micro-batch, S sequence, n heads, H hidden, T = S x B tokens, K experts of a token.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatron_ds.model.attention.cores import AttentionCore
from megatron_ds.model.attention.self_attention import Attention
from megatron_ds.model.block import Block
from megatron_ds.model.embedding import Embedding
from megatron_ds.model.experts.router import Router
from megatron_ds.parallel.context.slices import SequenceSlices, in_sequence_order
from megatron_ds.parallel.mesh import Mesh

Decisions = dict[str, list[Any]]
"""By the name of the module: of each forward pass, in order."""
DROPOUT = functional.dropout
SIGMAS = 6
"""Accepted deviation of the fraction that is dropped, in standard deviations."""


@dataclass
class Recorded:
    """What a rank decided in each forward pass of the training."""

    place: tuple[int, int, int]
    """Data-parallel rank, rank among those that share sequences, and tensor-parallel rank."""
    cp_size: int = 1
    """Context-parallel size."""
    experts: Decisions = field(default_factory=dict)
    """Of routers: each token's experts [T, K]."""
    weights: Decisions = field(default_factory=dict)
    """Of attention layers: the weights of the softmax that are kept [B, n, S, S]. The queries are
    those of this rank."""
    activations: Decisions = field(default_factory=dict)
    """Of blocks and embeddings: the elements that are kept [S, B, H], of each dropout."""


class Recorder:
    """Records what a model decides in training on this rank.

    Args:
        model: The modules of this rank.
        mesh: Mesh of this process.
        masks: Record the masks of dropout, too.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, masks: bool) -> None:
        self.recorded = Recorded((mesh.dp.rank, mesh.sequence.rank, mesh.tp.rank), mesh.cp.size)
        self._masks: list[Tensor] | None = None
        self._records_masks = masks
        for name, module in model.named_modules():
            if isinstance(module, Router):
                found = []
                self.recorded.experts[name] = found
                module.register_forward_hook(partial(_record_experts, found))
            elif masks and isinstance(module, Attention):
                found = []
                self.recorded.weights[name] = found
                module._attend = partial(  # type: ignore[method-assign]
                    _attend_and_record, found, module, module._attend, mesh
                )
            elif masks and isinstance(module, (Block, Embedding)):
                found = []
                self.recorded.activations[name] = found
                module.register_forward_pre_hook(partial(self._start, found))

    def _start(self, found: list[Any], module: nn.Module, _: Any) -> None:
        self._masks = None
        if module.training and not _is_recomputing():
            self._masks = []
            found.append(self._masks)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, masks of activations are recorded."""
        original = functional.dropout

        def drop(x: Tensor, probability: float) -> Tensor:
            if self._masks is not None and not _is_recomputing():
                state = torch.get_rng_state()
                self._masks.append(original(torch.ones_like(x), probability) != 0)
                torch.set_rng_state(state)
            return original(x, probability)

        with mock.patch.object(functional, "dropout", drop if self._records_masks else original):
            yield


def _is_recomputing() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)  # a backward pass is running


def _record_experts(found: list[Tensor], router: nn.Module, _: Any, output: Any) -> None:
    if router.training and not _is_recomputing():
        found.append(output.experts_TK.clone())


def _attend_and_record(
    found: list[Tensor],
    module: Attention,
    attend: Callable[..., Tensor],
    mesh: Mesh,
    core: AttentionCore,
    *inputs: Tensor,
) -> Tensor:
    recorded = module.training and not _is_recomputing()
    return attend(_RecordingCore(core, mesh, found) if recorded else core, *inputs)


class _RecordingCore:
    """A core that first finds out what dropout keeps: with unit vectors as values, the output is
    the weights of the softmax."""

    def __init__(self, core: AttentionCore, mesh: Mesh, found: list[Tensor]) -> None:
        self._core = core
        self._mesh = mesh
        self._found = found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        with mock.patch.object(functional, "dropout", DROPOUT):  # no mask of activations
            return self._attend(q, k, v, dropout, *sinks_n)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        state = torch.get_rng_state()
        length = k.shape[2] * self._mesh.sequence.size
        size = v.shape[-1]
        slices = SequenceSlices.of(length, self._mesh.cp, self._mesh.ulysses)
        units = slices.take(torch.eye(length, dtype=v.dtype), 0)
        kept = []
        with torch.no_grad():
            for columns in units.split(size, dim=1):
                padded = functional.pad(columns, (0, size - columns.shape[1])).expand_as(v)
                torch.set_rng_state(state)
                weights = self._core.attend(q, k, padded, dropout, *sinks_n)
                kept.append(weights[..., : columns.shape[1]] != 0)
        self._found.append(torch.cat(kept, dim=-1))
        torch.set_rng_state(state)
        return self._core.attend(q, k, v, dropout, *sinks_n)


class Replay:
    """The decisions of all ranks of a run, for the model of one process.

    Its forward passes are the run's micro-batches in the order of the data.

    Args:
        ranks: What the ranks recorded.
    """

    def __init__(self, ranks: Sequence[Recorded]) -> None:
        self._ranks = sorted(ranks, key=lambda rank: rank.place)
        self._dp_size = 1 + max(rank.place[0] for rank in ranks)
        self._cp_size = ranks[0].cp_size
        self._activations: Iterator[Tensor] = iter(())
        self._dropped = 0
        self._possible = 0
        self._expected = 0.0
        self.gap = 0.0
        """Largest difference between the score of a token's K-th expert here, and that of the worst
        expert that the run chose."""

    @contextmanager
    def deciding(self, model: nn.Module) -> Iterator[None]:
        """Within it, a model decides as the run did."""
        for name, module in model.named_modules():
            passes = itertools.count()
            if isinstance(module, Router):
                route = partial(self._route, name, passes, module.forward)
                module.forward = route  # type: ignore[method-assign]
            elif isinstance(module, Attention) and self._parts("weights", name, 0):
                attend = partial(self._attend, name, passes, module.dropout)
                module._attend = attend  # type: ignore[method-assign]
            elif isinstance(module, (Block, Embedding)):
                module.register_forward_pre_hook(partial(self._start, name, passes))
        has_masks = any(rank.activations for rank in self._ranks)
        drop = self._drop if has_masks else functional.dropout
        with mock.patch.object(functional, "dropout", drop):
            yield

    def problems(self, gap: float) -> list[str]:
        """What is wrong with the decisions themselves.

        Args:
            gap: By how much rounding may lower the score of a chosen expert.
        """
        found = [f"{kind} share masks" for kind in _shared(self._ranks)]
        # The reference is the same model, so a dropout that is missing is missing there, too.
        found += [
            f"{name} drops {len(masks)} times"
            for rank in self._ranks
            for name, passes in rank.activations.items()
            for masks in passes
            if len(masks) != (1 if name == "embedding" else 2)
        ]
        if self.gap > gap:
            found.append(f"routed to an expert whose score is {self.gap} below the best")
        rate = self._expected
        error = abs(self._dropped - rate * self._possible)
        if error > SIGMAS * (self._possible * rate * (1 - rate)) ** 0.5:
            found.append(f"dropped {self._dropped} of {self._possible}")
        return found

    def _parts(self, kind: str, name: str, number: int) -> list[tuple[tuple[int, int, int], Any]]:
        """What the ranks of a micro-batch decided, with their places."""
        step, dp_rank = divmod(number, self._dp_size)
        return [
            (rank.place, getattr(rank, kind)[name][step])
            for rank in self._ranks
            if rank.place[0] == dp_rank and getattr(rank, kind).get(name)
        ]

    def _route(
        self,
        name: str,
        passes: Iterator[int],
        forward: Callable[[Tensor, int], Any],
        x_TH: Tensor,
        sequences: int,
    ) -> Any:
        parts = self._parts("experts", name, next(passes))
        # Tensor-parallel ranks route the same tokens, or each a slice of the sequence.
        experts_TK = torch.cat([part for place, part in parts if place[2] == 0])
        if len(experts_TK) < len(x_TH):
            experts_TK = torch.cat([part for _, part in parts])
        experts_TK = in_sequence_order(experts_TK, 0, self._cp_size)
        with _Choice(experts_TK) as choice:
            routing = forward(x_TH, sequences)
        self.gap = max(self.gap, choice.gap)
        return routing

    def _attend(
        self,
        name: str,
        passes: Iterator[int],
        probability: float,
        core: AttentionCore,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *sinks_n: Tensor,
    ) -> Tensor:
        by_tp: dict[int, list[Tensor]] = defaultdict(list)
        for (_, _, tp_rank), part in self._parts("weights", name, next(passes)):
            by_tp[tp_rank].append(part)
        kept = torch.cat([torch.cat(slices, dim=2) for slices in by_tp.values()], dim=1)
        kept = in_sequence_order(kept, 2, self._cp_size)
        units = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
        weights = core.attend(q, k, units, 0.0, *sinks_n)
        self._count(kept | (weights == 0), (weights != 0).sum(), probability)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return (weights * kept / (1 - probability)) @ values

    def _start(self, name: str, passes: Iterator[int], *_: Any) -> None:
        parts = self._parts("activations", name, next(passes))
        slices = [masks for place, masks in parts if place[2] == 0]
        self._activations = (
            in_sequence_order(torch.cat(each), 0, self._cp_size)
            for each in zip(*slices, strict=True)
        )

    def _drop(self, x: Tensor, probability: float) -> Tensor:
        kept = next(self._activations)
        self._count(kept, kept.numel(), probability)
        return x * kept / (1 - probability)

    def _count(self, kept: Tensor, possible: int | Tensor, probability: float) -> None:
        self._dropped += int(kept.numel() - kept.sum())
        self._possible += int(possible)
        self._expected = probability


class _Choice(TorchFunctionMode):
    """Makes `topk` return given indices."""

    def __init__(self, indices: Tensor) -> None:
        super().__init__()
        self.indices = indices
        self.gap = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.topk:
            return result
        chosen = args[0].gather(-1, self.indices)
        self.gap = (result.values.amin(-1) - chosen.amin(-1)).max().item()
        return torch.return_types.topk((chosen, self.indices))


def _shared(ranks: Sequence[Recorded]) -> Iterator[str]:
    """What has the same masks throughout the training although it should draw its own."""
    weights: dict[tuple[Any, ...], Tensor] = {}
    for rank in ranks:
        for name, passes in rank.weights.items():
            for step, kept in enumerate(passes):
                for head, one in enumerate(kept.unbind(1)):
                    # Ranks of a shared sequence have slices of the same heads' masks.
                    weights[rank.place, name, step, head] = one
    activations = {
        (rank.place[:2], name, step, number): mask
        for rank in ranks
        if rank.place[2] == 0
        for name, passes in rank.activations.items()
        for step, masks in enumerate(passes)
        for number, mask in enumerate(masks)
    }
    yield from (f"{axis} of attention" for axis in _equal_axes(weights))
    yield from (f"{axis} of activations" for axis in _equal_axes(activations))


AXES = ("ranks", "layers", "micro-batches", "heads or places")


def _equal_axes(masks: dict[tuple[Any, ...], Tensor]) -> Iterator[str]:
    """Axes of the keys along which two values have the same masks everywhere."""
    for number, axis in enumerate(AXES):
        by_value: dict[Any, dict[Any, bytes]] = defaultdict(dict)
        for key, mask in masks.items():
            by_value[key[number]][key[:number] + key[number + 1 :]] = mask.numpy().tobytes()
        for one, other in itertools.combinations(by_value.values(), 2):
            if one == other:
                yield axis
                break
