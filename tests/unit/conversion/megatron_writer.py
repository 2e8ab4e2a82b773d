"""Writes checkpoints as Megatron does, from the description of its formats.

Shares no code with the readers: rows are picked head by head, and names are spelled out.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib.abc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.conversion.source import SourceCheckpoint

PADDED_ROWS = 64
ITERATION, STEPS, SAMPLES = 7, 6, 28
OLD = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.proj": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.fc_in": "mlp.dense_h_to_4h",
    "mlp.fc_out": "mlp.dense_4h_to_h",
}
LEGACY = {**OLD, "attention.qkv": "self_attention.query_key_value"}
LEGACY["attention.proj"] = "self_attention.dense"
CORE = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.proj": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.fc_in": "mlp.linear_fc1",
    "mlp.fc_out": "mlp.linear_fc2",
}
FUSED = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
}


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
    kind = layout.files.split()[-1]
    with patch.dict(sys.modules, modules_of_megatron()):
        if layout.files.startswith("universal"):
            _universal(to)
        else:
            writers = {"legacy": _legacy, "torch_dist": _torch_dist, "pipeline": _layer_files}
            writers.get(kind, _deepspeed)(to)
            if kind in ("deepspeed", "pipeline") and moments:
                for model_rank in range(layout.tp * layout.pp):
                    _partitions(to, model_rank)
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
    gated, rope = config.is_gated, config.position_embedding_type == "rope"
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


POSITIONS = enum.Enum(
    "PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3}, module="megatron.enums"
)
"""Pickled by its name, in a module that does not exist when it is read."""


def modules_of_megatron() -> dict[str, ModuleType]:
    modules = {name: ModuleType(name) for name in ("megatron", "megatron.enums")}
    modules["megatron.enums"].PositionEmbeddingType = POSITIONS
    return modules


class _AnyModule(ModuleType):
    """A module that has every class that a pickle names."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {"__init__": lambda self, *given: None, "__setstate__": lambda self, given: None}
        return type(name, (), {"__module__": self.__name__, **methods})


