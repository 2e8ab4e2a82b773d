"""Tensors of a GGUF file, as parts of the model's tensors, and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.conversion.gguf.architectures import Architecture
from megatron_ds.conversion.gguf.key_rows import OUTPUT
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.source import SourceCheckpoint, declared_weights
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders
from megatron_ds.parallel.weights import Weight

FP32_ENDS = ("_norm.weight", ".bias", "ffn_gate_inp.weight", "position_embd.weight")
"""Ends of names of tensors that have 32 bits in files of all types."""
PLAIN = "plain"
INTERLEAVED = "interleaved"
"""Form of rows of which two neighbours are rotated together."""
TRANSPOSED = "transposed"
"""Form with the last two dimensions exchanged."""
RAISED = "raised"
"""Form of norms of 1 + weight."""


@dataclass(frozen=True)
class Part:
    """One of their tensors, and its place in ours."""

    name: str
    rows: range
    """Indices of `dim` of our tensor, once it has the shape `view`."""
    dim: int
    view: tuple[int, ...]
    form: str = PLAIN
    heads: int = 0
    """Heads whose rows are interleaved."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = [*self.view]
        shape[self.dim] = len(self.rows)
        if self.form == TRANSPOSED:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    def to_theirs(self, full: Tensor) -> Tensor:
        value: Tensor = full.reshape(self.view).narrow(self.dim, self.rows.start, len(self.rows))
        if self.form == INTERLEAVED:
            pairs: Tensor = value.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            return pairs
        if self.form == TRANSPOSED:
            return value.transpose(-2, -1).contiguous()
        return value.float() + 1 if self.form == RAISED else value

    def to_ours(self, value: Tensor) -> Tensor:
        if self.form == INTERLEAVED:
            halves: Tensor = value.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            return halves
        if self.form == TRANSPOSED:
            return value.transpose(-2, -1)
        return value.float() - 1 if self.form == RAISED else value


def parts_of(architecture: Architecture, settings: ModelSettings) -> dict[str, list[Part]]:
    """Their tensors for each parameter of ours, in order.

    Raises:
        KeyError: If the architecture lacks a parameter.
    """
    model = settings.model
    parts: dict[str, list[Part]] = {}
    for name, weight in declared_weights(model, settings.moe).items():
        module, _, suffix = name.rpartition(".")
        path = ""
        inner = module
        if module.startswith("layers."):
            _, index, inner = module.split(".", 2)
            path = f"blk.{index}."
        known = architecture.inner if path else architecture.names
        if (complete := known.get(f"{inner}.{suffix}")) is not None:
            names = [f"{path}{complete}"]
        else:
            stems = architecture.split.get(inner) or known[inner]
            names = [f"{path}{stem}.{suffix}" for stem in stems.split()]
        parts[name] = [*_sections(architecture, model, inner, weight, names)]
    return parts


def _sections(
    architecture: Architecture,
    model: ModelConfig,
    inner: str,
    weight: Weight,
    names: Sequence[str],
) -> Iterator[Part]:
    """The parts of one of our tensors, one after the other."""
    if inner in architecture.split:  # keys and values of the latent vector, by head
        sizes = (model.qk_head_dim, model.v_head_dim)
        view = (model.num_attention_heads, sum(sizes), weight.shape[1])
        yield Part(names[0], range(sizes[0]), 1, view, TRANSPOSED)
        yield Part(names[1], range(sizes[0], sum(sizes)), 1, view)
        return
    dim = int(weight.is_stacked)
    if len(names) == 1:
        is_raised = model.apply_layernorm_1p and inner.endswith("norm") and names[0].endswith("t")
        form = RAISED if is_raised else PLAIN
        yield Part(names[0], range(weight.shape[dim]), dim, weight.shape, form)
        return
    assert weight.shard is not None
    start = 0
    heads = (model.num_attention_heads, model.kv_heads, 0)
    for at, (name, size) in enumerate(zip(names, weight.shard.sections, strict=True)):
        rotated = inner == "attention.qkv" and at < 2 and architecture.is_interleaved
        form = INTERLEAVED if rotated else PLAIN
        yield Part(name, range(start, start + size), dim, weight.shape, form, heads[at])
        start += size


def keeps_fp32(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor has 32 bits in files of all types."""
    return len(shape) == 1 or name.endswith(FP32_ENDS)


def their_tensors(architecture: Architecture, source: SourceCheckpoint) -> dict[str, TensorReader]:
    """Their tensors of ours, in the types of ours.

    Consecutive tensors are parts of one of ours, which is read once.
    """
    ours = source.tensors

    @functools.lru_cache(maxsize=1)
    def read(name: str) -> Tensor:
        return ours[name].read()

    def read_part(name: str, part: Part) -> Tensor:
        return part.to_theirs(read(name))

    tensors = {}
    for name, parts in parts_of(architecture, source.settings).items():
        for part in parts:
            dtype = torch.float32 if part.form == RAISED else ours[name].dtype
            load = functools.partial(read_part, name, part)
            tensors[part.name] = TensorReader.full(part.shape, dtype, load)
    if architecture.output == "required" and OUTPUT not in tensors:
        tensors[OUTPUT] = ours["embedding.word.weight"]
    return tensors


def joined(parts: Sequence[Part], shape: tuple[int, ...], tensors: TensorReaders) -> TensorReader:
    """Our tensor of theirs.

    Args:
        parts: All its parts.
        shape: Its shape.
        tensors: Their tensors by name.
    """
    theirs = [tensors[part.name] for part in parts]
    # The smallest type that has the values of all.
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in theirs])

    def read() -> Tensor:
        pieces = [part.to_ours(tensor.read()) for part, tensor in zip(parts, theirs, strict=True)]
        if len(pieces) == 1:
            return pieces[0].reshape(shape).to(dtype)
        return torch.cat([piece.to(dtype) for piece in pieces], dim=parts[0].dim).reshape(shape)

    return TensorReader.full(shape, dtype, read)


def missing_names(
    parts: Mapping[str, Sequence[Part]], tensors: TensorReaders
) -> tuple[list[str], list[str]]:
    """Their names of tensors that a file lacks, and names of the file that have no place."""
    expected = [part.name for sections in parts.values() for part in sections]
    return (
        [name for name in expected if name not in tensors],
        sorted(tensors.keys() - {*expected}),
    )
