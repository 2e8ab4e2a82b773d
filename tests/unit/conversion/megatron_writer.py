"""Writes checkpoints as Megatron does, from the description of its formats.

Shares no code with the readers: rows are picked head by head, and names are spelled out.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.conversion.source import SourceCheckpoint

PADDED_ROWS = 64
ITERATION = 7
STEPS = 6
SAMPLES = 28
LEGACY = {
    "embedding.word": "word_embeddings.",
    "embedding.position": "position_embeddings.",
    "embedding.norm": "word_embeddings.norm.",
    "attention_norm": "input_layernorm.",
    "final_norm": "final_layernorm.",
    "head": "output_layer.",
    "attention.qkv": "self_attention.query_key_value.",
    "attention.proj": "self_attention.dense.",
    "mlp_norm": "post_attention_layernorm.",
    "mlp.fc_in": "mlp.dense_h_to_4h.",
    "mlp.fc_out": "mlp.dense_4h_to_h.",
}
CORE = {
    "embedding.word": "word_embeddings.",
    "embedding.position": "position_embeddings.",
    "embedding.norm": "word_embeddings.norm.",
    "attention_norm": "input_layernorm.",
    "final_norm": "final_layernorm.",
    "head": "output_layer.",
    "attention.qkv": "self_attention.linear_qkv.",
    "attention.proj": "self_attention.linear_proj.",
    "mlp_norm": "pre_mlp_layernorm.",
    "mlp.fc_in": "mlp.linear_fc1.",
    "mlp.fc_out": "mlp.linear_fc2.",
}
NAMES = {
    "old": {module: name.replace("self_", "") for module, name in LEGACY.items()},
    "legacy": LEGACY,
    "core": CORE,
    "fused": {
        **CORE,
        "attention_norm": "self_attention.linear_qkv.layer_norm_",
        "mlp_norm": "mlp.linear_fc1.layer_norm_",
    },
}
"""Before `weight` and `bias`, by our module, without the layer."""


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written."""

    version: int = 3
    names: str = "legacy"
    """old, legacy, core or fused."""
    files: str = "legacy"
    """legacy, deepspeed, zero3, pipeline, bigscience pipeline, neox pipeline, torch_dist, universal
    or universal pipeline."""
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    """Virtual stages of each stage."""
    stages: tuple[int, ...] = ()
    """Layers of each stage, if they differ."""
    dp: int = 1
    thirds: bool = False
    """Rows [Q | K | V], stamped as version 3."""
    per_layer: bool = False
    halves: bool = False
    half: bool = False
    """Weights in bf16, of which the optimizer has fp32 copies."""
    buffers: str = ""
    """Of a distributed optimizer: coalesced, buckets or packed."""
    undeclared: frozenset[str] = frozenset()
    """Patterns that a universal checkpoint lacks: parts, rows or replicated."""
    extra: str = ""
    """Name of a further weight."""
    arguments: Mapping[str, Any] | None = field(default_factory=dict)
    """Changes of the saved arguments; None: none are saved."""


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    source: SourceCheckpoint,
    layout: Layout,
    optimizer: Mapping[str, SourceCheckpoint] | None = None,
) -> Path:
    """Writes a --save folder and returns it.

    Args:
        folder: An empty folder.
        config: The model.
        source: Its weights.
        layout: How they are written.
        optimizer: Adam's states, and the master weights of a model in half precision, by the names
            of torch and of Megatron.
    """
    weights = _padded(config, source)
    if layout.half:
        weights = {name: value.bfloat16() for name, value in weights.items()}
    moments = {kind: _padded(config, each) for kind, each in (optimizer or {}).items()}
    if layout.files in ("legacy", "torch_dist"):
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        target = folder / f"iter_{ITERATION:07d}"
    else:
        (folder / "latest").write_text(f"global_step{ITERATION}")
        target = folder / f"global_step{ITERATION}"
    target.mkdir()
    to = _Target(target, config, layout, weights, moments, _state(config, layout))
    kind = "universal" if layout.files.startswith("universal") else layout.files.split()[-1]
    writers = {
        "legacy": _legacy,
        "torch_dist": _torch_dist,
        "deepspeed": _deepspeed,
        "pipeline": _layer_files,
        "zero3": _zero3,
        "universal": _universal,
    }
    with patch.dict(sys.modules, MODULES_OF_MEGATRON):
        writers[kind](to)
    return folder


