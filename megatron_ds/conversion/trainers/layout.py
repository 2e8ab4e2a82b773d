"""The tensors of another trainer as tensors of our model, and back: names, rows, and their order.

Owns how one of our tensors is put together of theirs, of which only the rows that are used are
read. Knows no files.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.source import declared_weights
from megatron_ds.engine.states.state_reader import (
    Columns,
    TensorReader,
    TensorReaders,
    join,
    part_of,
)
from megatron_ds.parallel.weights import Weight

EXPERT = "{expert}"
QKV = "attention.qkv"


@dataclass(frozen=True)
class TrainerNames:
    """Names of a trainer's tensors, without `.weight` and `.bias`."""

    outer: Mapping[str, str]
    """Modules outside of the layers, by canonical name."""
    layer: str
    """Start of the names of layer {}."""
    inner: Mapping[str, str]
    """Modules in a layer, by canonical name; of several names each has its section of our tensor,
    and `{expert}` is the number of an expert."""
    has_neighbors: bool = False
    """Whether neighboring rows of a head's queries and keys are rotated together, as in Meta's
    files, not those half a head apart."""
    stacked: frozenset[str] = field(default_factory=frozenset)
    """Canonical names of modules whose experts are one tensor of theirs."""
    single: Mapping[str, str] = field(default_factory=dict)
    """Tensors in a layer whose complete name is not ours, by canonical name."""

    def has(self, name: str) -> bool:
        """Whether the trainer has a module for one of our tensors."""
        module, _, suffix = name.rpartition(".")
        if not module.startswith("layers."):
            return module in self.outer
        inner = module.split(".", 2)[2]
        return inner in self.inner or f"{inner}.{suffix}" in self.single


