"""Components of a run's engine, as `build_engine` returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.fileio.swap_folder import SwapFolder
from megatron_ds.model.declaration.rates import Multipliers
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams


@dataclass(frozen=True)
class EngineParts:
    """The built parts, which other parts of the engine share."""

    engine: Any
    """Engine of `deepspeed.initialize`."""
    model: GPTModel
    """The layers of this rank."""
    config: Config
    ds_config: dict[str, Any]
    """DeepSpeed configuration that was passed to the engine."""
    multipliers: tuple[Multipliers, ...]
    """Factors of each parameter group."""
    mesh: Mesh
    rng: RngStreams
    """Random number generators for dropout."""
    device: torch.device
    """Device to which batches are copied."""
    is_compiled: bool
    """Layers or the model are compiled."""
    startup_warnings: tuple[Problem, ...] = ()
    """Warnings about settings that make the run slower than it could be."""
    swap_folder: SwapFolder | None = None
    """Where states on a disk are; kept until the engine ends."""

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.config.zero_stage

    @property
    def compiles_collectives(self) -> bool:
        """Whether there are collectives in what is compiled."""
        gathers = self.stage == 3 or "compile" in self.ds_config
        return self.is_compiled and (gathers or self.mesh.same_batch.size > 1)