def core_entries(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of torch_dist, of weights by canonical name."""
    return _entries(_Target(Path(), config, Layout(), weights, {}, {}), weights)


def _padded(config: ModelConfig, source: SourceCheckpoint) -> dict[str, Tensor]:
    weights = {name: tensor.read() for name, tensor in source.tensors.items()}
    for name in ("embedding.word.weight", "head.weight"):
        if name in weights:
            padding = torch.full((PADDED_ROWS - len(weights[name]), config.hidden_size), 9.0)
            weights[name] = torch.cat([weights[name], padding])
    return weights


def _state(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    gated = config.is_gated
    rope = config.position_embedding_type == "rope"
    names = "num_layers hidden_size num_attention_heads seq_length embed_layernorm"
    args: dict[str, Any] = {
        **{name: getattr(config, name) for name in names.split()},
        "ffn_hidden_size": config.mlp_hidden_size,
        "kv_channels": config.head_dim,
        "max_position_embeddings": config.num_positions,
        "layernorm_epsilon": config.norm_epsilon,
        "bias_gelu_fusion": config.activation == "gelu" and config.gelu_kind == "tanh",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": config.vocab_size - 1,
    }
    if layout.files.startswith("bigscience"):
        kinds = {"rope": "rotary", "learned_absolute": "absolute", "alibi": "alibi"}
        args["position_embedding_type"] = POSITIONS[kinds[config.position_embedding_type]]
        args["glu_activation"] = config.activation if gated else None
    else:
        args |= {
            "swiglu": config.activation == "swiglu",
            "num_key_value_heads": config.kv_heads,
            "add_bias_linear": config.add_bias_linear,
            "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
            "normalization": config.normalization.lower(),
            "use_rotary_position_embeddings": rope,
            "add_position_embedding": config.position_embedding_type == "learned_absolute",
        }
    if layout.names in ("core", "fused") or layout.files == "torch_dist":
        args |= {
            "group_query_attention": config.kv_heads != config.num_attention_heads,
            "num_query_groups": config.kv_heads,
            "position_embedding_type": config.position_embedding_type,
        }
    if layout.thirds:
        args["ds_sequence_parallel_fpdt"] = False
    args["consumed_train_samples"] = SAMPLES
    if layout.files.startswith("universal"):
        args["tensor_model_parallel_size"] = layout.tp
    scheduler = {"num_steps": SAMPLES * STEPS // ITERATION}
    state: dict[str, Any] = {"iteration": ITERATION, "opt_param_scheduler": scheduler}
    if layout.version > 0:
        state["checkpoint_version"] = float(layout.version)
    if layout.arguments is not None:
        state["args"] = argparse.Namespace(**{**args, **layout.arguments})
    return state


def _enum(name: str, module: str, *members: str) -> Any:
    return enum.Enum(name, members, module=module)  # pickled by its name


POSITIONS = _enum("PositionEmbeddingType", "megatron.enums", "rotary", "absolute", "alibi")
MODULES_OF_MEGATRON = {
    "megatron": ModuleType("megatron"),
    "megatron.enums": SimpleNamespace(PositionEmbeddingType=POSITIONS),
    "megatron.core": ModuleType("megatron.core"),
    "megatron.core.enums": SimpleNamespace(
        ModelType=_enum("ModelType", "megatron.core.enums", "encoder_or_decoder")
    ),
}
"""Of `sys.modules`, with the classes that checkpoints name; they do not exist when one is read."""


def _adam(model: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict of Megatron's optimizer: weights with decay are numbered first."""
    flat = _flat(model)
    decays = {name: value.dim() > 1 and not name.endswith("bias") for name, value in flat.items()}
    groups = [[name for name in flat if decays[name] == decayed] for decayed in (True, False)]
    names = groups[0] + groups[1]
    first = len(groups[0])
    by_kind = {kind: _flat(each) for kind, each in states.items()}
    masters = by_kind.pop("fp32_param", None)
    state = [{kind: each[name] for kind, each in by_kind.items()} for name in names]
    inner = {
        "state": dict(enumerate(state)),
        "param_groups": [
            {"step": STEPS, "wd_mult": 1.0, "params": [*range(first)]},
            {"step": STEPS, "wd_mult": 0.0, "params": [*range(first, len(names))]},
        ],
    }
    if masters is None:
        return inner
    copies = [[masters[name] for name in group] for group in groups]
    return {"optimizer": inner, "fp32_from_fp16_params": copies}


def _buffers(
    model: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]], form: str
) -> dict[Any, Any]:
    """What Megatron's distributed optimizer saves: a buffer for each chunk, last weight first.

    Since Megatron Core 0.6 buckets are coalesced without the padding between them, and weights
    start at multiples of 64; earlier each bucket was a tensor, and first there was one without any
    padding.
    """
    content: dict[Any, Any] = {"buckets_coalesced": True} if form == "coalesced" else {}
    for number, (key, chunk) in enumerate(model.items()):
        weights = _flat(chunk)
        names = list(weights)[::-1]
        half = len(names) // 2
        groups = [names] if form == "packed" else [names[:half], names[half:]]
        by_kind = {kind: _flat(each[key]) for kind, each in states.items()}
        by_kind["param"] = by_kind.pop("fp32_param", None) or weights
        buckets = [
            {kind: _bucket([each[name] for name in group], form) for kind, each in by_kind.items()}
            for group in groups
        ]
        saved: Any = dict(enumerate(buckets))
        if form != "buckets":
            saved = {kind: torch.cat([each[kind] for each in buckets]) for kind in by_kind}
        types = torch.float32 if form == "packed" else (torch.float32, torch.float32)
        content[number] = {types: saved}
    return content


