"""Primus: features that its switches turn off, and models that are not GPT models. Knows no
torch."""

from __future__ import annotations

from megatron_ds.cli.doctor.trainers.settings import Settings

NO_MODEL = "state-space layers and other mixers than attention are not supported"


def prepare(settings: Settings) -> None:
    """Translates the keys whose meaning depends on other keys."""
    if settings.take("disable_wandb", True):
        for key in [key for key in settings.values if key.startswith("wandb_")]:
            settings.take(key)
    if settings.take("disable_tensorboard", True):
        for key in [key for key in settings.values if "tensorboard" in key]:
            settings.take(key)
    if settings.get("recompute_num_layers") == 0:  # no layer is recomputed
        for key in ("recompute_num_layers", "recompute_granularity", "recompute_method"):
            settings.take(key)
    model = settings.take("model_type", "gpt")
    spec = settings.take("spec")
    if model != "gpt":
        settings.lacking.append(f"model_type {model}: {NO_MODEL}")
    if spec is not None:
        words = " ".join(map(str, spec)) if isinstance(spec, list) else str(spec)
        is_mamba = "mamba" in words or "hybrid" in words
        reason = NO_MODEL if is_mamba else "layers are those that the flags of the model describe"
        settings.lacking.append(f"spec {words}: {reason}")
