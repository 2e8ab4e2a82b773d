"""nanotron: experts, schedule, windows and weight decay, which follow from several keys.

Facts are from config/, nn/moe.py, models/qwen.py and helpers.py of commit 2411b022 (2026-04-07).
Knows no torch.
"""

from __future__ import annotations

from typing import Any

from megatron_ds.cli.doctor.trainers.settings import Settings, decay_of_all

MODEL = "model.model_config."
EXPERTS = f"{MODEL}moe_config."
SCHEDULE = "optimizer.learning_rate_scheduler."
MODELS = ("is_llama_config", "is_qwen2_config")
"""Models that a GPT here can be."""
STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
EMBEDDING = ".*token_embedding.*"


def prepare(settings: Settings) -> None:
    """Translates the keys whose meaning depends on other keys."""
    _model(settings)
    _experts(settings)
    _window(settings)
    _schedule(settings)
    _weight_decay(settings)


def _model(settings: Settings) -> None:
    prefix = f"{MODEL}is_"
    keys = [key for key in settings.values if key.startswith(prefix) and key.endswith("_config")]
    marked = [key.removeprefix(MODEL) for key in keys if settings.take(key)]
    foreign = [name for name in marked if name not in MODELS]
    if foreign:
        settings.lacking.append(
            f"{', '.join(foreign)}: the model is another than Llama's and Qwen2's, with or "
            "without experts, and has no counterpart"
        )
    else:
        settings.add("normalization", "RMSNorm")
        settings.add("disable-bias-linear")
        settings.add("position-embedding-type", "rope")
        settings.flags += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    scaling = str(settings.take("model.init_method.scaling_method", "NUM_LAYERS")).upper()
    if scaling != "NUM_LAYERS":
        settings.differences.append(
            f"model.init_method.scaling_method {scaling}: initial weights before the residual "
            "connections are as large as all; here divided by sqrt(2 x layers)"
        )


def _experts(settings: Settings) -> None:
    """Experts: `MoEConfig`, of which an empty block has the defaults, and nn/moe.py."""
    block = settings.take(EXPERTS.removesuffix("."))
    if block is None and not any(
        key.startswith(EXPERTS) and value is not None for key, value in settings.values.items()
    ):
        return
    settings.add("num-experts", settings.number(f"{EXPERTS}num_experts", 8))
    settings.add("moe-router-topk", settings.number(f"{EXPERTS}top_k", 2))
    settings.add("moe-router-pre-softmax")
    width = settings.number(f"{EXPERTS}moe_intermediate_size", 1408)
    settings.add("moe-ffn-hidden-size", width)
    coefficient = settings.number(f"{EXPERTS}router_aux_loss_coef", 0.01)
    settings.add("moe-aux-loss-coeff", coefficient)
    if coefficient:
        settings.differences.append(
            f"{EXPERTS}router_aux_loss_coef {coefficient:g}: nothing in nanotron reads it "
            "(2026-04), there is no auxiliary loss; here --moe-aux-loss-coeff, of which 0 is none"
        )
    shared_width = settings.number(f"{EXPERTS}shared_expert_intermediate_size", 5632)
    if settings.take(f"{EXPERTS}enable_shared_expert"):
        settings.add("moe-shared-expert-intermediate-size", shared_width)
        settings.add("moe-shared-expert-gate")
    settings.take(f"{EXPERTS}token_dispatcher_type")
    layers: Any = settings.take(f"{EXPERTS}layers", [-1])
    count = settings.number(f"{MODEL}num_hidden_layers", 32, keeps=True)
    if layers != [-1] and isinstance(layers, list):
        pattern = ",".join(str(int(layer in layers)) for layer in range(count))
        settings.add("moe-layer-freq", f"[{pattern}]")


def _window(settings: Settings) -> None:
    """The window has `size` tokens with the token itself; layers without positions have none."""
    size = settings.number(f"{MODEL}sliding_window_size")
    step = settings.get(f"{MODEL}no_rope_layer")
    mask = str(settings.take(f"{MODEL}flex_attention_mask") or "")
    if size is not None:
        settings.add("window-size", f"{size - 1},0")
        if step:
            settings.add("window-attn-skip-freq", step)
    if "document" in mask:
        settings.add("reset-attention-mask")


def _schedule(settings: Settings) -> None:
    """The learning rate: `lr_scheduler_builder` in helpers.py."""
    rate = settings.number(f"{SCHEDULE}learning_rate", keeps=True)
    style = str(settings.take(f"{SCHEDULE}lr_decay_style", "linear"))
    warmup = settings.number(f"{SCHEDULE}lr_warmup_steps", 0, keeps=True)
    steps = settings.number("tokens.train_steps", keeps=True)
    start, length = (
        settings.number(f"{SCHEDULE}lr_decay_{key}") for key in ("starting_step", "steps")
    )
    least = settings.number(f"{SCHEDULE}min_decay_lr", rate)
    if style not in STYLES:
        settings.lacking.append(f"{SCHEDULE}lr_decay_style {style}: supported: {', '.join(STYLES)}")
        return
    if least is not None:
        settings.add("min-lr", float(least))
    if length is None and steps:
        length = steps - warmup  # the decay's start is not subtracted: `Config.__post_init__`
    first = warmup if start is None else start
    if start is not None and length:
        settings.add("lr-decay-style", "WSD")
        settings.add("lr-wsd-decay-style", STYLES[style])
        settings.add("lr-wsd-decay-iters", length)
    else:
        settings.add("lr-decay-style", STYLES[style])
    if length and steps and first + length != steps:
        settings.add("lr-decay-iters", first + length)


def _weight_decay(settings: Settings) -> None:
    """Norms and biases decay, too, unless a pattern excludes them."""
    decay = settings.number("optimizer.weight_decay", keeps=True)
    excluded: Any = settings.take("optimizer.weight_decay_exclude_named_params", [])
    if EMBEDDING in excluded:
        settings.add("embedding-weight-decay", 0)
    if others := [pattern for pattern in excluded if pattern != EMBEDDING]:
        settings.lacking.append(
            f"optimizer.weight_decay_exclude_named_params {', '.join(others)}: use --param-group "
            "'pattern=NAMES,wd=0', with the names of tools/inspect_checkpoint.py --tensors"
        )
    if decay and not others:
        has_biases = bool(settings.get(f"{MODEL}attention_bias"))
        decay_of_all(settings, float(decay), has_biases=has_biases)