def _bucket(tensors: list[Tensor], form: str) -> Tensor:
    flat = torch.zeros(0)
    for tensor in tensors:
        gap = 0 if form == "packed" else -len(flat) % 64
        flat = torch.cat([flat, torch.zeros(gap), tensor.float().flatten()])
    return torch.nn.functional.pad(flat, (0, -len(flat) % 256 if form == "buckets" else 0))


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in nested.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
    return found


def _part(tensor: Tensor, rank: int, count: int) -> Tensor:
    """One of equal parts of a flattened tensor, of which the last one is padded."""
    size = -(-tensor.numel() // count)
    padding = size * count - tensor.numel()
    return torch.nn.functional.pad(tensor.flatten(), (0, padding))[rank * size :][:size].clone()


@dataclass(frozen=True)
class _Target:
    """What is written, and where.

    Attributes:
        folder: That of the iteration.
        config: The model.
        layout: How they are written.
        weights: Full tensors by canonical name.
        moments: The optimizer's states by Megatron's kind, like the weights.
        state: What every file of the model has, too.
    """

    folder: Path
    config: ModelConfig
    layout: Layout
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def _legacy(to: _Target) -> None:
    layout = to.layout
    num_chunks = layout.pp * layout.chunks
    counts = layout.stages or (to.config.num_layers // num_chunks,) * num_chunks
    bounds = [0, *itertools.accumulate(counts)]
    stages = len(counts) // layout.chunks

    def chunks(weights: Mapping[str, Tensor], rank: int, stage: int) -> dict[str, Any]:
        shards = _rank(to, weights, rank)
        found = {}
        for index in range(stage, len(counts), stages):
            layers = range(*bounds[index : index + 2])
            is_last = index == len(counts) - 1
            key = "model" if layout.chunks == 1 else f"model{index // stages}"
            found[key] = _stage(to, shards, layers, first=index == 0, last=is_last)
        return found

    for rank, stage in itertools.product(range(layout.tp), range(stages)):
        folder = to.folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
        folder.mkdir()
        model = chunks(to.weights, rank, stage)
        states = {kind: chunks(each, rank, stage) for kind, each in to.moments.items()}
        saved = {"optimizer": _adam(model, states)} if states else {}
        if layout.buffers:
            saved["optimizer"] = {"optimizer": {"param_groups": [{"lr": 0.1, "step": STEPS}]}}
            torch.save(_buffers(model, states, layout.buffers), folder / "distrib_optim.pt")
        torch.save({**to.state, **model, **saved}, folder / "model_optim_rng.pt")


def _torch_dist(to: _Target) -> None:
    """Whole tensors, those of all layers as one, with the fused names of the norms."""
    entries = _entries(to, to.weights)
    for kind, each in to.moments.items():
        named = _entries(to, each)
        entries |= {f"optimizer.state.{kind}.{name}": value for name, value in named.items()}
    dcp.save(entries, checkpoint_id=str(to.folder), no_dist=True)
    groups = {"param_groups": [{"step": STEPS}, {"step": STEPS}]}
    torch.save({**to.state, "optimizer": groups if to.moments else {}}, to.folder / "common.pt")
    content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (to.folder / "metadata.json").write_text(json.dumps(content))


def _universal(to: _Target) -> None:
    """Full tensors, joined from the shards by the rules of DeepSpeed's converter."""
    kinds = {"fp32": to.weights, **to.moments}
    kinds.pop("fp32_param", None)
    for name, saved_name in _engine_names(to, 0).items():
        folder = to.folder / "zero" / saved_name
        folder.mkdir(parents=True)
        for kind, each in kinds.items():
            shards = [_rank(to, each, rank)[name].float() for rank in range(to.layout.tp)]
            torch.save(_merged(to, name, shards), folder / f"{kind}.pt")
        torch.save(torch.tensor(float(STEPS)), folder / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1}]}, to.folder / "zero" / "optimizer_state.pt")
    info = {"universal_checkpoint_version": 0.4, "original_vocab_size": to.config.vocab_size}
    content = {**to.state, "module": None, "universal_checkpoint_info": info, "param_shapes": [{}]}
    torch.save(content, to.folder / "mp_rank_00_model_states.pt")


