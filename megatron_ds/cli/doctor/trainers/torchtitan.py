"""torchtitan: the schedule, and what follows from several keys, of its files in TOML.

Facts are from config/job_config.py and components/ of v0.2.2 (2026-02), the last release with such
files. Knows no torch.
"""

from __future__ import annotations

from typing import Any

from megatron_ds.cli.doctor.trainers.settings import Settings, decay_of_all

RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
}
"""Keys of 2024, with the later ones, which have defaults."""
STYLES = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}


def prepare(settings: Settings) -> None:
    """Translates the keys whose meaning depends on other keys."""
    for old, name in RENAMED.items():
        if (value := settings.take(old)) is not None:
            settings.values[name] = value
    _schedule(settings)
    _validation(settings)
    decay = settings.number("optimizer.weight_decay", 0.0, keeps=True)
    if settings.get("model.name") == "llama3":
        decay_of_all(settings, decay)
        settings.differences.append(
            "rotary positions of llama3: scaled for long sequences since 2025-10 "
            "(--use-rope-scaling, written below), not scaled before"
        )
    # DeepSpeed's pipeline partitions optimizer states only; the results are the same.
    shards = settings.number("parallelism.data_parallel_shard_degree", -1)
    stages = settings.number("parallelism.pipeline_parallel_degree", 1, keeps=True)
    settings.add("zero-stage", 1 if shards == 1 or stages > 1 else 3)
    dtype = settings.take("training.dtype")
    other = settings.get("training.mixed_precision_param")
    if dtype == "bfloat16":
        settings.flags += ["--bf16-master-weights"] + ["--bf16"] * (other != "bfloat16")
    converters: Any = settings.take("model.converters", [])
    if converters:
        settings.lacking.append(
            f"model.converters {converters}: formats of the linear layers are not translated; "
            "leave the converters out, or use --fp8-format and --fp8-recipe"
        )


def _schedule(settings: Settings) -> None:
    """The learning rate: `build_lr_schedulers` in components/lr_scheduler.py.

    There, step k of a warmup of W steps has k / W of the learning rate, and the decay begins after
    step W + 1. Here step k has position k - 1, so a warmup of W - 1 steps that starts at 1 / W of
    the learning rate, and a decay over the last steps, give the same learning rates.
    """
    style = str(settings.take("lr_scheduler.decay_type", "linear"))
    rate = settings.number("optimizer.lr", 8e-4, keeps=True)
    steps = settings.number("training.steps", 10000, keeps=True)
    total = settings.number("lr_scheduler.total_steps", steps)
    warmup = min(total, settings.number("lr_scheduler.warmup_steps", 0))
    ratio = settings.number("lr_scheduler.decay_ratio")
    factor = settings.number("lr_scheduler.lr_min", 0.0)
    factor = settings.number("lr_scheduler.min_lr_factor", factor)
    settings.add("min-lr", float(factor * rate))
    if warmup > 1:
        settings.add("lr-warmup-iters", warmup - 1)
        settings.add("lr-warmup-init", rate / warmup)
    if warmup > 0:
        settings.differences.append(
            f"lr_scheduler.warmup_steps {warmup}: step k has k / {warmup} of the rate since "
            f"2025-06 (written below), k / {warmup + 1} before, with a decay of one more step"
        )
    if total != steps:
        settings.add("lr-decay-iters", total)
    if style not in STYLES:
        settings.lacking.append(f"lr_scheduler.decay_type {style}: supported: {', '.join(STYLES)}")
        return
    longest = total - warmup
    decay = longest if ratio is None else min(longest, round(total * ratio))
    if decay:
        settings.add("lr-decay-style", "WSD")
        settings.add("lr-wsd-decay-style", STYLES[style])
        settings.add("lr-wsd-decay-iters", decay)
    else:
        settings.add("lr-decay-style", "constant")


def _validation(settings: Settings) -> None:
    names = [key for key in settings.values if key.startswith("validation.")]
    values = {key.removeprefix("validation."): settings.take(key) for key in names}
    if not values.get("enable"):
        settings.add("eval-iters", 0)
        return
    settings.add("eval-interval", values.get("freq") or 10)
    batches = values.get("steps")
    if batches and batches > 0:
        settings.add("eval-iters", batches)
    settings.differences.append(
        "validation: its own data set and batch size; here --valid-data-path and --eval-iters "
        "global batches"
    )
