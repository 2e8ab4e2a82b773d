"""Models of nanotron: Llama and dense Qwen 2.

    FOLDER/checkpoint_metadata.json
    FOLDER/model_config.json
    FOLDER/model/MODULE/.../model_weight.safetensors
    FOLDER/model/MODULE/.../model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors

The names of folders are those of modules. The tensor of a file is `data`; the metadata of a shard
say which part of the complete tensor it is. Facts: nanotron's source, `serialize/weights.py`,
`serialize/metadata.py`, `parallel/parameters.py`, `models/llama.py`, `models/qwen.py` and
`config/models_config.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.foreign.trainers import NANOTRON_SETTINGS, detect_trainer
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields
from megatron_ds.conversion.model_settings import malformed_values, read_json_object
from megatron_ds.conversion.safetensors_files import open_safetensors
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.open_model import (
    file_in,
    open_model,
    padded_rows,
    settings_of,
)
from megatron_ds.engine.states.state_reader import Columns, TensorReader, part_of

NAME = "nanotron"
DATA = "data"
FILE = re.compile(r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-(\d+))?\.safetensors")
SLICES = "local_global_slices_pairs"
SHAPE = "unsharded_shape"
BIAS = "model.decoder.0.pp_block.attn.qkv_proj.bias"
IGNORED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "is_llama_config",
    "pretraining_tp",
    "use_cache",
    "attention_bias",
    "z_loss_enabled",
    "z_loss_coefficient",
    "flex_attention_mask",
    "_attn_implementation",
    "_fused_rms_norm",
    "_use_qkv_packed",
    "_use_doc_masking",
)
NAMES = TrainerNames(
    outer={
        "embedding.word": "model.token_position_embeddings.pp_block.token_embedding",
        "final_norm": "model.final_layer_norm.pp_block",
        "head": "model.lm_head.pp_block",
    },
    layer="model.decoder.{}.pp_block",
    inner={
        "attention_norm": "input_layernorm",
        "attention.qkv": "attn.qkv_proj",
        "attention.proj": "attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.fc_in": "mlp.gate_up_proj",
        "mlp.fc_out": "mlp.down_proj",
    },
)


def open_nanotron(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of a folder, or of the step that its latest.txt names.

    Raises:
        UserError: If files are missing or damaged, or the model has parts that ours lacks.
    """
    del options
    checkpoint = detect_trainer(path, NAME)
    folder = path if checkpoint is None else checkpoint.path
    file = file_in(folder, NANOTRON_SETTINGS)
    theirs = _tensors(folder)
    config = ConfigValues(file, {k: v for k, v in read_json_object(file).items() if v is not None})
    settings = settings_of(config, lambda values: _fields(values, BIAS in theirs), IGNORED)
    source = open_model(folder, NAME, padded_rows(settings), theirs, NAMES)
    return dataclasses.replace(source, settings=settings)


