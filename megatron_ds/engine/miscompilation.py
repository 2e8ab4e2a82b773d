"""What the installed torch is known to compile wrongly, told without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config import zero_stage

CORRECT = (2, 13)
"""With torch 2.11, parameters that DeepSpeed gathers inside a compiled layer get no gradient, and
layers with attention inside documents train differently on two tensor-parallel ranks."""


def compiles_correctly() -> bool:
    """Whether the installed torch is new enough for all that can be compiled."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= CORRECT


def miscompiled(config: Config) -> Iterator[Problem]:
    """The settings that need a newer torch to be compiled correctly."""
    if not config.runtime.compile or compiles_correctly():
        return
    needed, installed = ".".join(map(str, CORRECT)), version("torch")
    if zero_stage(config) == 3:
        yield Problem("compiled-zero3-needs-newer-torch", needed=needed, installed=installed)
    if config.data.reset_attention_mask:
        yield Problem("compiled-documents-need-newer-torch", needed=needed, installed=installed)
