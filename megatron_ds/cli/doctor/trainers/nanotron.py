"""nanotron: experts, schedule, windows and weight decay, which follow from several keys.

Facts are those of config/, nn/moe.py, models/qwen.py and helpers.py of commit 2411b022
(2026-04-07). Knows no torch.
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
    keys = [key for key in settings.values if key.startswith(EXPERTS)]
    values = {key.removeprefix(EXPERTS): settings.take(key) for key in keys}
    if not any(value is not None for value in values.values()):
        return
    experts, width = values.pop("num_experts", None) or 8, values.pop("moe_intermediate_size", None)
    layers = values.pop("layers", None) or [-1]
    settings.add("num-experts", experts)
    settings.add("moe-router-topk", values.pop("top_k", None) or 2)
    settings.add("moe-router-pre-softmax")
    settings.add("moe-ffn-hidden-size", width or 1408)
    coefficient = values.pop("router_aux_loss_coef", None)
    coefficient = 0.01 if coefficient is None else float(coefficient)
    settings.add("moe-aux-loss-coeff", coefficient)
    if coefficient:
        settings.differences.append(
            f"{EXPERTS}router_aux_loss_coef {coefficient:g}: nothing in nanotron reads it "
            "(2026-04), there is no auxiliary loss; here --moe-aux-loss-coeff, of which 0 is none"
        )
    size = values.pop("shared_expert_intermediate_size", None)
    if values.pop("enable_shared_expert", None):
        settings.add("moe-shared-expert-intermediate-size", size or 5632)
        settings.add("moe-shared-expert-gate")
    count = settings.get(f"{MODEL}num_hidden_layers", 32)
    if layers != [-1]:
        pattern = ",".join(str(int(layer in layers)) for layer in range(int(count)))
        settings.add("moe-layer-freq", f"[{pattern}]")
    values.pop("token_dispatcher_type", None)
    for name, value in values.items():
        settings.values[f"{EXPERTS}{name}"] = value


def _window(settings: Settings) -> None:
    """The window has `size` tokens with the token itself; layers without positions have none."""
    size = settings.take(f"{MODEL}sliding_window_size")
    step = settings.get(f"{MODEL}no_rope_layer")
    mask = str(settings.take(f"{MODEL}flex_attention_mask") or "")
    if size is not None:
        settings.add("window-size", f"{int(size) - 1},0")
        if step:
            settings.add("window-attn-skip-freq", step)
    if "document" in mask:
        settings.add("reset-attention-mask")


def _schedule(settings: Settings) -> None:
    """The learning rate: `lr_scheduler_builder` in helpers.py."""
    rate = settings.get(f"{SCHEDULE}learning_rate")
    style = str(settings.take(f"{SCHEDULE}lr_decay_style", "linear"))
    warmup = int(settings.get(f"{SCHEDULE}lr_warmup_steps", 0))
    steps = settings.get("tokens.train_steps")
    start, length = (
        settings.take(f"{SCHEDULE}lr_decay_{key}") for key in ("starting_step", "steps")
    )
    least = settings.take(f"{SCHEDULE}min_decay_lr", rate)
    if style not in STYLES:
        settings.lacking.append(f"{SCHEDULE}lr_decay_style {style}: supported: {', '.join(STYLES)}")
        return
    if least is not None:
        settings.add("min-lr", float(least))
    if length is None and steps:
        length = int(steps) - warmup  # the decay's start is not subtracted: `Config.__post_init__`
    first = warmup if start is None else int(start)
    if start is not None and length:
        settings.add("lr-decay-style", "WSD")
        settings.add("lr-wsd-decay-style", STYLES[style])
        settings.add("lr-wsd-decay-iters", length)
    else:
        settings.add("lr-decay-style", STYLES[style])
    if length and steps and first + int(length) != int(steps):
        settings.add("lr-decay-iters", first + int(length))


def _weight_decay(settings: Settings) -> None:
    """Norms and biases decay, too, unless a pattern excludes them."""
    decay = settings.get("optimizer.weight_decay")
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
