"""Hugging Face's Trainer: fractions, schedules and what a model's config.json decides.

Facts are from transformers 5.23 (training_args.py, trainer.py, optimization.py). Knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ds.cli.doctor.trainers.settings import Settings, is_off, text_of

INTERVALS = {"save": "save-interval", "eval": "eval-interval", "logging": "log-interval"}
"""Intervals by what the keys `..._steps` and `..._strategy` begin with."""
KWARGS = "lr_scheduler_kwargs."
SHARDING = {"full_shard": 3, "shard_grad_op": 2}
"""ZeRO stages of the words of `fsdp`."""
WITHOUT_ROUTER_LOSS = ("deepseek_v2", "deepseek_v3", "glm4_moe")
"""Models with experts whose router has no auxiliary loss there."""
SCALED = ("gpt2",)
"""Models whose initial weights before the residual connections are divided by sqrt(2 x layers)."""


def prepare(settings: Settings) -> None:
    """Translates the keys whose meaning depends on other keys."""
    steps = settings.number("max_steps", -1, keeps=True)
    _length(settings, steps)
    _schedule(settings, steps)
    _intervals(settings, steps)
    _sharding(settings)
    _model(settings)


def _length(settings: Settings, steps: int) -> None:
    epochs = settings.take("num_train_epochs", 3.0)
    settings.take("max_steps")
    if steps > 0:
        settings.add("train-iters", steps)
    else:
        settings.lacking.append(
            f"num_train_epochs {text_of(epochs)}: set the number of steps, --train-iters, or "
            "--train-data-exact-num-epochs N"
        )


def _schedule(settings: Settings, steps: int) -> None:
    """The learning rate: `get_scheduler` in optimization.py."""
    name = str(settings.take("lr_scheduler_type", "linear"))
    warmup = settings.number("warmup_steps", 0)
    if ratio := settings.number("warmup_ratio"):
        warmup = warmup or ratio
        settings.differences.append(
            f"warmup_ratio {text_of(ratio)}: an argument of transformers 4; 5 has a fraction in "
            "warmup_steps"
        )
    if warmup >= 1:
        settings.add("lr-warmup-iters", int(warmup))
    elif warmup > 0:
        count = warmup * steps
        if steps > 0 and not math.isclose(count, round(count)):
            settings.add("lr-warmup-iters", math.ceil(count))
        else:
            settings.add("lr-warmup-fraction", warmup)
    rate = settings.number("learning_rate", 5e-5, keeps=True)
    settings.take("lr_scheduler_kwargs")
    least = settings.number(f"{KWARGS}min_lr")
    for key in ("min_lr_rate", "min_lr_ratio"):
        part = settings.number(f"{KWARGS}{key}")
        least = part * rate if least is None and part is not None else least
    if least is not None:
        settings.add("min-lr", float(least))
    arguments = [key for key in settings.values if key.startswith(KWARGS)]
    values = {key.removeprefix(KWARGS): settings.take(key) for key in arguments}
    if name in ("constant", "constant_with_warmup"):
        settings.add("lr-decay-style", "constant")
    elif name in ("linear", "cosine", "cosine_with_min_lr"):
        settings.add("lr-decay-style", name.partition("_")[0])
    elif name == "inverse_sqrt" and warmup > 0 and not values:
        settings.add("lr-decay-style", "inverse-square-root")
    elif name == "warmup_stable_decay":
        settings.add("lr-decay-style", "WSD")
        style = str(values.pop("decay_type", None) or "cosine")
        settings.add("lr-wsd-decay-style", style.replace("1-sqrt", "minus_sqrt"))
        settings.add("lr-wsd-decay-iters", values.pop("num_decay_steps", "{num_decay_steps}"))
        values.pop("num_stable_steps", None)
    else:
        settings.lacking.append(
            f"lr_scheduler_type {name}: supported: linear, cosine, cosine_with_min_lr, constant, "
            "constant_with_warmup, inverse_sqrt with a warmup, warmup_stable_decay"
        )
    for key, value in values.items():
        if not is_off(value):
            settings.lacking.append(f"{KWARGS}{key} {value}: only the default is supported")


def _intervals(settings: Settings, steps: int) -> None:
    """Numbers of steps, of which those below 1 are fractions of the run."""
    defaults = {"save": "steps", "eval": "no", "logging": "steps"}
    old = settings.take("evaluation_strategy")  # the name in transformers 4
    for name, flag in INTERVALS.items():
        strategy = str(settings.take(f"{name}_strategy", defaults[name]))
        strategy = str(old) if name == "eval" and old is not None else strategy
        fallback = settings.number("logging_steps", keeps=True) if name == "eval" else None
        value = settings.number(f"{name}_steps", 500 if fallback is None else fallback)
        if strategy == "steps" and value < 1 and steps <= 0:
            settings.differences.append(
                f"{name}_steps {value:g}: a fraction of the run; set --{flag} to this part of it"
            )
        elif strategy == "steps":
            settings.add(flag, math.ceil(value * steps) if value < 1 else int(value))
        elif strategy == "epoch":
            settings.differences.append(
                f"{name}_strategy epoch: at the end of each epoch; here --{flag} N"
            )
        elif name == "eval":
            settings.add("eval-iters", 0)


def _sharding(settings: Settings) -> None:
    """`fsdp`: true, or the words of transformers 4 as a text or a list."""
    value: Any = settings.take("fsdp")
    names = [key for key in settings.values if key.startswith("fsdp_config.")]
    options = {key.rpartition(".")[2].removeprefix("fsdp_"): settings.take(key) for key in names}
    file = settings.take("fsdp_config")
    if is_off(value) or str(value).lower() == "false":
        return
    words = value if isinstance(value, list) else str(value).replace(",", " ").split()
    words = ["full_shard" if word in (True, "True", "true") else str(word) for word in words]
    stages = [SHARDING[word] for word in words if word in SHARDING]
    stage = 2 if options.get("reshard_after_forward") is False else (stages or [3])[0]
    settings.add("zero-stage", stage)
    if "offload" in words or options.get("cpu_offload") or options.get("offload_params"):
        settings.add("cpu-optimizer")
    if options.get("activation_checkpointing"):
        settings.flags += ["--recompute-granularity", "full"]
    if foreign := [word for word in words if word not in (*SHARDING, "auto_wrap", "offload")]:
        supported = "true, full_shard, shard_grad_op, auto_wrap, offload"
        settings.lacking.append(f"fsdp {' '.join(foreign)}: supported: {supported}")
    if isinstance(file, str):
        settings.unread.append("fsdp_config")


def _model(settings: Settings) -> None:
    """Records settings that transformers takes from config.json for a new model: standard deviation
    of the initial weights, and losses of experts."""
    folder = settings.get("config_name")
    try:
        values = json.loads((Path(str(folder)) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return  # the reader of the model reports it
    if not isinstance(values, dict):
        return
    if "model_name_or_path" not in settings.given and values.get("model_type") not in SCALED:
        std = values.get("initializer_range", 0.02)
        settings.differences.append(
            f"initial weights: all matrices have std {text_of(std)} (initializer_range) there; "
            "here --init-method-std, divided by sqrt(2 x layers) before the residual connections"
        )
    _router_loss(settings, values)


def _router_loss(settings: Settings, values: Mapping[str, Any]) -> None:
    """The loss of all layers together, whose balanced value is k; here one of each layer, of 1."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    if not any(str(values.get(name) or "0") not in ("0", "1") for name in names):
        return
    if values.get("model_type") in WITHOUT_ROUTER_LOSS:
        settings.add("moe-aux-loss-coeff", 0)
        settings.differences.append(
            "auxiliary loss of the router: transformers has none for this model; here "
            "--moe-aux-loss-coeff 0"
        )
        return
    step = values.get("decoder_sparse_step") or 1
    dense = values.get("mlp_only_layers") or []
    every = range(1, (values.get("num_hidden_layers") or 1) + 1)
    layers = len([layer for layer in every if layer % step == 0 and layer - 1 not in dense])
    coefficient = values.get("router_aux_loss_coef", 0.001)
    chosen = values.get("num_experts_per_tok") or 2
    ours = coefficient * chosen / max(1, layers)
    if not values.get("output_router_logits"):
        settings.add("moe-aux-loss-coeff", 0)
        settings.differences.append(
            "auxiliary loss of the router: none there without output_router_logits in config.json, "
            f"whatever router_aux_loss_coef is; here --moe-aux-loss-coeff 0, and {ours:g} weighs "
            f"as much as {coefficient:g} there"
        )
        return
    settings.add("moe-aux-loss-coeff", ours)
    settings.differences.append(
        f"router_aux_loss_coef {coefficient:g}: of one loss for all layers together there, whose "
        f"balanced value is {chosen}; here of one of each layer, whose balanced value is 1, so "
        f"that --moe-aux-loss-coeff is {coefficient:g} x {chosen} / {layers}"
    )
