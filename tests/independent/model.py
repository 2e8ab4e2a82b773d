"""A GPT by its options: initial weights, the folder that a run loads them from, and its loss.

Imports nothing of the package. Options have the names and the defaults of Megatron's flags.

Shapes: B micro-batch, S sequence, H hidden, T = S x B tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from tests.dense_gpt import activate, dense_predictions, gated, no_dropout, rolled
from tests.tables import tables

TABLES = tables(__file__, tuple)

Options = Mapping[str, Any]
Weights = dict[str, Tensor]
"""Full tensors by canonical name."""
DEFAULTS = TABLES["defaults"]
FIXED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "position_embedding_type",
    "normalization",
    "activation",
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "add_bias_linear",
    "expert_interval",
    "multi_latent_attention",
    "qk_layernorm",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mtp_num_layers",
)
"""Options that a folder of weights states."""


def complete(options: Options) -> Any:
    """The options with the defaults, as attributes."""
    values = {**DEFAULTS, **options}
    values["add_bias_linear"] = not values["disable_bias_linear"]
    return SimpleNamespace(**values)


def initial_weights(options: Options, seed: int) -> Weights:
    """Random weights in fp32, also biases and norms, whose mistakes would not show at 0 and 1."""
    config = complete(options)
    generator = torch.Generator().manual_seed(seed)
    hidden = config.hidden_size
    width = config.ffn_hidden_size
    vocab = config.vocab_size
    heads = config.num_attention_heads
    size = hidden // config.num_attention_heads
    groups = config.num_query_groups or heads
    rows = 2 * width if config.activation.endswith("glu") else width
    weights: Weights = {}

    def draw(name: str, *shape: int, std: float = 0.15, mean: float = 0.0) -> None:
        weights[name] = mean + std * torch.randn(shape, generator=generator)

    def linear(name: str, out: int, size_in: int, *stacked: int) -> None:
        draw(f"{name}.weight", *stacked, out, size_in)
        if config.add_bias_linear:
            draw(f"{name}.bias", *stacked, out, std=0.05)

    def norm(name: str, size: int = hidden) -> None:
        draw(f"{name}.weight", size, mean=1.0)
        if config.normalization == "LayerNorm":
            draw(f"{name}.bias", size)

    def latent_attention(name: str) -> None:
        plain = config.qk_head_dim
        shared = config.qk_pos_emb_head_dim
        for part, rank, beside, rows in (
            ("q", config.q_lora_rank, 0, plain + shared),
            ("kv", config.kv_lora_rank, shared, plain + config.v_head_dim),
        ):
            draw(f"{name}.{part}_down.weight", rank + beside, hidden)
            draw(f"{name}.{part}_up.weight", heads * rows, rank)
            norm(f"{name}.{part}_norm", rank)

    draw("embedding.word.weight", vocab, hidden)
    if config.position_embedding_type == "learned_absolute":
        draw("embedding.position.weight", config.seq_length, hidden)
    for layer in range(config.num_layers + config.mtp_num_layers):
        name = f"layers.{layer}"
        norm(f"{name}.attention_norm")
        gates = hidden * config.attention_output_gate
        gates += config.num_attention_heads * config.head_wise_attn_gate
        if config.multi_latent_attention:
            latent_attention(f"{name}.attention")
        else:
            linear(f"{name}.attention.qkv", hidden + 2 * groups * size + gates, hidden)
        if config.softmax_type == "learnable":
            draw(f"{name}.attention.sinks", config.num_attention_heads, std=1.0)
        values = config.v_head_dim if config.multi_latent_attention else size
        linear(f"{name}.attention.proj", hidden, heads * values)
        norm(f"{name}.mlp_norm")
        if not has_experts(config, layer):
            linear(f"{name}.mlp.fc_in", rows, hidden)
            linear(f"{name}.mlp.fc_out", hidden, width)
            continue
        count = config.num_experts
        latent = config.moe_latent_size or hidden
        own = config.moe_ffn_hidden_size or width
        draw(f"{name}.mlp.router.weight", count, hidden, std=0.5)
        if config.moe_router_bias:
            draw(f"{name}.mlp.router.bias", count, std=0.5)
        linear(f"{name}.mlp.experts.fc_in", own * rows // width, latent, count)
        linear(f"{name}.mlp.experts.fc_out", latent, own, count)
        if config.moe_latent_size:
            linear(f"{name}.mlp.latent_in", latent, hidden)
            linear(f"{name}.mlp.latent_out", hidden, latent)
        if shared := config.moe_shared_expert_intermediate_size:
            linear(f"{name}.mlp.shared.fc_in", shared * rows // width, hidden)
            linear(f"{name}.mlp.shared.fc_out", hidden, shared)
            if config.moe_shared_expert_gate:
                draw(f"{name}.mlp.shared_gate.weight", 1, hidden)
    norm("final_norm")
    for depth in range(config.mtp_num_layers):
        for part in ("embedding_norm", "hidden_norm", "output_norm"):
            norm(f"predictions.{depth}.{part}")
        draw(f"predictions.{depth}.projection.weight", hidden, 2 * hidden)
    if config.untie_embeddings_and_output_weights:
        draw("head.weight", vocab, hidden)
    return weights


def has_experts(config: Any, layer: int) -> bool:
    """Whether a layer, counted from 0, has a router."""
    if config.num_experts < 2:
        return False
    layer = min(layer, config.num_layers - 1)
    if config.moe_layer_freq is None:
        return (layer + 1) % int(config.expert_interval) == 0
    return bool(eval(config.moe_layer_freq)[layer])


def write_weights(folder: Path, options: Options, weights: Weights) -> Path:
    """Writes the folder of weights that docs/checkpoints/conversion.md describes."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = complete(options)
    fixed = {name: getattr(config, name) for name in FIXED}
    fixed |= {"num_experts": [config.num_experts]}
    if config.num_query_groups is not None:
        fixed["num_query_groups"] = config.num_query_groups
    parts = {name: ["query", "key", "value"] for name in weights if ".qkv." in name}
    if config.activation.endswith("glu"):
        parts |= {name: ["gate", "up"] for name in weights if ".fc_in." in name}
    settings = {
        "format_version": 1,
        "fixed": fixed,
        "defaults": {"seq_length": config.seq_length},
        "tokenizer": {},
        "special_ids": {},
        "model_type": None,
        "may_have_padding": False,
        "parts": parts,
    }
    (folder / "weights.json").write_text(json.dumps(settings))
    files = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        files[path.name] = {"bytes": len(content), "sha256": digest}
    empty = "0" * 64
    manifest = json.dumps({"format_version": 4, "sha256": empty, "files": files})
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    (folder / "manifest.json").write_text(manifest.replace(empty, digest, 1))
    return folder