def _merged(to: _Target, name: str, shards: list[Tensor]) -> dict[str, Any]:
    undeclared = to.layout.undeclared
    is_position = name.startswith("embedding.position") and "replicated" not in undeclared
    if is_position or "norm" in name or name.endswith(("proj.bias", "fc_out.bias")):
        return {"param": shards[0]}
    if name in ("embedding.word.weight", "head.weight"):
        rows = torch.cat(shards)[: to.config.vocab_size]
        return {"cat_dim": 0, "param": rows, "vocab_tensor": True}
    if name.endswith(("proj.weight", "fc_out.weight")) and "rows" not in undeclared:
        return {"cat_dim": 1, "param": torch.cat(shards, dim=1)}
    if ".fc_in." in name and to.config.is_gated and "parts" not in undeclared:
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        parts = torch.cat([each for half in halves for each in half])
        return {"cat_dim": 0, "param": parts, "param_n_sub_params": 2}
    return {"cat_dim": 0, "param": torch.cat(shards)}


def _deepspeed(to: _Target) -> None:
    for rank in range(to.layout.tp):
        content = {**to.state, "module": _all_stages(to, to.weights, rank), "ds_version": "0.19.8"}
        torch.save(content, to.folder / f"mp_rank_{rank:02d}_model_states.pt")
    _partitions(to)


def _zero3(to: _Target) -> None:
    """Flat tensors of two groups, and like them Adam's states."""
    dp = to.layout.dp
    for rank, data_rank in itertools.product(range(to.layout.tp), range(dp)):
        full = {"fp32_param": to.weights, **to.moments}
        kinds = {kind: _flat(_all_stages(to, each, rank)) for kind, each in full.items()}
        names = list(kinds["fp32_param"])
        groups = names[::2], names[1::2]
        flats = [
            {
                kind: torch.cat([_part(each[name], data_rank, dp) for name in group])
                for kind, each in kinds.items()
            }
            for group in groups
        ]
        masters = [flat.pop("fp32_param") for flat in flats]
        optimizer: dict[str, Any] = {"zero_stage": 3, "fp32_flat_groups": masters}
        if to.moments:
            inner = {group: {"step": STEPS, **flat} for group, flat in enumerate(flats)}
            optimizer["optimizer_state_dict"] = {"state": inner, "param_groups": [{"lr": 0.1}]}
        shapes = [{name: kinds["fp32_param"][name].shape for name in group} for group in groups]
        content = {**to.state, "module": {}, "param_shapes": shapes}
        stem = to.folder / f"zero_pp_rank_{data_rank}_mp_rank_{rank:02d}"
        torch.save(content, f"{stem}_model_states.pt")
        torch.save({"optimizer_state_dict": optimizer}, f"{stem}_optim_states.pt")


