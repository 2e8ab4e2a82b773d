"""QK-clip (Kimi K2, 2025): scales the weights of queries and keys of heads with large logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config.fields import in_effect
from megatron_ds.config.options.parallel import kind_of_layer
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.states.flats import Flat, own_flats
from megatron_ds.model.attention.latent import LatentAttention
from megatron_ds.model.attention.logits import LargestLogits
from megatron_ds.model.attention.self_attention import Attention

METRIC = "max_attention_logit"


class QKClip:
    """Measures the logits of each step, and scales weights within the optimizer's step.

        factor = min(1, threshold / largest logit)         of each key head and its query heads
        queries * factor ** alpha, keys * factor ** (1 - alpha)

    The master weights are scaled after their update, wherever ZeRO keeps them. Of latent attention,
    the rotated part of the queries is scaled by the factor: all heads share the rotated keys.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._options = in_effect(parts.config.optimizer)
        self._largest: list[LargestLogits] = []
        self._flats: dict[int, Flat] = {}
        self._rows: dict[str, Tensor] = {}
        """Factors of the rows of this rank's shards, by the names of the weights."""
        self._clipped: set[int] = set()
        self.is_used = self._options.qk_clip or parts.config.logging.log_max_attention_logit
        if not self.is_used:
            return
        for block in parts.model.blocks():
            heads = block.attention.local_heads[0]
            exchange = kind_of_layer(parts.config.parallel.cp_comm_type, block.layer)
            block.largest = LargestLogits(heads, *parts.mesh.sharing_attention(exchange))
            self._largest.append(block.largest)
        if self._options.qk_clip:
            parts.engine.basic_optimizer.register_step_post_hook(self._clip)

    def begin_step(self) -> dict[str, Tensor]:
        """Collect the logits of the passes before a step, for its metrics. Collective."""
        parts = self._parts
        if not self.is_used:
            return {}
        largest = [layer.take(parts.device) for layer in self._largest]
        flat = torch.cat([torch.full((1,), -torch.inf, device=parts.device), *largest])
        if parts.mesh.replicas.size > 1:
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=parts.mesh.replicas.handle)
        if self._options.qk_clip:
            sizes = [len(heads_n) for heads_n in largest]
            self._rows = {}
            self._clipped = set()
            for block, heads_n in zip(parts.model.blocks(), flat[1:].split(sizes), strict=True):
                rows = self._row_factors(block.attention, heads_n)
                prefix = f"layers.{block.layer}.attention"
                self._rows |= {f"{prefix}.{key}": factors for key, factors in rows.items()}
            if not self._flats:  # within its step, DeepSpeed changes the optimizer's groups
                flats = own_flats(parts.engine, parts.stage, parts.mesh)
                self._flats = {id(flat.master): flat for flat in flats}
        overall = flat.max()
        if parts.mesh.model.size > 1:
            dist.all_reduce(overall, dist.ReduceOp.MAX, group=parts.mesh.model.handle)
        return {METRIC: overall}

    def _row_factors(self, attention: Attention, largest_n: Tensor) -> Mapping[str, Tensor]:
        options = self._options
        heads, keys, _ = attention.local_heads
        is_latent = isinstance(attention, LatentAttention)
        keys = heads if is_latent else keys
        largest_k = largest_n.view(keys, -1).amax(1)
        factors_k = options.qk_clip_threshold / largest_k.clamp(min=options.qk_clip_threshold)
        query_factors = (factors_k**options.qk_clip_alpha).repeat_interleave(heads // keys)
        key_factors = factors_k ** (1 - options.qk_clip_alpha)
        if not isinstance(attention, LatentAttention):
            size = attention.local_sizes[0] // heads
            rows = [part.repeat_interleave(size) for part in (query_factors, key_factors)]
            return dict.fromkeys(("qkv.weight", "qkv.bias"), torch.cat(rows))
        plain, rotated = attention.sizes
        ones = torch.ones_like(factors_k)[:, None].expand(-1, attention.local_sizes[2] // heads)
        queries = (query_factors[:, None].expand(-1, plain), factors_k[:, None].expand(-1, rotated))
        keys_values = torch.cat([key_factors[:, None].expand(-1, plain), ones], 1).flatten()
        q_factors = torch.cat(queries, 1).flatten()
        return {"q.weight": q_factors, "q_up.weight": q_factors, "kv_up.weight": keys_values}

    @torch.no_grad()
    def _clip(self, optimizer: Any, *_: Any) -> None:
        """Scale the weights that the optimizer has just updated, each once in a step."""
        for master in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if id(master) in self._clipped or id(master) not in self._flats:
                continue
            self._clipped.add(id(master))
            for part in self._flats[id(master)].parts:
                factors = self._rows.get(part.place.name)
                if factors is None:
                    continue
                columns = torch.Size(part.place.shape[1:]).numel()
                span = part.elements
                factors = factors.to(master.device)
                # Rows without a factor, those of values, follow the others.
                span = range(span.start, min(span.stop, len(factors) * columns))
                if span:
                    values = master.view(-1)[part.position : part.position + len(span)]
                    index = torch.arange(span.start, span.stop, device=master.device) // columns
                    values.mul_(factors[index])
