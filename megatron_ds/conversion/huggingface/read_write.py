"""Models in Hugging Face's format: read from and written to folders of `transformers`.

`families.py` has what is known of each family of models. Neither transformers nor code of a
folder runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.files.local_files import write_files
from megatron_ds.checkpoint.folders.output_folder import OnTensor, output_folder
from megatron_ds.config.problems import Problem, UserError, ignore, user_error
from megatron_ds.conversion.engines.checks import Export, check_engines
from megatron_ds.conversion.engines.facts import PLAIN_NAMES, SPECIAL_TOKENS
from megatron_ds.conversion.finite_tensors import finite
from megatron_ds.conversion.huggingface import tokenizer as hf_tokenizer
from megatron_ds.conversion.huggingface.families import FAMILIES, Family
from megatron_ds.conversion.huggingface.read_config import (
    FROM_MODEL_CONFIG,
    GENERATION,
    read_settings,
)
from megatron_ds.conversion.huggingface.written_config import config_of, without_mup
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values
from megatron_ds.conversion.published import SPECIAL_IDS, Publication
from megatron_ds.conversion.safe_unpickle import is_mappable
from megatron_ds.conversion.safetensors_files import (
    INDEX,
    SINGLE,
    open_safetensors,
    read_index,
    write_sharded,
)
from megatron_ds.conversion.source import (
    READ_DEFAULTS,
    WRITE_DEFAULTS,
    ReadOptions,
    SourceCheckpoint,
    WriteOptions,
    check_sizes,
    declared_weights,
)
from megatron_ds.conversion.weights_locations import HF_CONFIG
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders

PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
TRANSPOSED_ROWS = 64
"""Rows that are transposed at once."""
COPIES = ("shared_head.head.weight", "embed_tokens.weight")


def open_hf(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of a folder.

    Raises:
        UserError: If files are missing or damaged, or the model has parts that ours lacks.
    """
    with malformed_values(path):
        return _open(path)


def _open(path: Path) -> SourceCheckpoint:
    described = read_settings(path)
    family = described.family
    settings = described.settings
    opened = _open_tensors(path).items()
    theirs = {name.removeprefix(family.prefix): tensor for name, tensor in opened}
    has_prefix = any(name.startswith(family.prefix) for name, _ in opened)
    publication = Publication.of_folder(path, settings, has_prefix=has_prefix)
    settings = dataclasses.replace(settings, published=publication.asdict())
    model = settings.model
    tables = _tables(family)
    first = f"{family.layer.format(model.num_layers)}."
    if model.mtp_num_layers and not any(name.startswith(first) for name in theirs):
        settings = settings.without_predictions()  # transformers does not save them
    if not model.untie_embeddings_and_output_weights:
        _remove_copy(theirs, tables[0], tables[1], path)
        tables[0] = tables[1]
    for copy, table in _copies(family, settings, tables):
        _remove_copy(theirs, copy, table, path)
    check_sizes(settings, theirs, path / HF_CONFIG)
    tensors: dict[str, TensorReader] = {}
    used: set[str] = set()
    for name, parts in _parts(family, settings).items():
        missing = [part.name for part in parts if part.name not in theirs]
        if missing:
            raise user_error("hf-tensors-missing", path=path, names=", ".join(missing))
        used.update(part.name for part in parts)
        tensors[name] = _joined(parts, [theirs[part.name] for part in parts])
    left = theirs.keys() - used
    if unknown := sorted(name for name in left if not name.endswith(tuple(family.buffers))):
        raise user_error("hf-tensors-unknown", path=path, names=", ".join(unknown))
    source = SourceCheckpoint(path, "hf", settings, tensors, notes=described.notes)
    return source.checked(may_be_padded=False)


