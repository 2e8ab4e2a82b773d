"""Checkpoints of Megatron-LM, Megatron Core and Megatron-DeepSpeed as full tensors of our model.

Owns which of the formats a folder has, and the result of reading it: canonical names, rows in our
order, and the options of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ds.checkpoint.formats import megatron_args
from megatron_ds.checkpoint.formats.megatron_files import (
    FoundWeights,
    read_deepspeed,
    read_legacy,
)
from megatron_ds.checkpoint.formats.megatron_names import (
    RowOrders,
    canonical_name,
    join,
    joined_shape,
)
from megatron_ds.checkpoint.formats.source import ModelSettings, WeightsSource
from megatron_ds.checkpoint.formats.torch_dist import is_torch_dist, read_torch_dist
from megatron_ds.checkpoint.lazy_tensors import LazyTensor
from megatron_ds.config.problems import Problem, user_error

TRACKER = "latest_checkpointed_iteration.txt"
DEEPSPEED_TRACKER = "latest"
LEGACY, TORCH_DIST, DEEPSPEED = "megatron", "torch_dist", "megatron-deepspeed"


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A folder of one of the formats."""

    path: Path
    kind: str


@dataclass(frozen=True)
class MegatronModel:
    """The model of a checkpoint."""

    source: WeightsSource
    """Vocabulary tables have their padding, and `vocab_size` counts it if it is not known."""
    iteration: int
    notes: tuple[Problem, ...]
    """What a user should know."""


def is_megatron(path: Path) -> bool:
    """Whether a folder is a checkpoint of one of the formats, or a --save folder that has one."""
    return find_checkpoint(path) is not None


def open_megatron(path: Path) -> WeightsSource:
    """Opens the checkpoint that the pointers of a folder name, or the folder's own.

    Raises:
        UserError: If files are missing or damaged, or the model lacks a part.
    """
    found = find_checkpoint(path)
    if found is None:
        raise user_error("megatron-files-missing", folder=path, names=TRACKER)
    return open_checkpoint(found).source


def find_checkpoint(folder: Path, step: int | None = None) -> MegatronCheckpoint | None:
    """The checkpoint that the pointers of a folder name, or the folder's own.

    Args:
        folder: A --save folder of one of the programs, or one of its checkpoints.
        step: Iteration of the checkpoint instead.

    Returns:
        None if the folder has none of these formats.
    """
    names = [_pointer(folder / DEEPSPEED_TRACKER), _pointer(folder / TRACKER)]
    if step is not None:
        names = [str(step)]
    candidates = [folder / _folder_name(name) for name in names if name]
    candidates += [folder / f"global_step{name}" for name in names if name and name.isdigit()]
    if step is None:
        candidates.append(folder)
    for path in candidates:
        if (kind := _kind(path)) is not None:
            return MegatronCheckpoint(path, kind)
    return None


def open_checkpoint(
    found: MegatronCheckpoint, given: Mapping[str, Any] | None = None
) -> MegatronModel:
    """Opens a checkpoint; tensors are read when they are used.

    Args:
        found: The checkpoint.
        given: Options of the model for a checkpoint that has no arguments.

    Raises:
        UserError: If files are missing or damaged, or our model lacks a part.
    """
    readers = {LEGACY: read_legacy, DEEPSPEED: read_deepspeed, TORCH_DIST: read_torch_dist}
    weights = readers[found.kind](found.path)
    state = weights.state
    args = megatron_args.arguments_of(state.get("args"))
    for part in megatron_args.unsupported_parts(args):
        raise user_error("megatron-part-unsupported", path=found.path, part=part)
    settings = megatron_args.model_settings(args)
    complete = settings or dict(given or {})
    if not complete.get("num_attention_heads"):
        raise user_error("megatron-without-arguments", path=found.path)
    if found.kind == TORCH_DIST:
        orders = megatron_args.row_orders(complete, {}, 3.0)  # the same in all versions
    else:
        orders = megatron_args.row_orders(complete, args, state.get("checkpoint_version"))
    tensors = _canonical(found.path, weights, orders, complete)
    rows = tensors["embedding.word.weight"].shape[0] if "embedding.word.weight" in tensors else 0
    fixed, defaults = megatron_args.split_settings(settings)
    vocab_size = megatron_args.true_vocab_size(state, args)
    if vocab_size is None:
        defaults["vocab_size"] = rows
    else:
        fixed["vocab_size"] = vocab_size
    described = ModelSettings(fixed, defaults, megatron_args.tokenizer_settings(args))
    return MegatronModel(
        WeightsSource(found.path, found.kind, described, tensors),
        iteration=int(state.get("iteration", state.get("total_iters")) or 0),
        notes=tuple(megatron_args.notes(args)),
    )


def _canonical(
    path: Path,
    weights: FoundWeights,
    orders: RowOrders,
    settings: Mapping[str, Any],
) -> dict[str, LazyTensor]:
    """Our names and rows, without a tied embedding's second copy."""
    tied = not settings.get("untie_embeddings_and_output_weights", False)
    tensors: dict[str, LazyTensor] = {}
    unknown = []
    for foreign, shards in weights.shards.items():
        name = canonical_name(foreign)
        if name is None:
            unknown.append(foreign)
        elif not (name == "head.weight" and tied):
            tensors[name] = _joined(name, shards, orders)
    if unknown:
        raise user_error("megatron-weights-unknown", path=path, names=", ".join(sorted(unknown)))
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    expected = settings.get("num_layers", len(layers))
    if layers != {str(layer) for layer in range(expected)}:
        raise user_error("megatron-layers-missing", path=path, found=len(layers), expected=expected)
    return tensors


def _joined(name: str, shards: list[LazyTensor], orders: RowOrders) -> LazyTensor:
    shape = joined_shape(name, shards[0].shape, len(shards))
    return LazyTensor(shape, shards[0].dtype, partial(_read, name, shards, orders))


def _read(name: str, shards: list[LazyTensor], orders: RowOrders) -> Tensor:
    return join(name, [shard.read() for shard in shards], orders)


def _pointer(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _folder_name(pointer: str) -> str:
    """The folder that a tracker names: an iteration, `release`, or the name itself."""
    return f"iter_{int(pointer):07d}" if pointer.isdigit() else Path(pointer).name


def _kind(path: Path) -> str | None:
    if not path.is_dir() or (path / "run.json").is_file():
        return None
    if is_torch_dist(path):
        return TORCH_DIST
    if any(each.is_dir() for each in path.glob("mp_rank_*")):
        return LEGACY
    return DEEPSPEED if any(path.glob("*_model_states.pt")) else None
