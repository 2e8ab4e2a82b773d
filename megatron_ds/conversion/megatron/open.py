"""Checkpoints of Megatron-LM, Megatron Core and Megatron-DeepSpeed as full tensors of our model.

Owns the result of reading one: canonical names, rows in our order, and the options of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.conversion.megatron import arguments as megatron_args
from megatron_ds.conversion.megatron.detect import (
    DEEPSPEED,
    LEGACY,
    TORCH_DIST,
    TRACKER,
    UNIVERSAL,
    MegatronCheckpoint,
    detect_megatron,
)
from megatron_ds.conversion.megatron.names import (
    QkvOrder,
    RowOrders,
    canonical_name,
    join,
    joined_shape,
)
from megatron_ds.conversion.megatron.optimizer import has_coupled_decay
from megatron_ds.conversion.megatron.rank_files import (
    MegatronContents,
    Shards,
    read_deepspeed,
    read_legacy,
)
from megatron_ds.conversion.megatron.torch_dist import read_torch_dist
from megatron_ds.conversion.megatron.universal import read_universal
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values
from megatron_ds.conversion.source import (
    ADAM_SETTINGS,
    READ_DEFAULTS,
    ReadOptions,
    SavedRun,
    SourceCheckpoint,
    check_sizes,
)
from megatron_ds.engine.states.state_reader import VOCABULARY_TABLES, TensorReader

READERS = {
    LEGACY: read_legacy,
    DEEPSPEED: read_deepspeed,
    TORCH_DIST: read_torch_dist,
    UNIVERSAL: read_universal,
}
"""Kind of checkpoint -> reader of its tensors."""


SUMMED = ("attention.proj.bias", "mlp.fc_out.bias")
"""Biases of gpt-neox's parallel attention and MLP, which each tensor-parallel rank adds before the
sum over ranks: its model has the sum of the copies."""
STEPPED_APART = (
    "each tensor-parallel rank of gpt-neox steps a copy of the biases after attention and MLP, the "
    "sum of which is one bias here"
)


def open_megatron(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the checkpoint that the pointers of a folder name, or the folder's own.

    Vocabulary tables have their padding, and `vocab_size` counts it if it is not known.

    Raises:
        UserError: If files are missing or damaged, or our model lacks a part.
    """
    checkpoint = detect_megatron(path)
    if checkpoint is None:
        raise user_error("megatron-files-missing", folder=path, names=TRACKER)
    with malformed_values(checkpoint.path):
        return _open(checkpoint, options.model)