def write_hf(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes a folder for `from_pretrained`, complete, or not at all.

    Args:
        source: The weights.
        folder: Must not exist, or be empty.
        options: Family to write, and size of a file.
        on_tensor: Reports progress.

    Raises:
        UserError: If no family has the parts of the model, or the folder has files already.
        OSError: If the disk fails.
    """
    source = without_mup(source, options.hf_model_type)
    try:
        model_type, values = config_of(source, options.hf_model_type)
    except UserError:
        if not (depths := source.settings.model.mtp_num_layers):
            raise
        options.warn(f"WARNING: {Problem('hf-without-predictions', depths=depths).render()}")
        source = source.without_predictions()
        model_type, values = config_of(source, options.hf_model_type)
    family = FAMILIES[model_type]
    publication = Publication.of(source.settings)

    def warn(problem: Problem) -> None:
        options.warn(f"WARNING: {problem.render()}")

    lost = [] if publication is None else publication.lost_in(source.settings, model_type)
    if publication is not None and lost:
        warn(Problem("hf-export-loses", path=publication.path, lost="; ".join(lost)))
    with output_folder(folder, source.confirm) as temporary:
        data = None if source.native is None else source.native.run.config.get("data")
        tokenizer = hf_tokenizer.tokenizer_files(source.settings, model_type, warn, data)
        special, generation = _special_values(source.settings, model_type, tokenizer)
        values |= special
        has_prefix = family.is_prefixed
        if publication is not None and publication.model_type == model_type:
            has_prefix = publication.has_prefix
        has_tokens = tokenizer.has_special_tokens
        export = Export(model_type, values, source.settings, has_prefix, has_tokens)
        changes = check_engines(export, options.engines, warn)
        if SPECIAL_TOKENS in changes:
            tokenizer = tokenizer.with_special_tokens()
        prefix = family.prefix if has_prefix and PLAIN_NAMES not in changes else ""
        tensors = _their_tensors(family, source, prefix)
        write_sharded(temporary, tensors, shard_bytes=options.shard_bytes, on_tensor=on_tensor)
        texts = {HF_CONFIG: _json(values), GENERATION: _json(generation)}
        write_files(temporary, {**texts, **tokenizer.files})


def _special_values(
    settings: ModelSettings, model_type: str, tokenizer: hf_tokenizer.TokenizerFiles
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The special ids of a config.json, and the values of generation_config.json."""
    publication = Publication.of(settings)
    special = hf_tokenizer.special_ids(settings, SPECIAL_IDS, model_type, tokenizer.special_ids)
    if publication is not None and not publication.has_tokenizer:
        special |= {
            name: tokenizer.special_ids.get(name)
            for name, value in special.items()
            if value is None
        }
    known_ids = {name: value for name, value in special.items() if value is not None}
    generation = dict(settings.generation)
    if generation.items() <= known_ids.items():
        generation = {**known_ids, FROM_MODEL_CONFIG: True}
    return special, generation


@dataclass(frozen=True)
class _Part:
    """One of their tensors, and its place in ours."""

    name: str
    rows: range
    """Rows of our tensor, of stacked experts one after the other."""
    groups: tuple[int, int, int] | None = None
    """Query groups, queries of each, size of a head, where they interleave them."""
    is_transposed: bool = False
    experts: int = 0
    """Number of experts that are stacked in our tensor; 0 for a tensor without experts."""

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Its shape, of our tensor's."""
        shape = (len(self.rows), *ours[2 if self.experts else 1 :])
        return shape[::-1] if self.is_transposed else shape

    def to_theirs(self, full: Tensor) -> Tensor:
        full = full.flatten(0, 1) if self.experts else full
        value = full[self.rows.start : self.rows.stop]
        if self.groups is not None:
            groups, queries, size = self.groups
            q, k, v = value.split([groups * queries * size, groups * size, groups * size])
            parts = [part.unflatten(0, (groups, -1)) for part in (q, k, v)]
            value = torch.cat(parts, dim=1).flatten(0, 1)
        return _transposed(value) if self.is_transposed else value

    def to_ours(self, value: Tensor) -> Tensor:
        value = _transposed(value) if self.is_transposed else value
        if self.groups is None:
            return value
        groups, queries, size = self.groups
        parts = value.unflatten(0, (groups, -1)).split([queries * size, size, size], dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])