class _AnyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_megatron = name.partition(".")[0] == "megatron"
        return ModuleSpec(name, self, is_package=True) if is_megatron else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The module has its classes."""


@contextmanager
def classes_of_megatron() -> Iterator[None]:
    """Lets DeepSpeed unpickle checkpoints of Megatron inside."""
    with patch.dict(sys.modules), patch.object(sys, "meta_path", [*sys.meta_path, _AnyFinder()]):
        yield


def _adam(model: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict of Megatron's optimizer: weights with decay are numbered first."""
    flat = _flat(model)
    decays = {name: value.dim() > 1 and not name.endswith("bias") for name, value in flat.items()}
    groups = [[name for name in flat if decays[name] == decayed] for decayed in (True, False)]
    numbers = {name: number for number, name in enumerate(groups[0] + groups[1])}
    by_kind = {kind: _flat(each) for kind, each in states.items()}
    masters = by_kind.pop("fp32_param", None)
    inner = {
        "state": {
            number: {kind: each[name] for kind, each in by_kind.items()}
            for name, number in numbers.items()
        },
        "param_groups": [
            {"step": STEPS, "wd_mult": mult, "params": [numbers[name] for name in group]}
            for mult, group in zip((1.0, 0.0), groups, strict=True)
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
        buckets = []
        for group in groups:
            bucket: dict[str, list[Tensor]] = {kind: [] for kind in by_kind}
            for kind, tensors in by_kind.items():
                size = 0
                for name in group:
                    gap = 0 if form == "packed" else -size % 64
                    bucket[kind] += [torch.zeros(gap), tensors[name].float().flatten()]
                    size += gap + tensors[name].numel()
                if form == "buckets":
                    bucket[kind].append(torch.zeros(-size % 256))
            buckets.append({kind: torch.cat(parts) for kind, parts in bucket.items()})
        saved: Any = dict(enumerate(buckets))
        if form != "buckets":
            saved = {kind: torch.cat([each[kind] for each in buckets]) for kind in by_kind}
        types = torch.float32 if form == "packed" else (torch.float32, torch.float32)
        content[number] = {types: saved}
    return content


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in nested.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
    return found


def _zero3_parts(
    model: Mapping[str, Any], dp: int
) -> tuple[list[dict[str, torch.Size]], list[list[Tensor]]]:
    """Shapes by group, and the flat tensors of each data-parallel rank."""
    flat = {f"encoder.{name}": value for name, value in model["encoder"].items()}
    for module, values in {**model["embedding"], "output_layer": model["output_layer"]}.items():
        prefix = "" if module == "output_layer" else "embedding."
        flat |= {f"{prefix}{module}.{kind}": value for kind, value in values.items()}
    flat = {f"language_model.{name}": value for name, value in flat.items()}
    names = list(flat)
    groups = [names[::2], names[1::2]]
    shapes = [{name: flat[name].shape for name in group} for group in groups]

    def part(name: str, rank: int) -> Tensor:
        size = -(-flat[name].numel() // dp)
        padding = size * dp - flat[name].numel()
        return torch.nn.functional.pad(flat[name].flatten(), (0, padding))[rank * size :][:size]

    return shapes, [
        [torch.cat([part(name, rank) for name in group]) for group in groups] for rank in range(dp)
    ]


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
    config, layout = to.config, to.layout
    counts = list(layout.stages) or [config.num_layers // layout.pp // layout.chunks] * (
        layout.pp * layout.chunks
    )
    stages = len(counts) // layout.chunks
    for rank in range(layout.tp):
        shards, start = _rank(to, to.weights, rank), 0
        moments = {kind: _rank(to, each, rank) for kind, each in to.moments.items()}
        models: dict[int, dict[str, Any]] = {stage: {} for stage in range(stages)}
        states: dict[int, dict[str, dict[str, Any]]] = {stage: {} for stage in range(stages)}
        for index, count in enumerate(counts):
            chunk, stage = divmod(index, stages)
            layers = range(start, start + count)
            start += count
            first, last = index == 0, index == len(counts) - 1
            key = "model" if layout.chunks == 1 else f"model{chunk}"
            place = layers, first, last
            models[stage][key] = _stage(to, shards, *place)
            for kind, each in moments.items():
                states[stage].setdefault(kind, {})[key] = _stage(to, each, *place)
        for stage, model in models.items():
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            (to.folder / name).mkdir()
            saved = {"optimizer": _adam(model, states[stage])} if to.moments else {}
            if layout.buffers:
                groups = [{"lr": 0.1, "step": STEPS}]
                saved["optimizer"] = {"optimizer": {"param_groups": groups}}
                content = _buffers(model, states[stage], layout.buffers)
                torch.save(content, to.folder / name / "distrib_optim.pt")
            torch.save({**to.state, **model, **saved}, to.folder / name / "model_optim_rng.pt")


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
    config, layout = to.config, to.layout
    names = _engine_names(to, 0)
    kinds = {
        "fp32": to.weights,
        **{kind: each for kind, each in to.moments.items() if kind != "fp32_param"},
    }
    (to.folder / "zero").mkdir()
    for name, saved_name in names.items():
        (to.folder / "zero" / saved_name).mkdir()
        for kind, each in kinds.items():
            shards = [_rank(to, each, rank)[name].float() for rank in range(layout.tp)]
            content: dict[str, Any] = {"cat_dim": 0}
            if (
                "norm" in name
                or name.endswith(("proj.bias", "fc_out.bias"))
                or (name.startswith("embedding.position") and "replicated" not in layout.undeclared)
            ):
                content = {"param": shards[0]}
            elif name in ("embedding.word.weight", "head.weight"):
                content |= {"param": torch.cat(shards)[: config.vocab_size], "vocab_tensor": True}
            elif name.endswith(("proj.weight", "fc_out.weight")) and "rows" not in (
                layout.undeclared
            ):
                content = {"param": torch.cat(shards, dim=1), "cat_dim": 1}
            elif ".fc_in." in name and config.is_gated and "parts" not in layout.undeclared:
                halves = [shard.chunk(2) for shard in shards]
                parts = [half[index] for index in (0, 1) for half in halves]
                content |= {"param": torch.cat(parts), "param_n_sub_params": 2}
            else:
                content["param"] = torch.cat(shards)
            torch.save(content, to.folder / "zero" / saved_name / f"{kind}.pt")
        torch.save(torch.tensor(float(STEPS)), to.folder / "zero" / saved_name / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1}]}, to.folder / "zero" / "optimizer_state.pt")
    info = {"universal_checkpoint_version": 0.4, "original_vocab_size": config.vocab_size}
    content = {**to.state, "module": None, "universal_checkpoint_info": info, "param_shapes": [{}]}
    torch.save(content, to.folder / "mp_rank_00_model_states.pt")


