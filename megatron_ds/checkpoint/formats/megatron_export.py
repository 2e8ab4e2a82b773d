"""Writes the weights of a model as a `release` of Megatron-LM, in files of its `torch` format.

Owns the names, the row order and the arguments of checkpoint version 3. One file is in memory at a
time, besides one full tensor.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.formats.megatron_folders import TRACKER
from megatron_ds.checkpoint.formats.output_folder import output_folder
from megatron_ds.checkpoint.formats.safetensors_files import OnTensor
from megatron_ds.checkpoint.formats.source import WeightsSource
from megatron_ds.checkpoint.lazy_tensors import LazyTensor
from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import raise_if_any, user_error
from megatron_ds.engine.full_states import VOCABULARY_TABLES
from megatron_ds.parallel.sharding import ShardSpec, take_shard

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.proj": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.fc_in": "mlp.dense_h_to_4h",
    "mlp.fc_out": "mlp.dense_4h_to_h",
}
ACTIVATIONS = ("gelu", "openai-gelu", "squared-relu", "swiglu")
POSITIONS = ("learned_absolute", "rope", "none")


def write_megatron(
    source: WeightsSource,
    folder: Path,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    on_tensor: OnTensor = lambda name, size: None,
) -> None:
    """Writes a folder for Megatron's --load, complete, or not at all.

    Args:
        source: The weights, without padding.
        folder: Must not exist, or be empty.
        tp_size: Tensor-parallel size.
        pp_size: Pipeline stages.
        on_tensor: Reports progress.

    Raises:
        UserError: If Megatron's model lacks a part, the sizes do not divide it, or the folder has
            files already.
        OSError: If the disk fails.
    """
    model = source.settings.model
    raise_if_any(model.problems(tp_size))
    if lacking := ", ".join(_lacking_parts(source)):
        raise user_error("megatron-export-unsupported", parts=lacking)
    if model.num_layers % pp_size:
        raise user_error("megatron-export-stages", num_layers=model.num_layers, pp_size=pp_size)
    state = {
        "args": Namespace(**_arguments(source, tp_size, pp_size)),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "checkpoint_info": {"original_vocab_size": model.vocab_size},  # as in bigscience's fork
    }
    with output_folder(folder) as temporary:
        for stage in range(pp_size):
            for rank in range(tp_size):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp_size > 1 else "")
                path = temporary / "release" / name / "model_optim_rng.pt"
                path.parent.mkdir(parents=True)
                stage_of = _Stage(source, stage, pp_size, rank, tp_size, on_tensor)
                torch.save({**state, "model": stage_of.model()}, path)
        (temporary / TRACKER).write_text("release")


class _Stage:
    """The weights of one tensor-parallel rank of one pipeline stage."""

    def __init__(
        self,
        source: WeightsSource,
        stage: int,
        pp_size: int,
        rank: int,
        tp_size: int,
        on_tensor: OnTensor,
    ) -> None:
        self._source, self._model = source, source.settings.model
        self._rank, self._tp_size, self._on_tensor = rank, tp_size, on_tensor
        per_stage = self._model.num_layers // pp_size
        self._layers = range(stage * per_stage, (stage + 1) * per_stage)
        self._is_first, self._is_last = stage == 0, stage == pp_size - 1

    def model(self) -> dict[str, Any]:
        language_model: dict[str, Any] = {}
        if self._is_first:
            language_model["embedding"] = {
                name: {"weight": shard} for name, shard in self._tables()
            }
        language_model["encoder"] = dict(self._encoder())
        tensors = self._source.tensors
        if self._is_last and "head.weight" in tensors:
            language_model["output_layer"] = {"weight": self._shard("head.weight")}
        model: dict[str, Any] = {"language_model": language_model}
        if self._is_last and not self._is_first and "head.weight" not in tensors:
            copy = self._shard("embedding.word.weight")
            model["word_embeddings_for_head"] = {"weight": copy}
        return model

    def _tables(self) -> Iterator[tuple[str, Tensor]]:
        yield "word_embeddings", self._shard("embedding.word.weight")
        if "embedding.position.weight" in self._source.tensors:
            yield "position_embeddings", self._shard("embedding.position.weight")

    def _encoder(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._source.tensors:
            kind = name.rpartition(".")[2]
            if name.startswith("layers."):
                _, layer, rest = name.split(".", 2)
                if int(layer) in self._layers:
                    inner = LAYER_NAMES[rest.rpartition(".")[0]]
                    number = int(layer) - self._layers.start
                    yield f"layers.{number}.{inner}.{kind}", self._shard(name)
            elif name.startswith("final_norm.") and self._is_last:
                yield f"final_layernorm.{kind}", self._shard(name)

    def _shard(self, name: str) -> Tensor:
        """A tensor's part of this rank, in Megatron's order, in memory of its own."""
        model, tensor = self._model, self._source.tensors[name]
        full = _padded(tensor, model, self._tp_size) if name in VOCABULARY_TABLES else tensor.read()
        if ".attention.qkv." in name:
            full = _grouped(full, model)
        spec = _spec(name, full, model)
        if spec is not None:
            full = take_shard(full, spec, self._rank, self._tp_size)
        self._on_tensor(name, tensor.nbytes // self._tp_size)
        return full.clone()  # torch.save writes the whole storage of a view


def _padded(tensor: LazyTensor, model: ModelConfig, tp_size: int) -> Tensor:
    missing = _padded_vocab(model, tp_size) - tensor.shape[0]
    return torch.nn.functional.pad(tensor.read(), (0, 0, 0, missing))


def _padded_vocab(model: ModelConfig, tp_size: int) -> int:
    """Rows with Megatron's rule for padding."""
    unit = model.make_vocab_size_divisible_by * tp_size
    return math.ceil(model.vocab_size / unit) * unit