@dataclass(frozen=True)
class _Stack(_Part):
    """A tensor of all experts, [experts, in, out] or [experts, out], gate and up interleaved."""

    sections: int = 1
    """Sections of our tensor that alternate in theirs."""

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        return (ours[0], *reversed(ours[1:]))

    def to_theirs(self, full: Tensor) -> Tensor:
        value: Tensor = full.unflatten(1, (self.sections, -1)).transpose(1, 2).flatten(1, 2)
        return value.transpose(1, -1).contiguous()

    def to_ours(self, value: Tensor) -> Tensor:
        rows: Tensor = value.transpose(1, -1).unflatten(1, (-1, self.sections))
        return rows.transpose(1, 2).flatten(1, 2).contiguous()


def _transposed(matrix: Tensor) -> Tensor:
    """The transposed matrix in memory of its own, copied in blocks of rows that fit the cache."""
    result = matrix.new_empty(matrix.shape[::-1])
    for start in range(0, len(matrix), TRANSPOSED_ROWS):
        rows = matrix[start : start + TRANSPOSED_ROWS]
        result[:, start : start + len(rows)] = rows.t()
    return result


def _parts(family: Family, settings: ModelSettings) -> dict[str, list[_Part]]:
    """Their tensors, without the prefix, for each parameter of ours, in order."""
    model = settings.model
    parts: dict[str, list[_Part]] = {}
    for name, weight in declared_weights(model, settings.moe).items():
        module, _, suffix = name.rpartition(".")
        layer = None
        inner = module
        if module.startswith(("layers.", "predictions.")):
            start, index, inner = module.split(".", 2)
            layer = int(index) + model.num_layers * (start == "predictions")
        path = "" if layer is None else f"{family.layer.format(layer)}."
        if (complete := family.inner.get(f"{inner}.{suffix}")) is not None:
            names = [f"{path}{complete}"]
        else:
            theirs = family.names[module] if layer is None else family.inner[inner]
            names = [f"{path}{stem}.{suffix}" for stem in theirs.split()]
        spec = weight.shard
        first = int(weight.is_stacked)
        is_cut = spec is not None and spec.dim == first
        sections = spec.sections if spec and is_cut else weight.shape[first : first + 1]
        if weight.is_stacked and "{}" not in names[0]:
            rows = range(weight.shape[0] * weight.shape[1])
            parts[name] = [_Stack(names[0], rows, sections=len(sections))]
            continue
        if len(names) == 1:
            sections = (sum(sections),)
        experts = weight.shape[0] if weight.is_stacked else 0
        if experts:
            names = [name.format(expert) for expert in range(experts) for name in names]
            sections *= experts
        starts = [sum(sections[:index]) for index in range(len(sections))]
        grouped = family.grouped_qkv and inner == "attention.qkv"
        queries = model.num_attention_heads // model.kv_heads
        is_matrix = layer is not None and len(weight.shape) == 2
        parts[name] = [
            _Part(
                key,
                range(start, start + size),
                (model.kv_heads, queries, model.head_dim) if grouped else None,
                family.is_transposed and is_matrix,
                experts,
            )
            for key, start, size in zip(names, starts, sections, strict=True)
        ]
    return parts


def _joined(parts: Sequence[_Part], tensors: Sequence[TensorReader]) -> TensorReader:
    """Our tensor of theirs."""
    if isinstance(stack := parts[0], _Stack):
        tensor = tensors[0]
        shape = stack.shape(tensor.shape)
        return TensorReader.full(shape, tensor.dtype, lambda: stack.to_ours(tensor.read()))
    shapes = [
        tensor.shape[::-1] if part.is_transposed else tensor.shape
        for part, tensor in zip(parts, tensors, strict=True)
    ]
    shape = (sum(dims[0] for dims in shapes), *shapes[0][1:])
    experts = parts[0].experts
    if experts:
        shape = (experts, shape[0] // experts, *shape[1:])
    # The smallest type that has the values of all.
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])

    def read() -> Tensor:
        pieces = [part.to_ours(tensor.read()) for part, tensor in zip(parts, tensors, strict=True)]
        if len(pieces) == 1:
            return pieces[0].view(shape)
        return torch.cat([piece.to(dtype) for piece in pieces]).view(shape)

    return TensorReader.full(shape, dtype, read)


