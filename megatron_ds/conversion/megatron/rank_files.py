"""Files of Megatron-LM's `torch` checkpoints and of both forks of Megatron-DeepSpeed.

Owns which file has which pipeline stage and tensor-parallel rank, and where a layer of a stage is
in the complete model. Files are memory-mapped. Keeps Megatron's names and rows.

    iter_0001000/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt  Megatron-LM; layers restart in a stage
    iter_0001000/mp_rank_TT[_PPP]/distrib_optim.pt          states of its distributed optimizer
    global_step1000/layer_NN-model_TT-model_states.pt       DeepSpeed with pipeline engine
    global_step1000/mp_rank_TT_model_states.pt              DeepSpeed without
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.megatron.arguments import arguments_of
from megatron_ds.conversion.megatron.deepspeed import read_states, zero3_parameters, zero3_states
from megatron_ds.conversion.megatron.distributed_optimizer import assign_buffers, buckets_of
from megatron_ds.conversion.megatron.names import (
    LAYER,
    PREFIX,
    is_copy,
    is_ignored,
    stack_experts,
)
from megatron_ds.conversion.megatron.optimizer import OptimizerStates, assign_states, steps_of
from megatron_ds.conversion.safe_unpickle import read_foreign
from megatron_ds.engine.states.state_reader import MASTER, TensorReader

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
STATE_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
ZERO3_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
WEIGHTS = "weights"
BUFFERS = "distrib_optim.pt"
"""File of Megatron's distributed optimizer, in the folder of the weights."""
NORM_KEYS = {"weight", "bias", "scale"}
SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")
"""Names of gpt-neox without the pipeline engine."""

Shards = dict[str, list[TensorReader]]
"""One tensor per tensor-parallel rank, by Megatron's name, with layers counted over the complete
model."""


@dataclass(frozen=True)
class MegatronContents:
    """The contents of a checkpoint, as its program names and orders them."""

    state: Mapping[str, Any]
    """Everything but the weights: arguments, version, counters."""
    shards: Shards
    optimizer: Mapping[str, Shards] = field(default_factory=dict)
    """Shards of the optimizer's states, by kind; empty if they cannot be read."""
    steps: int | None = None
    """Steps of the optimizer."""
    unread: str = ""
    """Reason that the optimizer's states cannot be read."""


def read_legacy(folder: Path) -> MegatronContents:
    """Opens `mp_rank_*` folders below an `iter_*` or `release` folder."""
    files = _rank_files(folder)
    stages, ranks, expert_ranks = _sizes(folder, files)
    kinds: dict[str, Shards] = defaultdict(lambda: defaultdict(list))
    state: dict[str, Any] = {}
    states: list[OptimizerStates] = []
    for rank in range(ranks):
        loaded = [
            [read_state_dict(files[stage, rank, expert_rank]) for stage in range(stages)]
            for expert_rank in range(expert_ranks)
        ]
        state = state or {key: value for key, value in loaded[0][0].items() if key != "model"}
        chunks = [[_chunks(content) for content in contents] for contents in loaded]
        _add(kinds[WEIGHTS], chunks, rank)
        stage_states = [
            _optimizer_states(tensors, content.get("optimizer"), files[stage, rank, 0].parent)
            for stage, (tensors, content) in enumerate(zip(chunks[0], loaded[0], strict=True))
        ]
        states += stage_states
        for key in stage_states[0].by_kind if not any(part.unread for part in states) else ():
            _add(kinds[key], [[part.by_kind[key] for part in stage_states]], rank)
    unread = next((part.unread for part in states if part.unread), "")
    return _contents(folder, state, kinds, ranks, states[0].steps, unread)