def _grouped(full: Tensor, model: ModelConfig) -> Tensor:
    """[Q; K; V] to the queries, the key and the value of each key-value head."""
    heads, groups, size = model.num_attention_heads, model.kv_heads, model.head_dim
    parts = full.split([heads * size, groups * size, groups * size])
    by_group = [part.view(groups, -1, size, *full.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).reshape(full.shape)


def _spec(name: str, full: Tensor, model: ModelConfig) -> ShardSpec | None:
    """How Megatron cuts a tensor; None if every rank has all of it."""
    if name.endswith(("attention.proj.weight", "mlp.fc_out.weight")):
        return ShardSpec(1, (full.shape[1],))
    if ".mlp.fc_in." in name and model.is_gated:
        return ShardSpec(0, (model.mlp_hidden_size,) * 2)
    is_cut = name in VOCABULARY_TABLES or ".attention.qkv." in name or ".mlp.fc_in." in name
    return ShardSpec(0, (full.shape[0],)) if is_cut else None


def _lacking_parts(source: WeightsSource) -> Iterator[str]:
    model = source.settings.model
    if model.activation not in ACTIVATIONS:
        yield f"activation {model.activation}"
    if model.position_embedding_type not in POSITIONS:
        yield f"positions {model.position_embedding_type}"
    if model.embed_layernorm:
        yield "a norm of the embedding"
    if source.settings.moe.is_used:
        yield "experts"


def _arguments(source: WeightsSource, tp_size: int, pp_size: int) -> dict[str, Any]:
    """The arguments that Megatron compares, or takes over with --use-checkpoint-args."""
    model, tokenizer = source.settings.model, source.settings.tokenizer
    dtypes = {tensor.dtype for tensor in source.tensors.values()}
    kind = model.position_embedding_type
    return {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.mlp_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_dim,
        "group_query_attention": model.kv_heads != model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "seq_length": model.seq_length,
        "encoder_seq_length": model.seq_length,
        "max_position_embeddings": model.num_positions,
        "position_embedding_type": "learned_absolute" if kind == "none" else kind,
        "add_position_embedding": kind == "learned_absolute",
        "use_rotary_position_embeddings": kind == "rope",
        "rotary_percent": model.rotary_percent,
        "rotary_base": int(model.rotary_base),
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared-relu",
        "openai_gelu": model.activation == "openai-gelu",
        "bias_gelu_fusion": model.activation == "gelu" and model.gelu_kind == "tanh",
        "onnx_safe": None,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "padded_vocab_size": _padded_vocab(model, tp_size),
        "tokenizer_type": tokenizer.get("tokenizer_type"),
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": pp_size,
        "virtual_pipeline_model_parallel_size": None,
        "fp16": dtypes == {torch.float16},
        "bf16": dtypes == {torch.bfloat16},
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "iteration": 0,
    }