def _their_tensors(family: Family, source: SourceCheckpoint, prefix: str) -> TensorReaders:
    """Their tensors of ours, under their complete names.

    Consecutive tensors are parts of one of ours, which is read once.

    Args:
        family: Family that is written.
        source: The weights.
        prefix: Start of all names but the output layer's.
    """
    ours = source.tensors

    @functools.lru_cache(maxsize=1)
    def read(name: str) -> Tensor:
        return ours[name].read()

    def read_part(name: str, part: _Part) -> Tensor:
        return part.to_theirs(read(name))

    tensors = {}
    for name, parts in _parts(family, source.settings).items():
        for part in parts:
            shape = part.shape(ours[name].shape)
            lazy = TensorReader.full(
                shape, ours[name].dtype, functools.partial(read_part, name, part)
            )
            tensors[f"{'' if name.startswith('head.') else prefix}{part.name}"] = lazy
    head, table = _tables(family)
    for copy, original in _copies(family, source.settings, [head, table]):
        ours_name = "head.weight" if original == head else "embedding.word.weight"
        tensors[f"{prefix}{copy}"] = ours.get(ours_name, ours["embedding.word.weight"])
    return tensors


def _open_tensors(path: Path) -> dict[str, TensorReader]:
    """All tensors of a folder, under their names: of the files that transformers reads.

    Raises:
        UserError: If files are missing or damaged, or hold anything but tensors.
    """
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        places: dict[str, Path] = {}
        if (path / single).is_file():
            files = [path / single]
        elif (path / index).is_file():
            places = read_index(path / index)
            files = sorted({*places.values()})
        else:
            continue
        tensors: dict[str, TensorReader] = {}
        for file in files:
            if not file.is_file():
                raise user_error("checkpoint-file-missing", name=file)
            opened = open_safetensors(file) if single == SINGLE else _open_pickled(file)
            # A tensor that several files have is the one in the file that the index names.
            tensors |= {
                name: finite(tensor, name, path)
                for name, tensor in opened.items()
                if places.get(name, file) == file
            }
        return tensors
    raise user_error("hf-folder-without-weights", path=path)


def _open_pickled(path: Path) -> dict[str, TensorReader]:
    values = read_tensors(path, mmap=is_mappable(path))
    if not isinstance(values, dict) or not all(isinstance(v, Tensor) for v in values.values()):
        raise user_error("foreign-file-unreadable", path=path, error="it has other than tensors")
    return {str(name): TensorReader.of(value) for name, value in values.items()}


def _tables(family: Family) -> list[str]:
    """Their output layer and embedding."""
    return [f"{family.names[name]}.weight" for name in ("head", "embedding.word")]


def _copies(
    family: Family, settings: ModelSettings, tables: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Copies of output layer and embedding in layers of multi-token prediction, and the tables."""
    for depth in range(settings.model.mtp_num_layers):
        layer = family.layer.format(settings.model.num_layers + depth)
        yield from zip((f"{layer}.{name}" for name in COPIES), tables, strict=True)


def _remove_copy(tensors: dict[str, TensorReader], head: str, table: str, path: Path) -> None:
    """Leaves a table under its own name, whichever of both names the files have.

    Raises:
        UserError: If both are there and differ: version 5 of transformers unties them, others not.
    """
    if (copy := tensors.pop(head, None)) is None:
        return
    original = tensors.setdefault(table, copy)
    is_same = (original.shape, original.dtype) == (copy.shape, copy.dtype)
    if not is_same or not torch.equal(original.read(), copy.read()):
        raise user_error("hf-tied-weights-differ", path=path, head=head, table=table)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