def _rank_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """The files by pipeline stage, tensor- and expert-parallel rank.

    Of two numbers, the second counts stages if there are several.
    """
    matches = [RANK_FOLDER.fullmatch(path.name) for path in sorted(folder.glob("mp_rank_*"))]
    files: dict[tuple[int, ...], Path] = {}
    args: Mapping[str, Any] = {}
    for match in filter(None, matches):
        path = folder / match[0] / "model_optim_rng.pt"
        args = args or arguments_of(read_state_dict(path).get("args"))
        rank, stage, expert_rank = (int(index or 0) for index in match.groups())
        if match[3] is None and args.get("pipeline_model_parallel_size") == 1:
            expert_rank = stage
            stage = 0
        files[stage, rank, expert_rank] = path
    tp_size = args.get("tensor_model_parallel_size")
    expert_tp = "expert_tensor_parallel_size"
    if args.get("num_experts") and args.get(expert_tp) not in (None, tp_size):
        part = f"experts of {expert_tp} {args[expert_tp]} beside others of {tp_size}"
        raise user_error("megatron-part-unsupported", path=folder, part=part)
    return files


def _optimizer_states(chunks: list[dict[str, Tensor]], saved: Any, folder: Path) -> OptimizerStates:
    """The states of a rank, in its file or the distributed optimizer's."""
    if any(".mlp.experts." in name for chunk in chunks for name in chunk):
        return OptimizerStates(unread="its optimizer states of experts are not read")
    path = folder / BUFFERS
    if not isinstance(saved, Mapping) or not path.is_file():
        return assign_states(chunks, saved)
    groups = saved.get("optimizer", saved).get("param_groups") or [{}]
    return assign_buffers(chunks, buckets_of(read_state_dict(path)), steps_of(groups[0], {}))


def read_deepspeed(folder: Path) -> MegatronContents:
    """Opens a `global_step*` folder of a Megatron-DeepSpeed fork."""
    layers, states, zero3 = (
        {
            tuple(map(int, match.groups())): path
            for path in sorted(folder.iterdir())
            if (match := pattern.fullmatch(path.name))
        }
        for pattern in (LAYER_FILE, STATE_FILE, ZERO3_FILE)
    )
    if not states and not zero3:
        name = "mp_rank_00_model_states.pt"
        raise user_error("megatron-files-missing", folder=folder, names=name)
    first = read_state_dict(min((states or zero3).values()))
    state = {key: value for key, value in first.items() if key != "module"}
    if optimizer := min(folder.glob("*_optim_states.pt"), default=None):
        state["optimizer"] = read_state_dict(optimizer)
    state["configs"] = [path.read_text() for path in sorted(folder.glob("configs/*.yml"))]
    if layers:
        pipeline, prefixes = _layer_files(folder, layers)
        saved = read_states(folder, pipeline, partial(pipeline_name, prefixes), read_state_dict)
        return MegatronContents(state, pipeline, *saved)
    if not states:
        return _zero3_files(folder, zero3, state)
    files = {(0, *rank, 0): path for rank, path in states.items()}
    _, ranks, _ = _sizes(folder, files)
    rename = _without_pipeline([name for name, _ in _flatten(first["module"])])
    shards: Shards = defaultdict(list)
    for rank in range(ranks):
        module = first["module"] if rank == 0 else read_state_dict(files[0, rank, 0])["module"]
        for name, tensor in _flatten(module):
            shards[rename(name)].append(TensorReader.of(tensor))
    saved = read_states(folder, shards, rename, read_state_dict)
    return MegatronContents(state, _complete(folder, shards, ranks), *saved)


def _without_pipeline(names: Sequence[str]) -> Callable[[str], str]:
    """What gives a weight's name in the complete model, of its name without the pipeline engine.

    gpt-neox numbers the layers of its pipeline even so: `sequential.2.attention.dense.weight`.
    """
    layers: dict[int, set[str]] = defaultdict(set)
    for name in names:
        if match := SEQUENTIAL.fullmatch(name):
            layers[int(match[1])].add(match[2])
    if not layers:
        return lambda name: PREFIX.sub("", name)
    prefixes = layer_prefixes(layers)
    return lambda name: pipeline_name(prefixes, name.removeprefix("sequential."))


