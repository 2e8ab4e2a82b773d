"""Universal checkpoints of the Megatron-DeepSpeed forks, as DeepSpeed's converter writes them.

Owns how the tensor-parallel shards of a weight were joined: along the dimension that its
file declares. Rows of fused weights whose parts are not declared are in the order of
the ranks, so that they are joined again here. Keeps Megatron's names and rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ds.checkpoint.universal.folders import FP32, OPTIMIZER_STATE, ZERO
from megatron_ds.checkpoint.universal.reader import PARAM, UniversalStates
from megatron_ds.config.problems import user_error
from megatron_ds.conversion.megatron import arguments as megatron_args
from megatron_ds.conversion.megatron.names import (
    PREFIX,
    QkvOrder,
    canonical_name,
    declared,
    is_copy,
)
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.megatron.rank_files import (
    MegatronContents,
    Shards,
    layer_prefixes,
    pipeline_name,
)
from megatron_ds.conversion.safe_unpickle import read_foreign
from megatron_ds.engine.states.state_reader import MASTER, TensorReader
from megatron_ds.parallel.weights import Role

NUMBERED = re.compile(r"(\d+)\.(.+)")
"""A name in DeepSpeed's pipeline engine: number of the layer, and the name in it."""
PARTS = ("param_n_sub_params", "sub_param_shape")
"""Entries that declare the parts of a fused weight; it is then stored as its complete parts."""
KINDS = {FP32: MASTER, **{key: key for key in MOMENTS}}


def read_universal(folder: Path) -> MegatronContents:
    """Opens a universal checkpoint.

    Raises:
        UserError: If files are missing or damaged, or the order of rows is not known.
    """
    states = UniversalStates(folder, read=read_foreign)
    state = {key: value for key, value in states.run.items() if key not in ("module", "optimizer")}
    if (folder / ZERO / OPTIMIZER_STATE).is_file():
        state["optimizer"] = states.common
    layout = _Layout(folder, state)
    names = [*states.shapes]
    inner: dict[int, set[str]] = defaultdict(set)
    for found_name in filter(None, map(NUMBERED.fullmatch, names)):
        inner[int(found_name[1])].add(found_name[2])
    prefixes = layer_prefixes(inner)
    kinds: dict[str, Shards] = {}
    for stem, key in KINDS.items():
        shards: Shards = {}
        for saved_name in names:
            name = pipeline_name(prefixes, saved_name) if prefixes else saved_name
            name = PREFIX.sub("", name)
            if not is_copy(name) and (folder / ZERO / saved_name / f"{stem}.pt").is_file():
                shards[name] = layout.shards(name, saved_name, states.entry(saved_name, stem))
        kinds[key] = shards
    weights = kinds[MASTER]
    steps = states.steps(names[0])
    unread = ""
    if any(kinds[key].keys() != weights.keys() for key in MOMENTS):
        unread = "its optimizer states are not those of Adam"
    elif steps is None:
        unread = "it does not contain the number of steps"
    return MegatronContents(state, weights, {} if unread else kinds, steps, unread)


class _Layout:
    """Sharding of the weights before they were joined."""

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        args = megatron_args.arguments_of(state.get("args"))
        settings = megatron_args.model_settings(args, folder)
        self.folder = folder
        self.tp_size: int | None = args.get("tensor_model_parallel_size")
        self.qkv = megatron_args.qkv_order(args, state.get("checkpoint_version"))
        self.is_gated = settings.get("activation") in megatron_args.GATED
        self.positions: int | None = settings.get("max_position_embeddings")
        info = state.get("universal_checkpoint_info") or {}
        self.mapped = tuple((info.get("affine_map") or {}).get("params", ()))
        """Patterns of the weights that an affine map has joined."""

    def shards(self, name: str, saved_name: str, entry: Mapping[str, Any]) -> list[TensorReader]:
        """A weight, or its rows of each tensor-parallel rank where their order depends on it."""
        tensor: Tensor = entry[PARAM]
        ranks = self._joined_ranks(name, saved_name, tensor, entry)
        rows = tensor.shape[0] // ranks
        return [TensorReader.of(tensor[rank * rows :][:rows]) for rank in range(ranks)]

    def _joined_ranks(
        self, name: str, saved_name: str, tensor: Tensor, content: Mapping[str, Any]
    ) -> int:
        """Number of TP shards concatenated along dim 0; 1 if the tensor is not sharded.

        Raises:
            UserError: If the order is not known.
        """
        canonical = canonical_name(name) or ""
        tp_size = self.tp_size
        has_parts = any(content.get(key) for key in PARTS) or any(
            re.match(pattern, saved_name) for pattern in self.mapped
        )
        if ".attention.qkv." in canonical:
            if self.qkv is not QkvOrder.BLOCKS:
                if has_parts and tp_size != 1:
                    raise self._ambiguous(saved_name)
                return 1
            return 1 if has_parts else self._known_size(saved_name)
        if ".mlp.fc_in." in canonical and self.is_gated:
            return 1 if has_parts else self._known_size(saved_name)
        weight = declared(canonical)
        if weight is not None and weight.shard is not None and weight.shard.dim == 1:
            # Without a pattern for these, DeepSpeed joins dimension 0.
            return tp_size if tp_size and content.get("cat_dim") == 0 else 1
        is_table = weight is not None and weight.role is Role.POSITIONS
        if is_table and self.positions and tp_size:
            # bigscience's converter joins the copies of all ranks.
            return tp_size if tensor.shape[0] == tp_size * self.positions else 1
        return 1

    def _known_size(self, name: str) -> int:
        if self.tp_size is None:
            raise self._ambiguous(name)
        return self.tp_size

    def _ambiguous(self, name: str) -> Exception:
        return user_error("universal-rows-ambiguous", folder=self.folder, name=name)