def _deepspeed(to: _Target) -> None:
    for rank in range(to.layout.tp):
        model = _all_stages(to, to.weights, rank)
        if to.layout.files == "zero3":
            _zero3(to, model["language_model"], rank)
            continue
        content = {**to.state, "module": model, "ds_version": "0.19.8"}
        torch.save(content, to.folder / f"mp_rank_{rank:02d}_model_states.pt")


def _zero3(to: _Target, model: Mapping[str, Any], rank: int) -> None:
    """Flat tensors of each group, and like them Adam's states."""
    dp = to.layout.dp
    shapes, weights = _zero3_parts(model, dp)
    states = {
        kind: _zero3_parts(_all_stages(to, each, rank)["language_model"], dp)[1]
        for kind, each in to.moments.items()
    }
    masters = states.pop("fp32_param", weights)
    for data_rank in range(dp):
        stem = f"zero_pp_rank_{data_rank}_mp_rank_{rank:02d}"
        content = {**to.state, "module": {}, "param_shapes": shapes}
        torch.save(content, to.folder / f"{stem}_model_states.pt")
        optimizer = {"zero_stage": 3, "fp32_flat_groups": masters[data_rank]}
        if states:
            inner = {
                group: {"step": STEPS, **{kind: states[kind][data_rank][group] for kind in states}}
                for group in range(len(shapes))
            }
            optimizer["optimizer_state_dict"] = {"state": inner, "param_groups": [{"lr": 0.1}]}
        torch.save({"optimizer_state_dict": optimizer}, to.folder / f"{stem}_optim_states.pt")


def _all_stages(to: _Target, weights: Mapping[str, Tensor], rank: int) -> dict[str, Any]:
    """The model of one rank without stages."""
    layers = range(to.config.num_layers)
    return _stage(to, _rank(to, weights, rank), layers, True, True)


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


def _partitions(to: _Target, model_rank: int) -> None:
    """Flat partitions of two groups, with what each has of each weight."""
    dp = to.layout.dp
    stage, rank = divmod(model_rank, to.layout.tp)
    spelled = _engine_names(to, rank)
    states = {
        kind: {
            spelled[name]: shard
            for name, shard in _rank(to, each, rank).items()
            if stage in _stages_of(to, name)
        }
        for kind, each in to.moments.items()
    }
    names = list(states["exp_avg"])
    decays = {name: states["exp_avg"][name].dim() > 1 for name in names}
    contents: list[dict[str, Any]] = [
        {
            "base_optimizer_state": {"state": {}, "param_groups": []},
            "single_partition_of_fp32_groups": [],
            "param_slice_mappings": [],
        }
        for _ in range(dp)
    ]
    for group, decayed in enumerate((True, False)):
        own = [name for name in names if decays[name] == decayed]
        sizes = [states["exp_avg"][name].numel() for name in own]
        length = -(-sum(sizes) // dp)
        flats = {
            kind: torch.nn.functional.pad(
                torch.cat([each[name].flatten() for name in own]), (0, length * dp - sum(sizes))
            )
            for kind, each in states.items()
        }
        for number, content in enumerate(contents):
            part = {kind: flat[number * length :][:length].clone() for kind, flat in flats.items()}
            content["single_partition_of_fp32_groups"].append(part.pop("fp32_param"))
            base = content["base_optimizer_state"]
            base["state"][group] = {"step": torch.tensor(float(STEPS)), **part}
            base["param_groups"].append({"lr": 0.1})
            mapping, start = {}, 0
            for name, size in zip(own, sizes, strict=True):
                first = max(start, number * length)
                end = min(start + size, (number + 1) * length)
                if first < end:
                    mapping[name] = fragment_address(end - first, first - number * length)
                start += size
            content["param_slice_mappings"].append(mapping)
    for number, content in enumerate(contents):
        path = to.folder / f"zero_pp_rank_{number}_mp_rank_{model_rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": content}, path)


def _stages_of(to: _Target, name: str) -> set[int]:
    """The stages of DeepSpeed's pipeline that have a weight: a tied embedding is in two."""
    config, layout = to.config, to.layout
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
    config, layout = to.config, to.layout
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
    config, layout = to.config, to.layout
    size, heads, groups = (config.head_dim, config.num_attention_heads, config.kv_heads)
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


def _layer_name(to: _Target, name: str, table: Mapping[str, str]) -> tuple[int, str]:
    """Number of the layer, and Megatron's name inside it."""
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    if to.layout.names == "fused" and module in FUSED:
        return int(layer), FUSED[module] + kind
    return int(layer), f"{table[module]}.{kind}"