def pipeline_name(prefixes: Mapping[int, str], name: str) -> str:
    """A weight's name in the complete model, of its name in the pipeline engine."""
    if name.startswith("tied_modules."):
        return name.split(".", 2)[2]
    layer, _, inner = name.partition(".")
    return f"{prefixes.get(int(layer), '')}{inner}"


def layer_prefixes(names: Mapping[int, Set[str]]) -> dict[int, str]:
    """The prefixes of names in the complete model, by the number of a layer in the pipeline engine.

    Args:
        names: Names of the weights in each layer.
    """
    prefixes: dict[int, str] = {}
    layers = itertools.count()
    for layer, inner in sorted(names.items()):
        if any("attention." in name for name in inner):
            prefixes[layer] = f"layers.{next(layers)}."
        elif inner and inner <= NORM_KEYS:
            prefixes[layer] = "final_norm."
    return prefixes


def _layer_files(
    folder: Path, files: Mapping[tuple[int, ...], Path]
) -> tuple[Shards, dict[int, str]]:
    """One file per layer of the pipeline engine; what a layer is follows from its contents.

    Returns:
        The weights, and `layer_prefixes`.
    """
    numbers = sorted({layer for layer, _ in files})
    ranks = 1 + max(rank for _, rank in files)
    missing = [
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
        for layer in numbers
        for rank in range(ranks)
        if (layer, rank) not in files
    ]
    if missing:
        raise user_error("megatron-files-missing", folder=folder, names=", ".join(missing))
    loaded = {key: dict(_flatten(read_state_dict(path))) for key, path in sorted(files.items())}
    prefixes = layer_prefixes({layer: loaded[layer, 0].keys() for layer in numbers})
    shards: Shards = defaultdict(list)
    for (layer, _), tensors in loaded.items():
        for inner, tensor in tensors.items():
            name = f"{prefixes.get(layer, '')}{inner}"
            if len(shards[name]) < ranks:  # not a tied embedding's second file
                shards[name].append(TensorReader.of(tensor))
    blocks = [layer for layer, prefix in prefixes.items() if LAYER.match(prefix)]
    if gaps := set(range(blocks[0], blocks[-1] + 1)) - set(blocks) if blocks else set():
        names = ", ".join(f"layer_{layer:02d}-model_00-model_states.pt" for layer in sorted(gaps))
        raise user_error("megatron-files-missing", folder=folder, names=names)
    return _complete(folder, shards, ranks), prefixes


def _zero3_files(
    folder: Path, files: Mapping[tuple[int, ...], Path], state: Mapping[str, Any]
) -> MegatronContents:
    """fp32 partitions of each flattened parameter and of its states, one per data-parallel rank."""
    dp_size, tp_size = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    kinds: dict[str, Shards] = defaultdict(lambda: defaultdict(list))
    steps = None
    unread = ""
    for tp_rank in range(tp_size):
        stems = [f"zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}" for rank in range(dp_size)]
        shapes = read_state_dict(folder / f"{stems[0]}_model_states.pt")["param_shapes"]
        saved = [read_state_dict(_optimizer_file(folder, stem)) for stem in stems]
        partitions, steps, reason = zero3_states([file["optimizer_state_dict"] for file in saved])
        unread = unread or reason
        for key, flats in {WEIGHTS: partitions.get(MASTER, []), **partitions}.items():
            for name, tensor in zero3_parameters(shapes, flats):
                kinds[key][PREFIX.sub("", name)].append(tensor)
    return _contents(folder, state, kinds, tp_size, steps, unread)


def _optimizer_file(folder: Path, stem: str) -> Path:
    bf16 = folder / f"bf16_{stem}_optim_states.pt"
    return bf16 if bf16.is_file() else folder / f"{stem}_optim_states.pt"