@dataclass
class Loss:
    """The loss of a micro-batch."""

    total: Tensor
    """Sum over the counted tokens."""
    z_total: Tensor
    """Sum of their z-losses, with the coefficient."""
    tokens: int
    auxiliary: Tensor
    """With the coefficients."""
    gap: float
    """Smallest difference of two scores that decides which experts a token has."""
    dropped: int
    """Assignments beyond the capacity of an expert."""
    assignments: int
    """Of tokens to experts, over all layers."""
    further: list[tuple[Tensor, int]]
    """Sum over the counted tokens, and their number, for each further token that is predicted."""


@dataclass
class Experts:
    """The layers of experts in one forward pass."""

    config: Any
    weights: Weights
    auxiliary: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    gap: float = math.inf
    dropped: int = 0
    assignments: int = 0
    earlier: dict[str, list[Tensor]] = field(default_factory=dict)
    """Loads of the step's earlier micro-batches, where the global batch is balanced."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Assignments of the last micro-batch by layer."""

    def __call__(self, x_BSH: Tensor, name: str) -> Tensor:
        """The capacity is that of the tokens in Megatron's order, [S, B]."""
        config = self.config
        w = self.weights
        x = x_BSH.transpose(0, 1).flatten(0, 1)
        logits = x @ w[f"{name}.router.weight"].double().T
        if config.moe_router_bias:
            logits = logits + w[f"{name}.router.bias"].double()
        count = config.num_experts
        kept = config.moe_router_topk
        is_sigmoid = config.moe_router_score_function == "sigmoid"
        is_probability = is_sigmoid or kept == 1 or config.moe_router_pre_softmax
        probabilities = 1 / (1 + (-logits).exp()) if is_sigmoid else logits.softmax(-1)
        scores = probabilities if is_probability else logits
        bias = w.get(f"{name}.router.expert_bias", torch.zeros(count)).double()
        ranked = self._allowed(scores.detach() + bias).sort(dim=-1, descending=True)
        experts_TK = ranked.indices[:, :kept]
        self.assignments += experts_TK.numel()
        self.counts[name] = experts_TK.flatten().bincount(minlength=count)
        self._note(-ranked.values.diff()[:, kept - 1 : kept].flatten())
        weights = scores.gather(1, experts_TK)
        # The softmax over one score would be 1 and have no gradient.
        if not is_probability:
            weights = weights.softmax(-1)
        elif is_sigmoid and kept > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * (config.moe_router_topk_scaling_factor or 1.0)
        if is_sigmoid:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        balance = self._balance(probabilities, len(x_BSH), name)
        z_loss = logits.logsumexp(-1).square().mean()
        self.auxiliary = self.auxiliary + config.moe_aux_loss_coeff * balance
        self.auxiliary = self.auxiliary + config.moe_z_loss_coeff * z_loss

        shared = self._shared(x, name)
        x = self._linear(x, f"{name}.latent_in") if config.moe_latent_size else x
        out = torch.zeros_like(x)
        for expert in range(count):
            tokens, choices = (experts_TK == expert).nonzero(as_tuple=True)
            accepted = self._accepted(weights[tokens, choices].detach(), len(x))
            tokens = tokens[accepted]
            choices = choices[accepted]
            hidden = self._linear(x[tokens], f"{name}.experts.fc_in", expert)
            y = self._linear(self._activate(hidden), f"{name}.experts.fc_out", expert)
            out = out.index_add(0, tokens, y * weights[tokens, choices].unsqueeze(-1))
        out = self._linear(out, f"{name}.latent_out") if config.moe_latent_size else out
        return (out + shared).view(x_BSH.shape[1], x_BSH.shape[0], -1).transpose(0, 1)

    def _allowed(self, scores: Tensor) -> Tensor:
        """The scores of the experts in each token's best groups; of others, minus infinity."""
        config = self.config
        if config.moe_router_num_groups is None:
            return scores
        size = config.num_experts // config.moe_router_num_groups
        share = config.moe_router_topk // config.moe_router_group_topk
        rows = []
        for row in scores.tolist():
            groups = [row[start : start + size] for start in range(0, len(row), size)]
            sums = [sum(sorted(group)[-share:]) for group in groups]
            best = sorted(sums, reverse=True)
            self._note(torch.tensor(best[config.moe_router_group_topk - 1 :][:2]).diff().neg())
            least = best[config.moe_router_group_topk - 1]
            hidden = [-math.inf] * size
            kept = [group if sums[n] >= least else hidden for n, group in enumerate(groups)]
            rows.append([score for group in kept for score in group])
        return torch.tensor(rows, dtype=scores.dtype)

    def _balance(self, probabilities: Tensor, sequences: int, name: str) -> Tensor:
        """The auxiliary loss; the best experts of the probabilities alone count."""
        config = self.config
        count = config.num_experts
        kept = config.moe_router_topk
        if config.moe_router_load_balancing_type == "seq_aux_loss":
            parts = [probabilities[number::sequences] for number in range(sequences)]
        else:
            parts = [probabilities]
        losses = []
        for part in parts:
            best = part.sort(dim=-1, descending=True).indices[:, :kept]
            load = torch.stack([(best == expert).sum() for expert in range(count)]) / best.numel()
            if config.moe_router_load_balancing_type == "global_aux_loss":
                self.earlier.setdefault(name, []).append(load)
                load = torch.stack(self.earlier[name]).mean(0)
            losses.append(count * (load * part.mean(0)).sum())
        return torch.stack(losses).mean()

    def _shared(self, x: Tensor, name: str) -> Tensor:
        if not self.config.moe_shared_expert_intermediate_size:
            return torch.zeros_like(x)
        inner = self._activate(self._linear(x, f"{name}.shared.fc_in"))
        y = self._linear(inner, f"{name}.shared.fc_out")
        if self.config.moe_shared_expert_gate:
            y = y * torch.sigmoid(x @ self.weights[f"{name}.shared_gate.weight"].double().T)
        return y

    def _accepted(self, weights: Tensor, tokens: int) -> Tensor:
        """Which of an expert's tokens it accepts, in their order."""
        config = self.config
        places = torch.arange(len(weights))
        factor = config.moe_expert_capacity_factor
        if factor is None or not config.moe_token_dropping:
            return places
        equal = tokens * config.moe_router_topk / config.num_experts
        capacity = max(config.moe_min_capacity, math.ceil(factor * equal))
        self.dropped += max(0, len(weights) - capacity)
        if config.moe_token_drop_policy == "position":
            return places[:capacity]
        ranked = weights.sort(descending=True)
        self._note(-ranked.values.diff()[capacity - 1 : capacity])
        return ranked.indices[:capacity].sort().values

    def _note(self, gaps: Tensor) -> None:
        self.gap = min([self.gap, *gaps.tolist()])

    def _linear(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        index = ... if expert is None else expert
        y = x @ self.weights[f"{name}.weight"][index].double().T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias[index].double()

    def _activate(self, x: Tensor) -> Tensor:
        if not self.config.activation.endswith("glu"):
            return activate(x, self.config)
        return gated(x, self.config)


def loss_of(
    options: Options,
    weights: Weights,
    samples: Tensor,
    drop: Callable[[Tensor, str], Tensor] = no_dropout,
) -> Loss:
    """The loss of a micro-batch of samples [B, S + 1]."""
    config = complete(options)
    eod = options["vocab_size"] - 1
    tokens = samples[:, :-1]
    labels = samples[:, 1:]
    ends = tokens == eod
    # A document begins after the end of another one, which belongs to the document that it ends.
    documents = pad(ends.cumsum(1), (1, -1))
    starts = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.bool), ends[:, :-1]], dim=1)
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    positions = places - torch.where(starts, places, 0).cummax(1).values
    experts = Experts(config, weights)
    logits, *others = dense_predictions(
        config,
        weights,
        tokens,
        documents_BS=documents if config.reset_attention_mask else None,
        positions_BS=positions if config.reset_position_ids else None,
        drop=drop,
        experts=experts,
    )
    losses = cross_entropies(logits, labels)
    counted = ~ends if config.eod_mask_loss else torch.ones_like(ends)
    total = (losses * counted).sum()
    z_total = config.z_loss_coeff * (logits.logsumexp(-1).square() * counted).sum()
    routing = experts.auxiliary, experts.gap, experts.dropped, experts.assignments
    further = []
    ends_at = documents if config.reset_attention_mask else None
    mask = counted.long()
    for ahead in others:
        labels = rolled(labels, ends_at)
        mask = rolled(mask, ends_at)
        further.append(((cross_entropies(ahead, labels) * mask).sum(), int(mask.sum())))
    return Loss(total, z_total, int(counted.sum()), *routing, further)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each label."""
    return logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