def _all_stages(to: _Target, weights: Mapping[str, Tensor], rank: int) -> dict[str, Any]:
    """The model of one rank without stages."""
    layers = range(to.config.num_layers)
    return _stage(to, _rank(to, weights, rank), layers, first=True, last=True)


def _layer_files(to: _Target) -> None:
    """One file per layer."""
    layout = to.layout
    state = _neox_state(to) if layout.files.startswith("neox") else to.state
    for rank in range(layout.tp):
        files = _layers(to, _rank(to, to.weights, rank))
        for number, content in files.items():
            torch.save(content, to.folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    for rank in range(layout.pp * layout.tp):
        path = to.folder / f"mp_rank_{rank:02d}_model_states.pt"
        torch.save({**state, "module": None}, path)
    _partitions(to)


def _partitions(to: _Target) -> None:
    """Flat partitions of two groups, with what each has of each weight."""
    dp = to.layout.dp
    tp = to.layout.tp
    for model_rank in range(tp * to.layout.pp if to.moments else 0):
        stage, rank = divmod(model_rank, tp)
        spelled = _engine_names(to, rank)
        states: dict[str, dict[str, Tensor]] = {}
        for kind, each in to.moments.items():
            shards = _rank(to, each, rank).items()
            states[kind] = {spelled[n]: value for n, value in shards if stage in _stages_of(to, n)}
        decays = {name: value.dim() > 1 for name, value in states["exp_avg"].items()}
        groups = [[n for n in decays if decays[n] == decayed] for decayed in (True, False)]
        for number in range(dp):
            parts, mappings = zip(*(_partition(states, n, number, dp) for n in groups), strict=True)
            content = {
                "single_partition_of_fp32_groups": [part.pop("fp32_param") for part in parts],
                "base_optimizer_state": {
                    "state": dict(enumerate(parts)),
                    "param_groups": [{"lr": 0.1} for _ in parts],
                },
                "param_slice_mappings": list(mappings),
            }
            path = to.folder / f"zero_pp_rank_{number}_mp_rank_{model_rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": content}, path)


def _partition(
    states: Mapping[str, Mapping[str, Tensor]], names: list[str], number: int, count: int
) -> tuple[dict[str, Tensor], dict[str, fragment_address]]:
    """One of the partitions of a group, and what it has of each weight."""
    part = {"step": torch.tensor(float(STEPS))}
    for kind, each in states.items():
        part[kind] = _part(torch.cat([each[name].flatten() for name in names]), number, count)
    sizes = [states["exp_avg"][name].numel() for name in names]
    length = len(part["exp_avg"])
    begin = number * length
    mapping = {}
    for name, size, end in zip(names, sizes, itertools.accumulate(sizes), strict=True):
        first = max(end - size, begin)
        last = min(end, begin + length)
        if first < last:
            mapping[name] = fragment_address(last - first, first - begin)
    return part, mapping