def read_state_dict(path: Path) -> dict[str, Any]:
    """The state dict in a file of Megatron's or DeepSpeed's.

    Raises:
        UserError: If the file is missing, cannot be read, or has no state dict.
    """
    if not path.is_file():
        raise user_error("megatron-files-missing", folder=path.parent, names=path.name)
    loaded = read_foreign(path)
    if not isinstance(loaded, dict):
        raise user_error("tensor-file-unreadable", path=path, error="it has no state dict")
    return loaded


def _sizes(folder: Path, files: Mapping[tuple[int, ...], Path]) -> tuple[int, ...]:
    """Pipeline stages, tensor- and expert-parallel ranks of complete files, by these."""
    if not files:
        raise user_error("megatron-files-missing", folder=folder, names="mp_rank_00")
    sizes = [1 + max(key[axis] for key in files) for axis in range(3)]
    stages, ranks, expert_ranks = sizes
    missing = [
        f"mp_rank_{rank:02d}"
        + (f"_{stage:03d}" if stages > 1 else "")
        + (f"_{expert_rank:03d}" if expert_ranks > 1 else "")
        for stage, rank, expert_rank in itertools.product(*map(range, sizes))
        if (stage, rank, expert_rank) not in files
    ]
    if missing:
        raise user_error("megatron-files-missing", folder=folder, names=", ".join(missing))
    return stages, ranks, expert_ranks


def _chunks(loaded: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The model of one stage: one chunk, or several with virtual pipeline stages."""
    if "model" in loaded:
        chunks = [loaded["model"]]
    else:
        chunks = [
            loaded[f"model{index}"] for index in range(len(loaded)) if f"model{index}" in loaded
        ]
    return [{PREFIX.sub("", name): tensor for name, tensor in _flatten(chunk)} for chunk in chunks]


def _add(
    shards: Shards, ranks: Sequence[Sequence[Sequence[Mapping[str, Tensor]]]], rank: int
) -> None:
    """Adds the tensors of one tensor-parallel rank, without a stage's copy of another one's.

    Args:
        shards: Receives them.
        ranks: Tensors by expert-parallel rank, stage and chunk.
        rank: The tensor-parallel rank.
    """
    stages = [
        [
            stack_experts([{name: TensorReader.of(part[name]) for name in part} for part in chunk])
            for chunk in zip(*stage, strict=True)
        ]
        for stage in zip(*ranks, strict=True)
    ]
    for name, tensor in _stages_as_one(stages):
        if not is_copy(name) and len(shards[name]) <= rank:
            shards[name].append(tensor)


def _stages_as_one(
    stages: Sequence[Sequence[Mapping[str, TensorReader]]],
) -> Iterator[tuple[str, TensorReader]]:
    """The weights of all stages, with layers counted over the complete model.

    Chunk v of all stages comes before chunk v + 1 of any.
    """
    offset = 0
    for chunk in zip(*stages, strict=True):
        for weights in chunk:
            layers = [int(match[1]) for name in weights if (match := LAYER.match(name))]
            for name, tensor in weights.items():
                if match := LAYER.match(name):
                    name = f"layers.{int(match[1]) + offset}.{name[match.end() :]}"
                yield name, tensor
            offset += max(layers, default=-1) + 1


def _flatten(nested: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dicts, by dotted name."""
    if isinstance(nested, Tensor):
        yield prefix, nested
    elif isinstance(nested, Mapping):
        for key, value in nested.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            if not is_ignored(name):
                yield from _flatten(value, name)


def _contents(
    folder: Path,
    state: Mapping[str, Any],
    kinds: Mapping[str, Shards],
    ranks: int,
    steps: int | None,
    unread: str,
) -> MegatronContents:
    complete = {key: _complete(folder, shards, ranks) for key, shards in kinds.items()}
    weights = complete.pop(WEIGHTS)
    return MegatronContents(state, weights, {} if unread else complete, steps, unread)


def _complete(folder: Path, shards: Shards, ranks: int) -> Shards:
    for name, parts in shards.items():
        if len(parts) != ranks:
            raise user_error("megatron-rank-without-weight", folder=folder, name=name)
    return dict(shards)
