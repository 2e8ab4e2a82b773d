"""A dense forward pass of the GPT in fp64, from its options and its canonical weights.

Imports nothing of the package: formulas are written out, and attention computes every score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def no_dropout(x: Tensor, place: str) -> Tensor:
    return x


def dense_logits(
    config: Any, weights: Mapping[str, Tensor], tokens_BS: Tensor, **options: Any
) -> Tensor:
    """Logits [B, S, vocabulary] of the next token; see `dense_predictions`."""
    return dense_predictions(config, weights, tokens_BS, **options)[0]


def dense_predictions(
    config: Any,
    weights: Mapping[str, Tensor],
    tokens_BS: Tensor,
    *,
    documents_BS: Tensor | None = None,
    positions_BS: Tensor | None = None,
    drop: Callable[[Tensor, str], Tensor] = no_dropout,
    experts: Callable[[Tensor, str], Tensor] | None = None,
) -> list[Tensor]:
    """Logits [B, S, vocabulary] of the next token, and of each further one that is predicted.

    Args:
        config: Has the options of the model as attributes.
        weights: Full tensors by canonical name; gradients flow to them.
        tokens_BS: Inputs.
        documents_BS: Numbers of the tokens' documents, which attention does not leave. None: one.
        positions_BS: Positions of the tokens. None: those in the sample.
        drop: Called with each tensor to which dropout applies, and the name of the place.
        experts: The feed-forward layer of a given name, where it has a router: [B, S, H] to same.
    """
    w = {name: value.double() for name, value in weights.items()}
    length = tokens_BS.shape[1]
    heads = config.num_attention_heads
    groups = config.num_query_groups or heads
    size = config.kv_channels or config.hidden_size // heads
    places = torch.arange(length)
    distance = (places.unsqueeze(1) - places).double()
    hidden_BSS = (distance < 0).unsqueeze(0)
    left = config.window_size
    skipped = config.window_attn_skip_freq
    too_far = distance > (length if left is None else int(left.split(",")[0]))
    if documents_BS is not None:
        hidden_BSS = hidden_BSS | (documents_BS.unsqueeze(1) != documents_BS.unsqueeze(2))
    if positions_BS is None:
        positions_BS = places.unsqueeze(0)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rms(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()

    def norm(x: Tensor, name: str) -> Tensor:
        if config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        gain = w[f"{name}.weight"] + (1.0 if config.apply_layernorm_1p else 0.0)
        return rms(x) * gain + w.get(f"{name}.bias", 0.0)

    def rotate(x: Tensor, layer: int) -> Tensor:
        """[B, S, D], its first part as complex numbers: of both halves, or of neighbors."""
        rates, factor = rope_rates(config, layer)
        count = 2 * len(rates)
        angles = positions_BS.double().unsqueeze(-1) * torch.tensor(rates, dtype=torch.double)
        turn = torch.polar(torch.full_like(angles, factor), angles)
        if config.rotary_interleaved or config.multi_latent_attention:
            turned = torch.complex(x[..., 0:count:2], x[..., 1:count:2]) * turn
            rotated = torch.view_as_real(turned).flatten(-2)
        else:
            turned = torch.complex(x[..., : count // 2], x[..., count // 2 : count]) * turn
            rotated = torch.cat([turned.real, turned.imag], dim=-1)
        return torch.cat([rotated, x[..., count:]], dim=-1)

    def causal(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden_BSS, -math.inf).softmax(-1)

    def latent_attention(x: Tensor, name: str) -> Tensor:
        """Of DeepSeek-V2 and V3; a pair of rotated features are neighbours."""

        def latent(part: str) -> Tensor:
            down = linear(x, f"{name}.{part}_down")[..., : w[f"{name}.{part}_up.weight"].shape[1]]
            return norm(down, f"{name}.{part}_norm") if config.qk_layernorm else down

        def turned(part: Tensor) -> Tensor:
            return rotate(part, min(int(name.split(".")[1]), config.num_layers - 1))

        has_latent = config.q_lora_rank is not None
        q = linear(latent("q"), f"{name}.q_up") if has_latent else linear(x, f"{name}.q")
        shared_k = turned(linear(x, f"{name}.kv_down")[..., -config.qk_pos_emb_head_dim :])
        kv = linear(latent("kv"), f"{name}.kv_up")
        plain = config.qk_head_dim
        outputs = []
        scale = config.softmax_scale or (plain + config.qk_pos_emb_head_dim) ** -0.5
        if config.position_embedding_type == "yarn":
            growth = math.log(config.rotary_scaling_factor)
            scale *= (1 + 0.1 * config.mscale_all_dim * growth) ** 2
        for head, (one_q, one_kv) in enumerate(
            zip(q.chunk(heads, -1), kv.chunk(heads, -1), strict=True)
        ):
            scores = one_q[..., :plain] @ one_kv[..., :plain].transpose(1, 2)
            scores = scores + turned(one_q[..., plain:]) @ shared_k.transpose(1, 2)
            kept = drop(causal(scores * scale), f"{name}.{head}")
            outputs.append(kept @ one_kv[..., plain:])
        return linear(torch.cat(outputs, dim=-1), f"{name}.proj")

    def attention(x: Tensor, name: str) -> Tensor:
        if config.multi_latent_attention:
            return latent_attention(x, name)
        number = min(int(name.split(".")[1]) + 1, config.num_layers)
        is_full = skipped is not None and number % int(skipped) == 0
        hidden = hidden_BSS if is_full else hidden_BSS | too_far
        sizes = [heads * size, groups * size, groups * size]
        projected = linear(x, f"{name}.qkv")
        q, k, v, gate = projected.split([*sizes, projected.shape[-1] - sum(sizes)], -1)
        is_one_norm = config.qk_layernorm and config.qk_layernorm_scope == "all-heads"
        if is_one_norm:
            q = norm(q, f"{name}.q_norm")
            k = norm(k, f"{name}.k_norm")
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            one_q = q[..., head * size : (head + 1) * size]
            one_k, one_v = (part[..., group * size : (group + 1) * size] for part in (k, v))
            if config.qk_l2_norm:
                one_q = rms(one_q)
                one_k = rms(one_k)
            if config.qk_layernorm and not is_one_norm:
                one_q = norm(one_q, f"{name}.q_norm")
                one_k = norm(one_k, f"{name}.k_norm")
            has_rope = config.position_embedding_type in ("rope", "yarn")
            if has_rope and not is_chosen(config.no_rope_freq, number):
                one_q = rotate(one_q, number - 1)
                one_k = rotate(one_k, number - 1)
            scores = one_q @ one_k.transpose(1, 2) * (config.softmax_scale or 1 / math.sqrt(size))
            if (cap := config.attn_logit_softcapping) is not None:
                scores = cap * torch.tanh(scores / cap)
            if config.position_embedding_type == "alibi":
                assert heads & (heads - 1) == 0
                scores = scores - 2.0 ** (-8.0 * (head + 1) / heads) * distance
            powers = scores.masked_fill(hidden, -math.inf).exp()
            total = powers.sum(-1, keepdim=True)
            if config.softmax_type != "vanilla":
                total = total + (w[f"{name}.sinks"][head].exp() if f"{name}.sinks" in w else 1.0)
            kept = drop(powers / total, f"{name}.{head}")
            outputs.append(kept @ one_v)
            if gate.shape[-1]:
                outputs[-1] = outputs[-1] * torch.sigmoid(gate.chunk(heads, -1)[head])
        return linear(torch.cat(outputs, dim=-1), f"{name}.proj")

    def mlp(x: Tensor, name: str) -> Tensor:
        if f"{name}.router.weight" in w:
            assert experts is not None
            return experts(x, name)
        x = linear(x, f"{name}.fc_in")
        if not config.activation.endswith("glu"):
            return linear(activate(x, config), f"{name}.fc_out")
        return linear(gated(x, config), f"{name}.fc_out")

    def embed(tokens_BS: Tensor, positions_BS: Tensor, place: str) -> Tensor:
        x = w["embedding.word.weight"][tokens_BS]
        if config.embed_layernorm:
            x = norm(x, "embedding.norm")
        if config.position_embedding_type == "learned_absolute":
            x = x + w["embedding.position.weight"][positions_BS]
        return drop(x * config.embedding_multiplier, place)

    def branch(read: Tensor, name: str) -> Tensor:
        """What attention or the MLP adds, of what it reads."""
        y = (attention if name.endswith("attention") else mlp)(read, name)
        if config.norm_position in ("both", "reordered"):
            y = norm(y, f"{name}_post_norm")
        return drop(config.residual_multiplier * y, name)

    def run(x: Tensor, layer: int) -> Tensor:
        first = f"layers.{layer}.attention"
        second = f"layers.{layer}.mlp"
        if config.parallel_residual is not None:
            one = norm(x, f"{first}_norm")
            other = one if config.parallel_residual == "shared" else norm(x, f"{second}_norm")
            return x + branch(one, first) + branch(other, second)
        for name in (first, second):
            match config.norm_position:
                case "before" if config.apply_residual_connection_post_layernorm:
                    read = norm(x, f"{name}_norm")
                    x = read + branch(read, name)
                case "before" | "both":
                    x = x + branch(norm(x, f"{name}_norm"), name)
                case "reordered":
                    x = x + branch(x, name)
                case "after":
                    x = norm(x + branch(x, name), f"{name}_post_norm")
        return x

    def output(x: Tensor) -> Tensor:
        head = "head" if config.untie_embeddings_and_output_weights else "embedding.word"
        logits = config.logits_multiplier * (x @ w[f"{head}.weight"][: config.vocab_size].T)
        if config.output_layer_bias:
            logits = logits + w["head.bias"][: config.vocab_size]
        cap = config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    x = embed(tokens_BS, positions_BS, "embedding")
    for layer in range(config.num_layers):
        x = run(x, layer)
    x = norm(x, "final_norm")
    logits = [output(x)]
    ahead_BS = positions_BS.expand_as(tokens_BS)  # of the embedding; rotations are of the places
    for depth in range(config.mtp_num_layers):
        # Beyond the end, where no loss counts, token 0 follows; a router sees it.
        tokens_BS, ahead_BS = (rolled(values, documents_BS) for values in (tokens_BS, ahead_BS))
        name = f"predictions.{depth}"
        embedded = norm(embed(tokens_BS, ahead_BS, name), f"{name}.embedding_norm")
        both = torch.cat([embedded, norm(x, f"{name}.hidden_norm")], dim=-1)
        x = run(linear(both, f"{name}.projection"), config.num_layers + depth)
        x = norm(x, f"{name}.output_norm")
        logits.append(output(x))
    return logits


def rolled(values_BS: Tensor, documents_BS: Tensor | None) -> Tensor:
    """The value of the next token, 0 after the last one of a sample or document."""
    rows = []
    documents = torch.zeros_like(values_BS) if documents_BS is None else documents_BS
    for row, numbers in zip(values_BS.tolist(), documents.tolist(), strict=True):
        pairs = zip(row[1:], numbers, numbers[1:], strict=False)
        rows.append([*(value if own == after else 0 for value, own, after in pairs), 0])
    return torch.tensor(rows, dtype=values_BS.dtype)


def gated(x: Tensor, config: Any) -> Tensor:
    """The gated activation of [gate; up]."""
    gate, up = x.chunk(2, dim=-1)
    limit = config.activation_func_clamp_value
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return activate(gate, config) * (up + config.glu_linear_offset)


def is_chosen(pattern: str, number: int) -> bool:
    """Whether a pattern, N or a list of 0 and 1, has a layer, counted from 1."""
    if pattern.isdecimal():
        return pattern != "0" and number % int(pattern) == 0
    return bool(json.loads(pattern)[number - 1])


def rope_rates(config: Any, layer: int) -> tuple[list[float], float]:
    """Angle per position of each pair of a layer's dimensions, and the factor of both."""
    size = config.kv_channels or config.hidden_size // config.num_attention_heads
    size = config.qk_pos_emb_head_dim if config.multi_latent_attention else size
    half = int(size * config.rotary_percent) // 2
    scaled = []
    base = (*config.rotary_base_per_layer, *[config.rotary_base] * config.num_layers)[layer]
    if not is_chosen(config.rope_scaling_layers, layer + 1):
        return [base ** (-pair / half) for pair in range(half)], 1.0
    if config.rope_ntk_factor is not None:
        ratio = max(1.0, config.seq_length / config.max_position_embeddings)
        grown = config.rope_ntk_factor * ratio - (config.rope_ntk_factor - 1)
        base *= grown ** (2 * half / (2 * half - 2))
    is_yarn = config.position_embedding_type == "yarn"
    factor = config.rotary_scaling_factor if is_yarn else config.rope_scaling_factor
    first = 0.0
    last = 0.0
    if is_yarn:

        def pair_of(rotations: float) -> float:
            wavelength = config.yarn_original_max_position_embeddings / rotations
            return half * math.log(wavelength / (2 * math.pi), base)

        first = pair_of(config.yarn_beta_fast)
        last = pair_of(config.yarn_beta_slow)
        if config.yarn_correction_range_round_to_int:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, 2 * half - 1)
    for pair in range(half):
        rate = base ** (-pair / half)
        slow = 1.0
        rotations = 8192 * rate / (2 * math.pi)
        if is_yarn:
            slow = min(1.0, max(0.0, (pair - first) / (last - first)))
        elif config.use_rope_scaling:
            slow = 0.0 if rotations > 4 else 1.0 if rotations < 1 else (4 - rotations) / 3
        else:
            factor = config.rotary_seq_len_interpolation_factor
        scaled.append((1 - slow) * rate + slow * rate / factor)
    scales = [0.1 * each * math.log(factor) + 1 for each in (config.mscale, config.mscale_all_dim)]
    return scaled, scales[0] / scales[1] if is_yarn else 1.0


def activate(x: Tensor, config: Any) -> Tensor:
    """The activation function of the MLP, for a gated one that of the gate."""
    exact = x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    approximate = x * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    # Megatron's fused kernel of bias and gelu is the approximate one.
    gelu = config.gelu_approximation or ("tanh" if config.add_bias_linear else "none")
    return {
        "gelu": exact if gelu == "none" else approximate,
        "openai-gelu": approximate,
        "squared-relu": x.clamp(min=0.0) ** 2,
        "swiglu": x / (1.0 + torch.exp(-x)),
        "geglu": approximate if config.gelu_approximation == "tanh" else exact,
        "quick-geglu": x / (1.0 + torch.exp(-1.702 * x)),
        "reglu": x.clamp(min=0.0),
        "liglu": x,
    }[config.activation]
