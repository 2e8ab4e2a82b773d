"""Megatron-LM's --yaml-cfg: what its table cannot express. Knows no torch."""

from __future__ import annotations

from megatron_ds.cli.doctor.trainers.settings import Settings


def prepare(settings: Settings) -> None:
    """Translates a list that is one word of a flag."""
    size = settings.get("window_size")
    if isinstance(size, list):
        settings.values["window_size"] = ",".join(map(str, size))
