"""States of Megatron's distributed optimizer: flat buffers without names.

A buffer has the parameters of a model chunk in reverse order, so that the first gradients of a
backward pass are at its start. Versions differ in the padding between parameters and between the
buckets of a buffer. None of this is assumed: the buffers of the master weights must have the
weights of the checkpoint at the expected places, and the moments are at the same places.
Knows no files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ds.conversion.megatron.optimizer import MOMENTS, OptimizerStates
from megatron_ds.engine.states.state_reader import MASTER

PARAM = "param"
"""Key of the buffers with the master weights."""
ALIGNMENT = 64
"""Elements to which newer versions align the start of a parameter."""
COMPARED = 16
"""First elements that are compared before all are."""
MISPLACED = "its distributed optimizer's buffers do not have its weights at the expected places"
"""Reason that states are not read, with the name of a weight."""
UNKNOWN_FORM = "its distributed optimizer has an unknown form"


class Flat(Protocol):
    """A flat tensor that is read in parts."""

    def numel(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


Bucket = Mapping[str, Flat]
"""Flat tensors by PARAM and the moments."""
BufferOffsets = dict[str, tuple[int, int]]
"""Number of the bucket and first element of each weight, by name."""


def buckets_of(saved: Any) -> list[list[Bucket]]:
    """The buckets of each buffer in the file of a distributed optimizer, of any version.

    Returns:
        Nothing if the file has other contents.
    """
    if not isinstance(saved, Mapping):
        return []
    numbers = sorted(key for key in saved if isinstance(key, int))
    return [list(_buckets(saved[index])) for index in numbers]


def _buckets(value: Any) -> Iterator[Bucket]:
    """Dicts of tensors in nested dicts and lists, in their order."""
    if isinstance(value, Mapping) and PARAM in value:
        kinds = [key for key in (PARAM, *MOMENTS) if key in value]
        if isinstance(value[PARAM], Tensor):
            yield {key: value[key].view(-1) for key in kinds}
        else:
            for parts in zip(*(value[key] for key in kinds), strict=True):
                yield {key: part.view(-1) for key, part in zip(kinds, parts, strict=True)}
        return
    values = value.values() if isinstance(value, Mapping) else value
    for item in values if isinstance(value, Mapping | list | tuple) else ():
        yield from _buckets(item)


def assign_buffers(
    chunks: Sequence[Mapping[str, Tensor]], buffers: Sequence[Sequence[Bucket]], steps: int | None
) -> OptimizerStates:
    """The states of a rank by the names of its weights.

    Args:
        chunks: Parameters of each model chunk, in the order of the state dict.
        buffers: Buckets of the buffer of each chunk.
        steps: Steps of the optimizer.
    """
    kinds = (*MOMENTS, MASTER)
    states = OptimizerStates(steps, {key: [{} for _ in chunks] for key in kinds})
    if steps is None or len(buffers) != len(chunks):
        return OptimizerStates(unread=UNKNOWN_FORM)
    for chunk, (weights, buckets) in enumerate(zip(chunks, buffers, strict=True)):
        if any({PARAM, *MOMENTS} - bucket.keys() for bucket in buckets):
            return OptimizerStates(unread="its optimizer states are not those of Adam")
        readers = {name: partial(weights.__getitem__, name) for name in weights}
        places = locate_by_value(readers, buckets)
        if lost := [name for name in weights if name not in places]:
            return OptimizerStates(unread=f"{MISPLACED} ({lost[0]})")
        for name, weight in weights.items():
            bucket, start = places[name]
            for key in kinds:
                flat = buckets[bucket][PARAM if key == MASTER else key]
                part = flat[start : start + weight.numel()].view(weight.shape)
                states.by_kind[key][chunk][name] = part
    return states


def locate_by_value(
    weights: Mapping[str, Callable[[], Tensor]], buckets: Sequence[Bucket]
) -> BufferOffsets:
    """Returns the offsets of a model chunk's master weights in a buffer.

    Args:
        weights: Functions that read them, in the order of the state dict.
        buckets: Buckets of the buffer, in their order.

    Returns:
        The places of the weights that were found.
    """
    read = functools.lru_cache(maxsize=1)(lambda name: weights[name]())
    left = [*weights][::-1]
    offsets: BufferOffsets = {}
    for index, bucket in enumerate(buckets):
        flat = bucket[PARAM]
        base = 0
        end = 0
        while left and end < flat.numel():
            # Either aligned, or the first of a bucket whose padding was left out, or packed.
            aligned = base + -(-(end - base) // ALIGNMENT) * ALIGNMENT
            match = next(
                (
                    (name, start)
                    for name in left  # the expected one is the first
                    for start in dict.fromkeys((aligned, end))
                    if _is_at(read(name), flat, start)
                ),
                None,
            )
            if match is None:
                break
            name, start = match
            base = start if start != aligned else base
            end = start + read(name).numel()
            offsets[name] = index, start
            left.remove(name)
    return offsets


def _is_at(weight: Tensor, flat: Flat, start: int) -> bool:
    """Whether a buffer has the master weights of a weight at a position."""
    if start + weight.numel() > flat.numel():
        return False
    values = weight.reshape(-1)
    for size in (COMPARED, weight.numel()):
        part = flat[start : start + min(size, weight.numel())]
        if not torch.equal(part.to(weight.dtype), values[:size]):
            return False
    return True