def _open(checkpoint: MegatronCheckpoint, flags: Mapping[str, Any]) -> SourceCheckpoint:
    weights = READERS[checkpoint.kind](checkpoint.path)
    state = weights.state
    args = megatron_args.arguments_of(state.get("args"))
    is_neox = megatron_args.is_neox(state)
    if is_neox:
        args = megatron_args.neox_arguments(state, checkpoint.path)
    settings = megatron_args.model_settings(args, checkpoint.path)
    options = settings or dict(flags)
    if not options.get("num_attention_heads"):
        raise user_error("megatron-without-arguments", path=checkpoint.path)
    if checkpoint.kind == TORCH_DIST or is_neox:
        orders = megatron_args.row_orders(options, {}, 3.0)  # the same in all versions
        if is_neox and orders.groups != orders.heads:
            orders = dataclasses.replace(orders, qkv=QkvOrder.BLOCKS)
    else:
        orders = megatron_args.row_orders(options, args, state.get("checkpoint_version"))
    tensors = _canonical(checkpoint.path, weights.shards, orders, options)
    unread = weights.unread
    if is_neox and args.get("parallel_residual"):
        tensors, unread = _with_sums(weights, tensors, options)
    optimizer = {
        key: _canonical(checkpoint.path, shards, orders, options)
        for key, shards in weights.optimizer.items()
        if unread != STEPPED_APART
    }
    table = tensors.get(VOCABULARY_TABLES[0])
    vocab_size = megatron_args.true_vocab_size(state, args)
    rows = vocab_size or (table.shape[0] if table else 0)
    described = ModelSettings({}, {"vocab_size": rows})
    if settings:
        if "num_experts" in settings:  # older versions of Megatron Core have no such bias
            settings["moe_router_bias"] = any("router.bias" in name for name in tensors)
        complete = ModelSettings({**settings, "vocab_size": rows})
        described = ModelSettings.of(complete.model, complete.moe, None, None)
        tokenizer = megatron_args.tokenizer_settings(args)
        described = dataclasses.replace(described, tokenizer=tokenizer)
        check_sizes(described, tensors, checkpoint.path)
    is_coupled = bool(optimizer) and has_coupled_decay(state)
    coupled = [Problem("foreign-decay-coupled", path=checkpoint.path)] if is_coupled else []
    scheduler = state.get("opt_param_scheduler") or state.get("lr_scheduler") or {}
    known = {name: args[name] for name in ADAM_SETTINGS if args.get(name) is not None}
    return SourceCheckpoint(
        checkpoint.path,
        checkpoint.kind,
        dataclasses.replace(described, may_have_padding=vocab_size is None),
        tensors,
        optimizer=optimizer,
        unread=unread,
        notes=(*megatron_args.notes(args, settings), *coupled),
        run=SavedRun(
            int(state.get("iteration", state.get("total_iters")) or 0),
            state.get("global_samples") if is_neox else args.get("consumed_train_samples"),
            int(scheduler["num_steps"]) if "num_steps" in scheduler else None,
            weights.steps,
            (state.get("checkpoint_info") or {}).get("softmax_vocab_size"),
            arguments={**known, "optimizer": "adam"},
            scheduler=scheduler,
        ),
    )


def _canonical(
    path: Path, weights: Shards, orders: RowOrders, settings: Mapping[str, Any]
) -> dict[str, TensorReader]:
    """Our names and rows, without a tied embedding's second copy."""
    tied = not settings.get("untie_embeddings_and_output_weights", False)
    tensors: dict[str, TensorReader] = {}
    unknown = []
    for foreign, shards in weights.items():
        name = canonical_name(foreign, settings.get("num_layers") or 0)
        if name is None:
            unknown.append(foreign)
        elif not (name == "head.weight" and tied):
            tensors[name] = _joined(path, name, shards, orders)
    if unknown:
        raise user_error("megatron-weights-unknown", path=path, names=", ".join(sorted(unknown)))
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    expected = settings.get("num_layers") or len(layers)
    count = len(layers) - (settings.get("mtp_num_layers") or 0)
    if count != expected or layers != {str(layer) for layer in range(len(layers))}:
        raise user_error("megatron-layers-missing", path=path, found=count, expected=expected)
    return tensors


def _with_sums(
    weights: MegatronContents, tensors: Mapping[str, TensorReader], settings: Mapping[str, Any]
) -> tuple[dict[str, TensorReader], str]:
    """The tensors with sums of ranks' biases, and why the optimizer's states are not read then."""
    summed = {}
    for foreign, shards in weights.shards.items():
        name = canonical_name(foreign, settings.get("num_layers") or 0)
        if name is not None and name.endswith(SUMMED) and len(shards) > 1:
            load = partial(_sum, shards)
            summed[name] = TensorReader.full(shards[0].shape, shards[0].dtype, load)
    return {**tensors, **summed}, STEPPED_APART if summed else weights.unread


def _sum(shards: list[TensorReader]) -> Tensor:
    return torch.stack([shard.read() for shard in shards]).sum(0)


def _joined(path: Path, name: str, shards: list[TensorReader], orders: RowOrders) -> TensorReader:
    shape = joined_shape(name, shards[0].shape, len(shards))
    return TensorReader.full(shape, shards[0].dtype, partial(_read, path, name, shards, orders))


def _read(path: Path, name: str, shards: list[TensorReader], orders: RowOrders) -> Tensor:
    with malformed_values(path):
        return join(name, [shard.read() for shard in shards], orders)
