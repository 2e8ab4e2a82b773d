"""Selects the attention backend: the first one in an ordered table that supports a layer's rule and
the keys of a forward pass. The last one computes the scores explicitly and supports all.

First the kernel that the trial at start-up has selected for the rule (`attention_trial`), then one
document after the other, then torch's scaled_dot_product_attention of complete samples or a cache.

Shapes: B micro-batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from megatron_ds.config import ModelConfig
from megatron_ds.config.devices import is_host
from megatron_ds.config.options.parallel import P2P
from megatron_ds.model.attention.cores import (
    SDPA,
    VARYING_SIZES,
    AttentionCore,
    EagerAttention,
    Order,
    WindowAttention,
    backends_in_order,
    name_of,
)
from megatron_ds.model.attention.masks import MaskTables, ragged_bias
from megatron_ds.model.attention.packed import (
    AttentionBackend,
    Keys,
    PackingOptions,
    PerDocumentBackend,
)
from megatron_ds.model.attention.rule import AttentionRule


@dataclass(frozen=True)
class SDPABackend:
    """torch's scaled_dot_product_attention."""

    order: Order = ()
    """Kernels to consider on a device. Empty: those that the caller has selected."""
    name = "torch's scaled_dot_product_attention"
    is_traceable = True

    def supports(self, rule: AttentionRule, keys: Keys) -> bool:
        return not keys.is_wider and not rule.needs_scores

    def core(self, rule: AttentionRule, keys: Keys, tables: MaskTables) -> AttentionCore:
        bias = None
        has_equal_lengths = keys.num_keys is None or keys.positions_BS is None
        # A single query sees every key, and kernels without a bias are faster.
        is_plain = has_equal_lengths and not rule.has_mask(keys.offset + keys.queries)
        if not is_plain or (keys.offset > 0 and keys.queries > 1):
            bias = _score_bias(rule, keys, tables, keys.dtype)
        is_sample = has_equal_lengths and keys.offset == 0
        backends = self.order if is_sample else ()
        if bias is not None and is_sample and _needs_blocks(rule, keys):
            return WindowAttention(partial(SDPA, backends=backends, scale=rule.scale), bias)
        return SDPA(bias, is_sample and is_plain, backends, rule.scale)


@dataclass(frozen=True)
class EagerBackend:
    """Scores that are computed explicitly."""

    name = "explicit scores"
    is_traceable = False

    def supports(self, rule: AttentionRule, keys: Keys) -> bool:
        return True

    def core(self, rule: AttentionRule, keys: Keys, tables: MaskTables) -> AttentionCore:
        bias = _score_bias(rule, keys, tables, torch.float32)
        if keys.has_documents:
            assert keys.documents is not None
            ids_BS = keys.documents.doc_ids_BS
            bias = bias.masked_fill(ids_BS[:, None, :, None] != ids_BS[:, None, None], -torch.inf)
        bias = bias[(None,) * (4 - bias.dim())]
        if _needs_blocks(rule, keys):
            return WindowAttention(partial(EagerAttention, rule=rule), bias)
        return EagerAttention(bias, rule)


def _needs_blocks(rule: AttentionRule, keys: Keys) -> bool:
    """Whether keys of complete samples lie before a block's own window and the one before it."""
    is_sample = keys.num_keys is None and keys.offset == 0 and not keys.has_documents
    return is_sample and rule.table_length(keys.queries) < keys.queries


def _score_bias(
    rule: AttentionRule, keys: Keys, tables: MaskTables, dtype: torch.dtype
) -> torch.Tensor:
    """The bias of complete samples, [n or 1, S, S], or of a cache, [B, n or 1, S, L]."""
    positions_BS = keys.positions_BS
    num_keys = keys.num_keys
    if num_keys is None or positions_BS is None:
        end = keys.offset + keys.queries
        if keys.offset == 0:
            length = rule.table_length(end) if _needs_blocks(rule, keys) else end
            return tables.bias(rule, length, dtype, keys.device)
        positions_BS = torch.arange(keys.offset, end, device=keys.device)[None]
        num_keys = end
    slopes_n = tables.slopes(rule, keys.device)
    positions_BL = keys.positions_of(rule.window)
    seen = num_keys if positions_BL is None else positions_BL
    return ragged_bias(positions_BS, seen, dtype, slopes_n, rule.window)


@dataclass(frozen=True)
class AttentionOptions:
    """Attention of passes without a cache."""

    samples: Order = ()
    """Kernels to consider for complete samples. Empty: selected by the caller."""
    documents: Order = VARYING_SIZES
    """Candidate kernels for attending to documents one at a time."""
    kernels: Mapping[AttentionRule, AttentionBackend] = field(default_factory=dict)
    """Backends that a trial has selected for complete samples or documents."""
    packing: PackingOptions | None = None
    """Treatment of document boundaries. None: ignored."""
    exchanges: tuple[str, ...] = (P2P,)
    """Kinds of exchange of context-parallel ranks: one, or one per layer."""

    @property
    def has_documents(self) -> bool:
        """Whether attention ends with a document."""
        return self.packing is not None and self.packing.reset_attention

    def backend(self, rule: AttentionRule, keys: Keys) -> AttentionBackend:
        """The first backend of the table that computes this attention."""
        table: tuple[AttentionBackend | None, ...] = (
            self.kernels.get(rule),
            PerDocumentBackend(self.documents),
            SDPABackend(self.samples),
            EagerBackend(),
        )
        return next(item for item in table if item is not None and item.supports(rule, keys))


CALLERS = AttentionOptions()


def selected_backend(
    rule: AttentionRule,
    config: ModelConfig,
    batch: int,
    shards: int,
    dtype: torch.dtype,
    device: torch.device,
    order: Order,
) -> str | None:
    """Name of the kernel that scaled_dot_product_attention selects in training.

    Args:
        rule: Attention rule of the layer.
        config: Architecture.
        batch: Samples of a call.
        shards: Ranks that share the heads: tensor-parallel and Ulysses ones.
        dtype: Type of the activations.
        device: Device of the activations.
        order: The kernels to consider.

    Returns:
        The name; None if no kernel can compute the call.
    """
    if rule.needs_scores:
        return None
    queries = config.seq_length

    row_of = partial(torch.empty, dtype=dtype, device=device, requires_grad=True)

    def heads(count: int, size: int) -> torch.Tensor:
        """Heads that have only a row of memory."""
        return row_of(size).expand(batch, max(1, count // shards), queries, size)

    q = heads(config.num_attention_heads, config.head_dim)
    k, v = (heads(config.kv_heads, size) for size in (config.head_dim, config.value_dim))
    scores = (1, q.shape[1], queries, queries)
    bias = row_of(queries).expand(scores).detach() if rule.has_mask(queries) else None
    has_groups = q.shape[1] != k.shape[1]
    if bias is not None and not is_host(device.type):
        # The keys and values are repeated for their queries.
        k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        has_groups = False
    try:
        with backends_in_order(order, device):
            choice = torch._fused_sdp_choice(
                q,
                k,
                v,
                attn_mask=bias,
                dropout_p=config.attention_dropout,
                is_causal=bias is None,
                enable_gqa=has_groups,
            )
    except RuntimeError:
        return None
    except (AttributeError, TypeError):  # not one of torch's public functions
        return "torch's choice"
    backend = SDPBackend(choice)
    is_refused = bool(order) and not is_host(device.type) and backend not in order
    return None if is_refused else name_of(backend)
