"""gpt-neox: sizes, biases, initial weights, schedules and layers that follow from several keys.

Facts are from megatron/model and megatron/learning_rates.py of commit ea7aefd8 (2026-05-19). Knows
no torch.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_ds.cli.doctor.trainers.settings import Settings, text_of

EXTRA = "deepspeed_extra_args."
ATTENTION = ("global", "flash")
"""Types of `attention_config` that compute ordinary causal attention."""
OLD_MULTIPLE = 256
"""Multiple to which old releases rounded the MLP's size, before `mlp_multiple_of` (default 1)
existed."""
GATED = {"swiglu": "swiglu", "geglu": "geglu", "reglu": "reglu", "bilinear": "liglu"}
"""Gated activations, with their names here."""


def prepare(settings: Settings) -> None:
    """Translates the keys whose meaning depends on other keys."""
    for key in [key for key in settings.values if key.startswith(EXTRA)]:  # DeepSpeed's keys
        settings.values.setdefault(key.removeprefix(EXTRA), settings.take(key))
    _feed_forward(settings)
    _biases(settings)
    _initial_weights(settings)
    _schedule(settings)
    _attention(settings)
    _residual(settings)
    _experts(settings)
    _blend(settings)
    _gradients(settings)
    _transfer(settings)
    decay = settings.number("weight_decay", keeps=True)
    if settings.get("optimizer.type") == "cpu_torch_adam" and decay:
        settings.differences.append(
            f"optimizer cpu_torch_adam: torch.optim.Adam adds weight_decay {decay:g} to the "
            "gradients there; here it is decoupled, as AdamW has it"
        )


def feed_forward_size(width: int, multiple: int, *, gated: bool) -> tuple[int, int]:
    """Sizes of the MLP's hidden layer: of the first matrix (a half of a gated one), of the second.

    The width is divided by 3/2 for a gated activation, and its half is rounded up (`ParallelMLP`).
    """
    both = int(width * 2 / 3) if gated else width
    inner = both // 2 if gated else both
    outer = 2 * multiple * -(-both // (2 * multiple))
    return (outer // 2 if gated else outer), multiple * -(-inner // multiple)


def _feed_forward(settings: Settings) -> None:
    name = str(settings.take("activation", "gelu"))
    is_fused = settings.take("bias_gelu_fusion", False)
    hidden = settings.number("hidden_size", keeps=True)
    width = settings.number("intermediate_size")
    factor = settings.number("expansion_factor")
    if settings.take("mlp_type") == "llama":  # until September 2024
        name = {"silu": "swiglu", "gelu": "geglu"}.get(name, f"{name} with mlp_type llama")
        if hidden:
            size = width or OLD_MULTIPLE * -(-int(8 * hidden / 3) // OLD_MULTIPLE)
            settings.add("ffn-hidden-size", size)
    elif hidden:
        width = width or (int(factor * hidden) if factor else 4 * hidden)
        _ffn_hidden_size(settings, width, gated=name in GATED or name == "glu")
    if name == "gelu":
        approximation = "tanh" if is_fused else "none"
        settings.flags += ["--activation", "gelu", "--gelu-approximation", approximation]
    elif name in GATED:
        exact = ["--gelu-approximation", "none"] if name == "geglu" else []
        settings.flags += ["--activation", GATED[name], *exact]
    else:
        supported = ", ".join(("gelu", *GATED))
        settings.lacking.append(f"activation {name}: supported: {supported}")


def _ffn_hidden_size(settings: Settings, width: int, *, gated: bool) -> None:
    is_given = "mlp_multiple_of" in settings.given
    multiple = settings.number("mlp_multiple_of", 1)
    outer, inner = feed_forward_size(width, multiple, gated=gated)
    settings.add("ffn-hidden-size", inner)
    if outer != inner:
        settings.lacking.append(
            f"intermediate size {width}: gpt-neox's matrices of {outer} and {inner} do not fit "
            "each other; they do with mlp_multiple_of 256"
        )
    _, older = feed_forward_size(width, OLD_MULTIPLE, gated=gated)
    if not is_given and older != inner:
        settings.differences.append(
            f"mlp_multiple_of is not given: 1 since 2024-09, an MLP of {inner} (written below); "
            f"with multiples of {OLD_MULTIPLE}, as before, --ffn-hidden-size {older}"
        )


def _biases(settings: Settings) -> None:
    in_mlp = settings.take("use_bias_in_mlp", True)
    in_attention = settings.take("use_bias_in_attn_linear", True)
    in_norms = settings.take("use_bias_in_norms", True)
    if not in_mlp:
        settings.add("disable-bias-linear")
        if in_attention:
            settings.add("add-qkv-bias")
            settings.lacking.append(
                "use_bias_in_mlp False with a bias in attention: without biases in the MLP, the "
                "output of attention has none here; set use_bias_in_attn_linear to False, too"
            )
    elif not in_attention:
        settings.add("disable-attention-bias")
    if not in_norms and "rmsnorm" not in str(settings.get("norm", "layernorm")):
        settings.lacking.append(
            "use_bias_in_norms False: LayerNorm always has a bias here; RMSNorm has none"
        )


def _initial_weights(settings: Settings) -> None:
    name = str(settings.take("init_method", "normal"))
    last = str(settings.take("output_layer_init_method", "scaled_normal"))
    layers, hidden = (settings.number(key, keeps=True) for key in ("num_layers", "hidden_size"))
    normal = settings.number("init_method_std", 0.02, keeps=True)
    sizes = {"normal": normal, "scaled_normal": math.nan, "wang_init": math.nan}
    if layers and hidden:
        sizes |= {
            "small_init": math.sqrt(2 / (5 * hidden)),
            "wang_init": 2 / (layers * math.sqrt(hidden)),
            "scaled_normal": normal / math.sqrt(2 * layers),
            "single_residual_scaled_normal": normal / math.sqrt(layers),
        }
    std = sizes.get(name)
    residual = sizes.get(last)
    if name == "xavier_uniform":
        settings.add("init-method-xavier-uniform")
    elif std is None or math.isnan(std):
        settings.lacking.append(
            f"init_method {name}: the initial weights are normal here, with --init-method-std"
        )
    elif name != "normal":
        settings.take("init_method_std")
        settings.add("init-method-std", std)
    if not (layers and hidden) or std is None:
        return
    ours = std / math.sqrt(2 * layers)
    if residual is None or not math.isclose(ours, residual):
        theirs = f"std {residual:.4g}" if residual is not None else last
        settings.differences.append(
            f"output_layer_init_method {last}: initial weights before the residual connections "
            f"have {theirs} there; here --init-method-std / sqrt(2 x layers) = {ours:.4g}"
        )


def _schedule(settings: Settings) -> None:
    """The learning rate: `AnnealingLR` in megatron/learning_rates.py, and its callers."""
    style = str(settings.take("lr_decay_style", "linear")).lower()
    peak = settings.number("optimizer.params.lr", 0.001, keeps=True)
    least = settings.number("min_lr", 0.0)
    warmup = settings.number("warmup", 0.01)
    steps = settings.number("train_iters", keeps=True)
    fraction = settings.number("lr_decay_fraction")
    decay = settings.number("lr_decay_iters")
    if decay is None and fraction is not None and steps:
        decay = max(1, math.floor(steps * fraction))
    elif decay is None and fraction is not None:
        settings.lacking.append(
            f"lr_decay_fraction {fraction}: set --lr-decay-iters to this part of --train-iters"
        )
    if decay is not None:
        settings.add("lr-decay-iters", decay)
    end = decay or steps
    settings.add("lr-warmup-fraction", warmup)
    if style == "linear" and least > 0 and end:
        _linear_to_zero(settings, end, warmup, least / peak)
        return
    if style not in ("linear", "cosine", "constant"):
        settings.lacking.append(
            f"lr_decay_style {style}: max x 0.5^p; --lr-decay-style linear, cosine, WSD and "
            "power are the closest"
        )
        return
    settings.add("lr-decay-style", style)
    settings.add("min-lr", least)
    if style == "cosine":
        settings.differences.append(
            "lr_decay_style cosine: since 2023-08 as here, from the end of the warmup to min_lr "
            "at the end of the decay; before (Pythia), max x (1 + cos(pi x k / iterations)) / 2 "
            "with k counted from the end of the warmup, and min_lr as a lower bound"
        )
    if decay is not None and steps and decay < steps and style == "cosine":
        settings.differences.append(
            f"lr_decay_iters {decay} below train_iters {steps}: the cosine rises again after its "
            "end there; here the rate stays at --min-lr"
        )
    if style == "linear" and least > 0:
        settings.differences.append(
            f"min_lr {least:g}: the decay is linear to 0 there, and min_lr a lower bound; here "
            "it is linear to --min-lr"
        )


def _linear_to_zero(settings: Settings, end: int, warmup: float, bound: float) -> None:
    """A linear decay to 0 that stops at a lower bound, as points of a piecewise schedule."""
    start = warmup * end
    first = math.ceil(start)

    def factor(step: int) -> float:
        return min(1.0, max(bound, (end - step) / (end - start)))

    last = max(first, math.floor(end - bound * (end - start)))
    points = dict.fromkeys((first, last, last + 1))
    settings.add("lr-decay-style", "piecewise")
    settings.add("lr-decay-points", *(f"{step}:{factor(step):.10g}" for step in points))
    settings.differences.append(
        "lr_decay_style linear with min_lr: linear to 0 with min_lr as a lower bound, which the "
        "piecewise schedule is; before 2023-09, the decay ended the warmup's length later"
    )


def _attention(settings: Settings) -> None:
    entries: Any = settings.take("attention_config", [])
    types = {name for entry in entries for name in _flat(entry[:1] if _is_run(entry) else entry)}
    if foreign := sorted(types - set(ATTENTION)):
        settings.lacking.append(
            f"attention_config with {', '.join(foreign)}: layers are those of a GPT with causal "
            f"attention ({', '.join(ATTENTION)}); another model has no counterpart"
        )
    width = settings.number("sliding_window_width")
    if width is not None:
        settings.add("window-size", f"{width},0")
        settings.differences.append(
            f"sliding_window_width {width}: gpt-neox's kernels attend to {width} tokens before a "
            "token, which the command does; models that count the token itself (Mistral) have "
            f"--window-size {width - 1},0"
        )


def _is_run(entry: object) -> bool:
    """Whether an entry of `attention_config` is a list of types and a number of repetitions."""
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)


def _flat(entry: object) -> list[str]:
    if isinstance(entry, list):
        return [name for part in entry for name in _flat(part)]
    return [str(entry)]


def _residual(settings: Settings) -> None:
    is_parallel = settings.take("gpt_j_residual")
    is_tied = settings.take("gpt_j_tied")
    if is_parallel:
        settings.add("parallel-residual", "shared" if is_tied else "separate")


def _experts(settings: Settings) -> None:
    experts = settings.number("moe_num_experts", 1)
    names = [key for key in settings.values if key.startswith(("moe_", "enable_expert_"))]
    router = settings.get("moe_router_type", "sinkhorn")
    for key in names:
        settings.take(key)
    if experts > 1:
        settings.lacking.append(
            f"moe_num_experts {experts}: gpt-neox routes by {router} without dropping tokens "
            "(dMoE); use --num-experts with --moe-router-load-balancing-type aux_loss, which is "
            "another router"
        )


def _blend(settings: Settings) -> None:
    for name in ("train", "valid", "test"):
        paths: Any = settings.take(f"{name}_data_paths", [])
        weights = settings.take(f"{name}_data_weights", [1.0] * len(paths))
        paths = [paths] if isinstance(paths, str) else paths
        if paths:
            pairs = zip(weights, paths, strict=False)
            words = [text_of(word) for pair in pairs for word in pair]
            settings.add(f"{name}-data-path", *(words if len(paths) > 1 else paths))


def _gradients(settings: Settings) -> None:
    power = settings.number("fp16.initial_scale_power")
    if power is not None and settings.get("fp16.enabled"):
        settings.add("initial-loss-scale", 2**power)
    accumulated = settings.take("data_types.grad_accum_dtype")
    is_bf16 = settings.get("precision") == "bfloat16" or any(
        settings.get(f"{name}.enabled") for name in ("bf16", "bfloat16")
    )
    if accumulated in ("bf16", "fp16"):
        settings.add("no-accumulate-allreduce-grads-in-fp32")
    elif is_bf16 and accumulated is None:
        settings.differences.append(
            "data_types.grad_accum_dtype is not given: gradients are accumulated in bf16 there; "
            "here in fp32 (--no-accumulate-allreduce-grads-in-fp32)"
        )


def _transfer(settings: Settings) -> None:
    """muP: `mup` in megatron/training.py, model/word_embeddings.py and model/init_functions.py.

    Layers are built while it is switched off, and read the switch then.
    """
    positions = settings.number("mup_rp_embedding_mult", 1.0)
    if positions != 1 and settings.get("pos_emb", "learned") in ("learned", "sinusoidal"):
        settings.lacking.append(
            f"mup_rp_embedding_mult {text_of(positions)}: the factor of learned positions, with "
            "use_mup and without; embeddings have one factor here, --embedding-multiplier"
        )
    if not settings.take("use_mup"):
        return
    settings.lacking.append(
        "use_mup True: gpt-neox switches muP on after its layers are built, so that scores, the "
        "factor of the embedding and the logits of an untied output layer are those without muP, "
        "and its schedule gives all weights one rate unless the mup package is changed; what was "
        "meant is --use-mup --mup-base-hidden-size WIDTH --mup-independent-weight-decay, with the "
        "width in base_shapes_file (docs/training/mup.md)"
    )
    embedding = settings.number("mup_embedding_mult", 1.0)
    if embedding != 1:
        factor = text_of(embedding)
        settings.lacking.append(
            f"mup_embedding_mult {factor}: use --mup-embedding-mult {factor} with --use-mup"
        )
    scale = settings.number("mup_init_scale", 1.0)
    if scale != 1:
        settings.lacking.append(
            f"mup_init_scale {text_of(scale)}: multiply --init-method-std by it"
        )
    for key in ("mup_attn_temp", "mup_output_temp"):
        value = settings.number(key, 1.0)
        if value != 1:
            settings.differences.append(f"{key} {text_of(value)}: gpt-neox does not use it either")
    for key in ("save_base_shapes", "coord_check"):
        if settings.take(key):
            settings.lacking.append(
                f"{key} True: gpt-neox writes its file and ends without training; leave the key out"
            )