def _fields(config: ConfigValues, has_bias: bool) -> Fields:
    is_qwen = config.get("is_qwen2_config", False)
    heads = config.number("num_attention_heads", int)
    # Llama's rotated neighbors before it had the key.
    is_interleaved = config.get("rope_interleaved", not is_qwen)
    is_fused = config.get("_fused_rotary_emb", False)
    if is_qwen and is_interleaved and not is_fused:
        config.lack("its rotation of neighbors without the fused kernel", "rope_interleaved", True)
    absent = {
        "scaled rotary positions": "rope_scaling",
        "a sliding window": "sliding_window_size",
        "layers without positions": "no_rope_layer",
        "experts": "moe_config",
    }
    for part, key in absent.items():
        if value := config.get(key, None):
            config.lack(part, key, value)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        config.lack("another activation function", "hidden_act", activation)
    return {
        "num_layers": config.number("num_hidden_layers", int),
        "hidden_size": config.number("hidden_size", int),
        "num_attention_heads": heads,
        "num_query_groups": config.number("num_key_value_heads", int, None) or heads,
        "ffn_hidden_size": config.number("intermediate_size", int),
        "vocab_size": config.number("vocab_size", int),
        "seq_length": config.number("max_position_embeddings", int, 2048),
        "position_embedding_type": "rope",
        "rotary_base": config.number("rope_theta", float, 10000.0),
        "rotary_interleaved": bool(is_interleaved),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", float, 1e-6),
        "activation": "swiglu",
        "add_bias_linear": False,
        "add_qkv_bias": has_bias,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _tensors(folder: Path) -> dict[str, TensorReader]:
    """The complete tensors by their names."""
    root = folder / "model"
    shards: dict[str, dict[int, Path]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for path in sorted(root.rglob("*.safetensors")):
        match = FILE.fullmatch(path.name)
        if match is None:
            raise user_error("foreign-tensors-unknown", path=folder, names=path.name)
        name = ".".join((*path.relative_to(root).parent.parts, match[1]))
        shards[name][int(match[2] or 0)] = file_in(folder, str(path.relative_to(folder)))
        sizes[name] = max(sizes.get(name, 1), int(match[3] or 1))
    for name, files in shards.items():
        if missing := sorted({*range(sizes[name])} - files.keys()):
            names = ", ".join(f"{name} of tp-rank-{rank}" for rank in missing)
            raise user_error("foreign-tensors-missing", path=folder, names=names)
    return {
        name: _joined(name, [files[rank] for rank in sorted(files)])
        for name, files in shards.items()
    }


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A part of a shard, and its rows and columns in the complete tensor."""

    tensor: TensorReader
    local: tuple[slice, ...]
    whole: tuple[slice, ...]


def _joined(name: str, files: Sequence[Path]) -> TensorReader:
    """A complete tensor of its shards."""
    parts: list[_Shard] = []
    shape: tuple[int, ...] = ()
    tensor = None
    for path in files:
        tensor = open_safetensors(path).get(DATA)
        if tensor is None:
            raise user_error("foreign-file-unreadable", path=path, error=f"it has no {DATA}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise user_error("foreign-file-unreadable", path=path, error=error) from error
        if SLICES not in metadata:
            return tensor
        with malformed_values(path):
            shape = tuple(map(int, re.findall(r"\d+", metadata[SHAPE])))
            for pair in metadata[SLICES].split(";"):
                local, whole = (_slices(text, shape) for text in pair.split("#"))
                parts.append(_Shard(tensor, local, whole))
    assert tensor is not None
    covered = sum(_numel(part.whole) for part in parts)
    if covered != torch.Size(shape).numel():
        raise user_error("dcp-tensor-incomplete", folder=files[0].parent, key=name)
    return TensorReader(shape, tensor.dtype, partial(_read, parts, shape, tensor.dtype))


def _slices(text: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices such as `0,16,None|None,None,None`; the end of an open one is the tensor's."""
    slices = []
    for entry, size in zip(text.split("|"), shape, strict=True):
        first, last, step = (None if word == "None" else int(word) for word in entry.split(","))
        if step not in (None, 1):
            raise ValueError(f"a step of {step}")
        slices.append(slice(first or 0, size if last is None else last))
    return tuple(slices)


def _numel(slices: Sequence[slice]) -> int:
    return torch.Size([index.stop - index.start for index in slices]).numel()


def _read(
    parts: Sequence[_Shard],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: range,
    columns: Columns | None,
) -> Tensor:
    """Rows of a complete tensor."""
    result = torch.empty((len(rows), *shape[1:]), dtype=dtype)
    for part in parts:
        first = max(rows.start, part.whole[0].start)
        last = min(rows.stop, part.whole[0].stop)
        if first < last:
            start = part.local[0].start + first - part.whole[0].start
            values = part.tensor.read(range(start, start + last - first))
            inner = tuple(index for index in part.local[1:])
            target = (slice(first - rows.start, last - rows.start), *part.whole[1:])
            result[target] = values[(slice(None), *inner)]
    return part_of(result, range(len(rows)), columns)