@dataclass(frozen=True)
class Piece:
    """Some rows of one of our tensors, as one of theirs has them."""

    name: str
    rows: int
    head_dim: int = 0
    """Rows of a head whose neighbors are rotated together; 0: the order is ours."""
    expert: int | None = None
    """Index in a tensor of all experts."""

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Its shape, without the dimension of experts, of the shape of our matrix or vector."""
        return (self.rows, *ours)

    def read(self, tensor: TensorReader, rows: range, columns: Columns | None) -> Tensor:
        """Rows of it in our order."""
        if self.expert is not None:
            full = tensor.read(range(self.expert, self.expert + 1))[0]
            return part_of(full, rows, columns)
        if not self.head_dim:
            return tensor.read(rows, columns)
        size = self.head_dim
        start = rows.start // size * size
        stop = -(-rows.stop // size) * size
        heads = tensor.read(range(start, stop), columns)
        ordered: Tensor = heads.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)
        return ordered[rows.start - start : rows.stop - start]

    def to_theirs(self, value: Tensor) -> Tensor:
        """Their tensor, of its rows in our order."""
        if not self.head_dim:
            return value
        halves: Tensor = value.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2)
        return halves.flatten(0, 2).contiguous()


Layout = Mapping[str, Sequence[Piece]]
"""Their tensors for each of ours, by canonical name."""


def layout_of(settings: ModelSettings, names: TrainerNames) -> dict[str, list[Piece]]:
    """The tensors of a trainer for each tensor of a model, in the order of its rows."""
    layout = {}
    for name, weight in declared_weights(settings.model, settings.moe).items():
        layout[name] = _pieces(name, weight, settings, names)
    return layout


def _pieces(name: str, weight: Weight, settings: ModelSettings, names: TrainerNames) -> list[Piece]:
    module, _, suffix = name.rpartition(".")
    prefix = ""
    stems = names.outer.get(module, "")
    single = None
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"{names.layer.format(layer)}."
        stems = names.inner.get(module, "")
        single = names.single.get(f"{module}.{suffix}")
    # A module without a name is reported with ours, among the tensors that are missing.
    theirs = [f"{prefix}{stem}.{suffix}" for stem in stems.split()] or [name]
    if single is not None:
        theirs = [f"{prefix}{single}"]
    shape = weight.shape[1:] if weight.is_stacked else weight.shape
    spec = weight.shard
    is_cut = spec is not None and spec.dim == int(weight.is_stacked)
    sections = spec.sections if spec is not None and is_cut and len(theirs) > 1 else shape[:1]
    if module in names.stacked:
        theirs = [stem.removesuffix(f".{suffix}") for stem in theirs]
    pieces = []
    for expert in range(weight.shape[0] if weight.is_stacked else 1):
        for index, (stem, rows) in enumerate(zip(theirs, sections, strict=True)):
            is_rotated = names.has_neighbors and module == QKV and index < 2
            pieces.append(
                Piece(
                    stem.replace(EXPERT, str(expert)),
                    rows,
                    settings.model.head_dim if is_rotated and settings.model.is_rotary else 0,
                    expert if module in names.stacked else None,
                )
            )
    return pieces


def joined(pieces: Sequence[Piece], tensors: Sequence[TensorReader], ours: Weight) -> TensorReader:
    """Our tensor of theirs, of which only the rows that are used are read.

    Args:
        pieces: Their tensors in the order of our rows.
        tensors: Their readers.
        ours: The weight, with its shape; rows of a padded vocabulary may follow.
    """
    # The smallest type that has the values of all.
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    is_whole = len(pieces) == 1 and pieces[0].expert is None and not pieces[0].head_dim
    if is_whole and not ours.is_stacked:
        return tensors[0]
    ends = [0, *itertools.accumulate(piece.rows for piece in pieces)]
    shape = ours.shape
    flat = 1 if not ours.is_stacked else shape[1]
    """Rows of theirs for one of ours, which is an expert of stacked ones."""

    def load(rows: range, columns: Columns | None) -> Tensor:
        inner = None if ours.is_stacked else columns
        parts = []
        for piece, tensor, start in zip(pieces, tensors, ends, strict=False):
            first = max(rows.start * flat - start, 0)
            last = min(rows.stop * flat - start, piece.rows)
            if first < last:
                parts.append(piece.read(tensor, range(first, last), inner).to(dtype))
        if not parts:
            return part_of(torch.empty((0, *shape[1:]), dtype=dtype), range(0), columns)
        value = join(parts)
        if not ours.is_stacked:
            return value
        stacked = value.view(len(rows), *shape[1:])
        return part_of(stacked, range(len(rows)), columns)

    return TensorReader(shape, dtype, load)


def matrices(tensor: TensorReader, rows: int, *, is_transposed: bool = False) -> TensorReader:
    """A matrix whose rows are those of several ones, as a tensor [E, rows, columns].

    Args:
        tensor: The matrix, [E x rows, columns], or vector, [E x rows].
        rows: Rows of one.
        is_transposed: Whether each is transposed, [E, columns, rows].
    """
    inner = (rows, *tensor.shape[1:])

    def load(experts: range, columns: Columns | None) -> Tensor:
        flat = tensor.read(range(experts.start * rows, experts.stop * rows))
        values = flat.reshape(len(experts), *inner)
        if is_transposed:
            values = values.transpose(1, 2)
        return part_of(values, range(len(experts)), columns)

    shape = (tensor.shape[0] // rows, *(inner[::-1] if is_transposed else inner))
    return TensorReader(shape, tensor.dtype, load)


def their_tensors(
    layout: Layout, tensors: TensorReaders, weights: Mapping[str, Weight]
) -> dict[str, TensorReader]:
    """Their tensors of ours, under their names; consecutive ones are rows of one of ours.

    Args:
        layout: The result of `layout_of`.
        tensors: Ours by canonical name.
        weights: Their declarations.
    """
    theirs = {}
    for name, pieces in layout.items():
        ours = tensors[name]
        is_stacked = weights[name].is_stacked
        start = 0
        for piece in pieces:
            rows = range(start, start + piece.rows)
            shape = piece.shape(ours.shape[1 + is_stacked :])
            if piece.expert is None:
                load = functools.partial(_rows_of, ours, rows, piece, is_stacked)
            else:
                shape = (ours.shape[0], *shape)
                load = functools.partial(_rows_of_all, ours, rows)
            if not piece.expert:  # that of the first one is the tensor of all
                theirs[piece.name] = TensorReader.full(shape, ours.dtype, load)
            start += piece.rows
    return theirs


def _rows_of(ours: TensorReader, rows: range, piece: Piece, is_stacked: bool) -> Tensor:
    if not is_stacked:
        return piece.to_theirs(ours.read(rows))
    size = ours.shape[1]
    expert = rows.start // size
    full = ours.read(range(expert, expert + 1))[0]
    return full[rows.start - expert * size : rows.stop - expert * size]


def _rows_of_all(ours: TensorReader, rows: range) -> Tensor:
    """The same rows of every expert."""
    return ours.read()[:, rows.start : rows.stop].contiguous()