def _stages_of(to: _Target, name: str) -> set[int]:
    """The stages of DeepSpeed's pipeline that have a weight: a tied embedding is in two."""
    config = to.config
    layout = to.layout
    if name.startswith("layers."):
        return {int(name.split(".")[1]) * layout.pp // config.num_layers}
    if not name.startswith("embedding."):
        return {layout.pp - 1}
    return {0} if config.untie_embeddings_and_output_weights else {0, layout.pp - 1}


def _engine_names(to: _Target, rank: int) -> dict[str, str]:
    """DeepSpeed's names of the weights, by canonical name."""
    shards = _rank(to, to.weights, rank)
    by_id = {id(shard): name for name, shard in shards.items()}
    if not to.layout.files.endswith("pipeline"):
        flat = _flat(_stage(to, shards, range(to.config.num_layers), True, True))
        return {by_id[id(value)]: name for name, value in flat.items()}
    untied = to.config.untie_embeddings_and_output_weights
    names = {}
    for number, content in _layers(to, shards).items():
        for inner, value in content.items():
            is_tied = not untied and inner.partition(".")[0].endswith("embeddings")
            prefix = "tied_modules.embed" if is_tied else number
            names.setdefault(by_id[id(value)], f"{prefix}.{inner}")
    return names


def _rank(to: _Target, weights: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The shards of one tensor-parallel rank, by canonical name and in Megatron's order."""
    return {name: _shard(to, name, full, rank) for name, full in weights.items()}


def _shard(to: _Target, name: str, full: Tensor, rank: int) -> Tensor:
    config = to.config
    layout = to.layout
    if "attention.qkv" in name:
        return _qkv(to, full, rank)
    if "mlp.fc_in" in name:
        size = config.mlp_hidden_size // layout.tp
        rows = list(range(rank * size, (rank + 1) * size))
        up = [config.mlp_hidden_size + row for row in rows] if config.is_gated else []
        return full[up + rows if layout.files.startswith("bigscience") else rows + up]
    if name.endswith(("proj.weight", "fc_out.weight")):
        size = full.shape[1] // layout.tp
        return full[:, rank * size : (rank + 1) * size].clone()
    if name in ("embedding.word.weight", "head.weight"):
        size = len(full) // layout.tp
        return full[rank * size : (rank + 1) * size].clone()
    return full


def _qkv(to: _Target, full: Tensor, rank: int) -> Tensor:
    """Rows of the heads of one rank, listed one by one."""
    config = to.config
    layout = to.layout
    size = config.head_dim
    heads = config.num_attention_heads
    groups = config.kv_heads
    per_group = heads // groups
    own = range(rank * groups // layout.tp, (rank + 1) * groups // layout.tp)

    def rows(part: str, head: int) -> list[int]:
        start = {"q": 0, "k": heads, "v": heads + groups}[part] + head
        return list(range(start * size, (start + 1) * size))

    queries = {group: [group * per_group + index for index in range(per_group)] for group in own}
    order: list[int] = []
    if layout.version == 0 or layout.thirds:
        order += [row for group in own for head in queries[group] for row in rows("q", head)]
        for part in ("k", "v"):
            order += [row for group in own for row in rows(part, group)]
    elif layout.version == 1:
        for head in own:
            parts = [rows(part, head) for part in ("q", "k", "v")]
            order += [row for triple in zip(*parts, strict=True) for row in triple]
    else:
        for group in own:
            order += [row for head in queries[group] for row in rows("q", head)]
            order += rows("k", group) + rows("v", group)
    return full[order]


def _spelled(to: _Target, name: str) -> tuple[int | None, str]:
    """Number of the layer if it is in one, and Megatron's name inside it."""
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    module, kind = name.removeprefix(f"layers.{layer}.").rsplit(".", 1)
    names = NAMES["old" if to.layout.files.startswith("neox") else to.layout.names]
    return layer, f"{names[module]}{kind}"


def _stage(
    to: _Target, shards: Mapping[str, Tensor], layers: range, first: bool, last: bool
) -> dict[str, Any]:
    encoder: dict[str, Any] = {}
    embedding: dict[str, Tensor] = {}
    for name, shard in shards.items():
        layer, inner = _spelled(to, name)
        if layer is not None and layer in layers:
            encoder[f"layers.{layer - layers.start}.{inner}"] = shard
        elif name.startswith("final_norm.") and last:
            encoder[inner] = shard
        elif name.startswith("embedding.") and first:
            embedding[inner] = shard
    head = shards.get("head.weight")
    table = shards["embedding.word.weight"]
    if to.layout.extra:
        encoder[to.layout.extra] = torch.ones(1)
    if to.layout.names in ("core", "fused"):
        model = {f"decoder.{name}": value for name, value in encoder.items()}
        model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
        model |= {f"embedding.{name}": value for name, value in embedding.items()}
        if last:  # of a tied embedding a copy, if there are several stages
            model["output_layer.weight"] = table if head is None else head
        return model
    model = {}
    if first:
        model["embedding"] = {
            name.removesuffix(".weight"): {"weight": value} for name, value in embedding.items()
        }
    model["transformer" if to.layout.names == "old" else "encoder"] = encoder
    if last and head is not None:
        model["output_layer"] = {"weight": head}
    result: dict[str, Any] = {"language_model": model}
    if last and not first:
        result["word_embeddings_for_head"] = {"weight": table + 0}
    return result


SUMMED = ("attention.proj.bias", "mlp.fc_out.bias")
"""Biases that gpt-neox adds on each tensor-parallel rank before the sum over ranks."""


def _layers(to: _Target, shards: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """The contents of the files by number: bigscience's fork counts two functions more."""
    is_bigscience = to.layout.files.startswith("bigscience")
    is_neox = to.layout.files.startswith("neox")
    first = 3 if is_bigscience else 2
    last = first + to.config.num_layers + (1 if is_bigscience or is_neox else 0)
    files: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, shard in shards.items():
        layer, inner = _spelled(to, name)
        kind = name.rpartition(".")[2]
        if layer is not None:
            is_summed = is_neox and to.config.parallel_residual and name.endswith(SUMMED)
            files[first + layer][inner] = shard / to.layout.tp if is_summed else shard
        elif name.startswith("final_norm."):
            files[last][f"norm.{kind}" if is_neox else kind] = shard
        elif name == "head.weight":
            files[last + 1]["final_linear.weight" if is_neox else "lm_head.weight"] = shard
        else:
            files[0 if is_neox else 1][inner] = shard
    if is_bigscience:
        files[last + 1] = files[1]
    return files


def _entries(to: _Target, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    fused = dataclasses.replace(to, layout=Layout(names="fused"))
    prefixes = {"final_norm": "decoder.", "embedding": "embedding."}
    entries: dict[str, Tensor] = {}
    layers: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in _rank(fused, weights, 0).items():
        layer, inner = _spelled(fused, name)
        if layer is None:
            entries[f"{prefixes.get(name.split('.')[0], '')}{inner}"] = tensor
        elif to.layout.per_layer:
            entries[f"decoder.layers.{layer}.{inner}"] = tensor
        else:
            layers[f"decoder.layers.{inner}"].append(tensor)
    entries |= {name: torch.stack(each) for name, each in layers.items()}
    if to.layout.halves:
        for name in [name for name in entries if name.endswith("linear_fc1.weight")]:
            gate, up = entries.pop(name).chunk(2)
            entries |= {f"{name}_w": gate.clone(), f"{name}_v": up.clone()}
    return entries


def _neox_state(to: _Target) -> dict[str, Any]:
    """Few arguments, and the settings of the run in a file, spelled in both ways."""
    config = to.config
    settings = {
        "num-layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num-attention-heads": config.num_attention_heads,
        "num_kv_heads": config.num_query_groups,
        "intermediate_size": config.mlp_hidden_size,
        "seq-length": config.seq_length,
        "max-position-embeddings": config.num_positions,
        "pos-emb": "rotary" if config.position_embedding_type == "rope" else "learned",
        "rotary-pct": config.rotary_percent,
        "norm": config.normalization.lower(),
        "bias-gelu-fusion": config.gelu_kind == "tanh",
        "no-weight-tying": config.untie_embeddings_and_output_weights,
        "gpt-j-residual": config.parallel_residual == "separate",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    (to.folder / "configs").mkdir()
    (to.folder / "configs" / "model.yml").write_text(json.dumps(settings))
    args = {"num_layers": config.num_layers, "hidden_size": config.hidden_size}
    args |= {"num_attention_heads": config.num_attention_heads, "model_parallel_size": 1}
    return {"iteration": ITERATION, "args": args}