def _stage(
    to: _Target, shards: Mapping[str, Tensor], layers: range, first: bool, last: bool
) -> dict[str, Any]:
    table = {"old": OLD, "legacy": LEGACY}.get(to.layout.names, CORE)
    encoder: dict[str, Any] = {}
    for name, shard in shards.items():
        if name.startswith("layers."):
            layer, inner = _layer_name(to, name, table)
            if layer in layers:
                encoder[f"layers.{layer - layers.start}.{inner}"] = shard
        elif name.startswith("final_norm.") and last:
            encoder[f"final_layernorm.{name.split('.')[1]}"] = shard
    embedding = {
        "word_embeddings.weight": shards["embedding.word.weight"],
        "position_embeddings.weight": shards.get("embedding.position.weight"),
    }
    embedding = {name: value for name, value in embedding.items() if value is not None}
    head = shards.get("head.weight")
    if to.layout.extra:
        encoder[to.layout.extra] = torch.ones(1)
    if to.layout.names in ("core", "fused"):
        model = {f"decoder.{name}": value for name, value in encoder.items()}
        model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
        if first:
            model |= {f"embedding.{name}": value for name, value in embedding.items()}
        if last:  # of a tied embedding a copy, if there are several stages
            model["output_layer.weight"] = shards["embedding.word.weight"] if head is None else head
        return model
    model = {}
    if first:
        model["embedding"] = {
            name.split(".")[0]: {name.split(".")[1]: value} for name, value in embedding.items()
        }
    model["transformer" if to.layout.names == "old" else "encoder"] = encoder
    if last and head is not None:
        model["output_layer"] = {"weight": head}
    result: dict[str, Any] = {"language_model": model}
    if last and not first:
        result["word_embeddings_for_head"] = {"weight": shards["embedding.word.weight"] + 0}
    return result


def _layers(to: _Target, shards: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """The contents of the files by number: bigscience's fork counts two functions more."""
    config, layout = to.config, to.layout
    is_bigscience = layout.files.startswith("bigscience")
    is_neox = layout.files.startswith("neox")
    first = 3 if is_bigscience else 2
    last = first + config.num_layers + (1 if is_bigscience or is_neox else 0)
    files: dict[int, dict[str, Tensor]] = {}
    for name, shard in shards.items():
        if name.startswith("layers."):
            layer, inner = _layer_name(to, name, OLD if is_neox else LEGACY)
            files.setdefault(first + layer, {})[inner] = shard
        elif name.startswith("final_norm."):
            prefix = "norm." if is_neox else ""
            files.setdefault(last, {})[prefix + name.split(".")[1]] = shard
        elif name == "head.weight":
            head = "final_linear" if is_neox else "lm_head"
            files[last + 1] = {f"{head}.weight": shard}
        else:
            spelled = {
                "embedding.word.weight": "word_embeddings.weight",
                "embedding.position.weight": "position_embeddings.weight",
            }
            inner = spelled.get(name, name.replace("embedding.norm", "word_embeddings.norm"))
            files.setdefault(0 if is_neox else 1, {})[inner] = shard
    if is_bigscience:
        files[last + 1] = files[1]
    return files


def _entries(to: _Target, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    fused = dataclasses.replace(to, layout=Layout(names="fused"))
    entries: dict[str, Tensor] = {}
    layers: dict[str, list[Tensor]] = {}
    for name, tensor in _rank(fused, weights, 0).items():
        if name.startswith("layers."):
            layer, inner = _layer_name(fused, name, CORE)
            layers.setdefault(inner, []).append(tensor)
            if to.layout.per_layer:
                entries[f"decoder.layers.{layer}.{inner}"] = tensor
        elif name.startswith("embedding."):
            table = {"word": "word_embeddings", "position": "position_embeddings"}
            entries[f"embedding.{table[name.split('.')[1]]}.weight"] = tensor
        elif name == "head.weight":
            entries["output_layer.weight"] = tensor
        else:
            entries[f"decoder.final_layernorm.{name.split('.')[1]}"] = tensor
    if not to.layout.per_layer:
        entries |= {f"decoder.layers.{inner}": torch.stack(all_) for inner, all_ in layers.items()}
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
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    (to.folder / "configs").mkdir()
    (to.folder / "configs" / "model.yml").write_text(json.dumps(settings))
    args = {"num_layers": config.num_layers, "hidden_size": config.hidden_size}
    args |= {"num_attention_heads": config.num_attention_heads, "model_parallel_size": 1}
    return {"iteration": ITERATION, "args": args}
