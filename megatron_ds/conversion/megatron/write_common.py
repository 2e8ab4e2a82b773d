"""Shared parts of the writers of Megatron's formats.

Owns the order of the QKV rows, the padding of the vocabulary, the arguments that Megatron compares
or takes over, and what its models lack.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.folders.output_folder import output_folder
from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem, raise_if_any, user_error, warn_of
from megatron_ds.conversion.folding import folded
from megatron_ds.conversion.megatron.arguments import lacking_parts, model_arguments
from megatron_ds.conversion.megatron.detect import TRACKER
from megatron_ds.conversion.megatron.names import legacy_name
from megatron_ds.conversion.source import SavedRun, SourceCheckpoint, WriteOptions

RELEASE = "release"
"""Name and pointer of a checkpoint of weights alone."""
FUSED = "fused"
"""Adam of Transformer Engine or apex."""
TORCH = "torch"
"""torch's AdamW, which Megatron takes without Transformer Engine and apex."""
DECAY_STYLES = "constant", "linear", "cosine", "inverse-square-root", "WSD"
"""Megatron's values of --lr-decay-style, which mean the same here."""
TORCH_GROUP = {
    **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused"), None),
    "decoupled_weight_decay": True,
}
"""Settings of torch's AdamW in a parameter group."""


def without_mup(source: SourceCheckpoint) -> SourceCheckpoint:
    """Weights alone of a model of muP with its factors folded in, for any run of Megatron; a run
    that continues with its states keeps them, and its arguments of muP.

    Raises:
        UserError: If the factors cannot be folded.
    """
    is_folded = source.settings.model.use_mup and source.training is None
    return folded(source) if is_folded else source


def check_parts(source: SourceCheckpoint, options: WriteOptions) -> None:
    """Raises UserError if Megatron's model lacks a part, or the sizes do not divide it."""
    settings = source.settings
    tp_size = options.tp_size
    pp_size = options.pp_size
    model = settings.model
    moe = settings.moe
    raise_if_any([*model.problems(tp_size), *moe.problems(model, tp_size, options.ep_size)])
    if lacking := ", ".join(lacking_parts(model, moe)):
        raise user_error("megatron-export-unsupported", parts=lacking)
    if source.training is not None and is_of_core(source):
        raise user_error("megatron-export-states")
    if model.num_layers % pp_size:
        raise user_error("megatron-export-stages", num_layers=model.num_layers, pp_size=pp_size)


def is_of_core(source: SourceCheckpoint) -> bool:
    """Whether only Megatron Core has the parts of a model."""
    return source.settings.model.attention_output_gate or not all(map(legacy_name, source.tensors))


@contextmanager
def checkpoint_folder(source: SourceCheckpoint, folder: Path) -> Iterator[Path]:
    """Creates a folder for Megatron's --load, complete or not at all; gives its checkpoint's."""
    iteration = source.training.iteration if source.training else None
    with output_folder(folder, source.confirm) as temporary:
        path = temporary / (RELEASE if iteration is None else f"iter_{iteration:07d}")
        path.mkdir()
        yield path
        (temporary / TRACKER).write_text(RELEASE if iteration is None else str(iteration))


def common_state(
    source: SourceCheckpoint, options: WriteOptions, **arguments: Any
) -> dict[str, Any]:
    """Returns the content of a checkpoint other than tensors.

    Args:
        source: The weights.
        options: Sizes of the layout.
        arguments: Further arguments of the run.
    """
    training = source.training
    args = _arguments(source, options) | arguments
    info = {"original_vocab_size": source.settings.model.vocab_size}  # as in bigscience's fork
    state = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "checkpoint_info": info,
    }
    if training is not None:
        args.update(training.arguments)
        args.update(
            iteration=training.iteration,
            consumed_train_samples=training.consumed_samples,
            no_save_optim=False,
        )
        state["iteration"] = training.iteration
        info["softmax_vocab_size"] = source.rows  # of this program alone
        if training.scheduler:
            state["opt_param_scheduler"] = dict(training.scheduler)
            style = training.scheduler.get("lr_decay_style")  # Megatron's own files may lack it
            if style and style not in DECAY_STYLES:
                known = ", ".join(DECAY_STYLES)
                warn_of(Problem("megatron-lacks-decay-style", style=style, known=known))
    return {"args": Namespace(**args), **state}


def adam_groups(training: SavedRun, adam: str) -> list[dict[str, Any]]:
    """The parameter groups of Megatron's optimizer: with weight decay, and without.

    Args:
        training: States of the run.
        adam: FUSED or TORCH. Fused implementations count steps by group, torch's by parameter.
    """
    args = training.arguments
    return [
        {
            "lr": args["lr"],
            "max_lr": args["lr"],
            "min_lr": args["min_lr"],
            "betas": (args["adam_beta1"], args["adam_beta2"]),
            "eps": args["adam_eps"],
            "weight_decay": args["weight_decay"] * wd_mult,
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            **({"bias_correction": True, "step": training.steps} if adam == FUSED else TORCH_GROUP),
        }
        for wd_mult in (1.0, 0.0)
    ]


def padded(full: Tensor, rows: int) -> Tensor:
    """Pads a vocabulary table to `rows` rows with zeros."""
    return torch.nn.functional.pad(full, (0, 0, 0, rows - len(full)))


def padded_vocab(source: SourceCheckpoint, tp_size: int) -> int:
    """Rows of the vocabulary tables, with Megatron's rule for padding."""
    model = source.settings.model
    rows = source.rows if source.training else model.vocab_size
    if rows > model.vocab_size and rows % tp_size == 0:
        return rows  # padding that was trained
    unit = model.make_vocab_size_divisible_by * tp_size
    return math.ceil(rows / unit) * unit


def grouped(full: Tensor, model: ModelConfig) -> Tensor:
    """[Q; K; V; gates] to the queries, their gates, the key and the value of each key-value
    head."""
    heads = model.num_attention_heads
    groups = model.kv_heads
    size = model.head_dim
    q, k, v, gates = full.split([heads * size, groups * size, groups * size, model.gate_size])
    parts = (q, gates, k, v) if model.gate_size else (q, k, v)
    by_group = [part.view(groups, -1, size, *full.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).reshape(full.shape)


def _arguments(source: SourceCheckpoint, options: WriteOptions) -> dict[str, Any]:
    """The arguments that Megatron compares, or takes over with --use-checkpoint-args."""
    tp_size = options.tp_size
    pp_size = options.pp_size
    model = source.settings.model
    tokenizer = source.settings.tokenizer
    dtypes = {tensor.dtype for tensor in source.tensors.values()}
    return {
        **model_arguments(model, source.settings.moe),
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "onnx_safe": None,
        "padded_vocab_size": padded_vocab(source, tp_size),
        "tokenizer_type": tokenizer.get("tokenizer_type"),
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": pp_size,
        "expert_model_parallel_size": options.ep_size,
        "expert_tensor_parallel_size": tp_size,
        "virtual_pipeline_model_parallel_size": None,
        "fp16": dtypes == {torch.float16},
        "bf16": dtypes == {torch.bfloat16},
        "world_size": tp_size * pp_size * options.ep_size,
    }
