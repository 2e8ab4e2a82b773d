"""Models of muP in other formats: with their multipliers as options, or folded into weights.

The weights of a folded model compute the same function with ordinary attention and without factors
of embedding, logits, attention and MLP. Knows no format.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.problems import user_error
from megatron_ds.conversion.source import SourceCheckpoint, declared_weights
from megatron_ds.engine.states.state_reader import Columns, TensorReader
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.declaration.residual import residual_form

PLAIN: Mapping[str, float | None] = {
    "softmax_scale": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_multiplier": 1.0,
}
"""The options of the multipliers, and their values in a model without them."""
EXACT = (torch.float32, torch.float64)
"""Types whose rounding is no loss; in others a weight is multiplied by powers of two only."""


def explicit(source: SourceCheckpoint) -> SourceCheckpoint:
    """The same model without --use-mup, whose multipliers are options of their own."""
    model = source.settings.model
    values = {
        "softmax_scale": attention_rules(model)[0].scale,
        "embedding_multiplier": model.embedding_factor,
        "residual_multiplier": model.residual_factor,
        "logits_multiplier": model.logits_factor,
    }
    return _with_multipliers(source, values)


def folded(source: SourceCheckpoint) -> SourceCheckpoint:
    """A model without multipliers that computes the same, of a model with --use-mup.

    Raises:
        UserError: If a part of the model has no weight to fold into, or if the type of the weights
            would round them.
    """
    factors = dict(_factors(source))
    tensors = dict(source.tensors)
    for name, (factor, rows) in factors.items():
        tensor = tensors[name]
        if tensor.dtype not in EXACT and math.frexp(factor)[0] != 0.5:
            raise user_error("mup-rounded", name=name, factor=factor, dtype=tensor.dtype)
        tensors[name] = _scaled(tensor, factor, rows)
    return dataclasses.replace(_with_multipliers(source, PLAIN), tensors=tensors)


def _with_multipliers(
    source: SourceCheckpoint, values: Mapping[str, float | None]
) -> SourceCheckpoint:
    settings = source.settings
    fixed, defaults = (
        {
            name: value
            for name, value in group.items()
            if name not in PLAIN and name != "use_mup" and not name.startswith("mup_")
        }
        for group in (settings.fixed, settings.defaults)
    )
    fixed |= {name: value for name, value in values.items() if value is not None}
    fixed["use_mup"] = False
    return dataclasses.replace(
        source, settings=dataclasses.replace(settings, fixed=fixed, defaults=defaults)
    )


def _scaled(tensor: TensorReader, factor: float, count: int | None) -> TensorReader:
    """A tensor times a factor; with a count, its first rows times the factor."""

    def load(rows: range, columns: Columns | None) -> Tensor:
        values = tensor.load(rows, columns)
        last = len(rows) if count is None else min(len(rows), max(0, count - rows.start))
        return torch.cat((values[:last] * factor, values[last:]))

    return dataclasses.replace(tensor, load=load)


def _factors(source: SourceCheckpoint) -> Iterator[tuple[str, tuple[float, int | None]]]:
    """Names of weights, their factors, and the number of rows that have them; None: all."""
    model = source.settings.model
    moe = source.settings.moe
    names = list(declared_weights(model, moe))
    tables = ["embedding.norm.weight", "embedding.norm.bias"]
    if not model.embed_layernorm:
        tables = ["embedding.word.weight"]
    tables.append("embedding.position.weight")
    is_tied = not model.untie_embeddings_and_output_weights
    # A tied output layer has the factor of the embedding.
    shared = model.embedding_factor if is_tied and not model.embed_layernorm else 1.0
    outputs = ["head.weight"]
    if is_tied:
        outputs = [name for name in names if _is_last_norm(name)]
    by_name = {
        **dict.fromkeys(tables, model.embedding_factor),
        **dict.fromkeys(outputs, model.logits_factor / shared),
        **dict.fromkeys(_written(model, moe, names), model.residual_factor),
    }
    for name, factor in by_name.items():
        if name in names and factor != 1.0:
            _refuse_offset(model, name)
            yield name, (factor, None)
    yield from _query_factors(model, names)


def _is_last_norm(name: str) -> bool:
    return name.startswith("final_norm.") or ".output_norm." in name


def _refuse_offset(model: ModelConfig, name: str) -> None:
    """Raises UserError if a weight is a norm's that is added to 1."""
    if model.apply_layernorm_1p and "norm" in name:
        raise user_error("mup-not-foldable", part="norms with weights around 0")


def _written(model: ModelConfig, moe: MoEConfig, names: list[str]) -> Iterator[str]:
    """Weights and biases whose products are added to the residual stream."""
    if model.residual_factor != 1.0 and residual_form(model).post:
        raise user_error("mup-not-foldable", part="norms of what is added")
    last = ["attention.proj", "mlp.fc_out", "mlp.shared.fc_out"]
    last.append("mlp.experts.fc_out" if moe.moe_latent_size is None else "mlp.latent_out")
    for name in names:
        if name.rpartition(".")[0].partition(".")[2].partition(".")[2] in last:
            yield name


def _query_factors(
    model: ModelConfig, names: list[str]
) -> Iterator[tuple[str, tuple[float, int | None]]]:
    """Factors of what makes the queries, for the scale of the scores."""
    plain = dataclasses.replace(model, use_mup=False, softmax_scale=None)
    ordinary = attention_rules(plain)[0].scale or model.head_dim**-0.5
    factor = (attention_rules(model)[0].scale or model.head_dim**-0.5) / ordinary
    if math.isclose(factor, 1.0, rel_tol=1e-12):
        return
    if model.qk_l2_norm:
        raise user_error("mup-not-foldable", part="norms of queries without weights")
    rows = None
    parts: tuple[str, ...] = ("q_up", "q")
    if not model.multi_latent_attention:
        parts = ("q_norm",) if model.qk_layernorm else ("qkv",)
        rows = None if model.qk_layernorm else model.num_attention_heads * model.head_dim
    for name in names:
        layer, _, rest = name.partition(".attention.")
        if layer.startswith("layers.") and rest.rpartition(".")[0] in parts:
            _refuse_offset(model, name)
            yield name, (factor, rows)
