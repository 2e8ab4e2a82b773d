"""Initial weights: a function of the run's seed and of a parameter's name alone.

Every parameter is drawn whole from a generator of its own, on the CPU, and cut afterwards, so that
every layout starts from the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_ds.parallel.rng import stable_seed


@dataclass(frozen=True)
class Initializer:
    """Draws the initial values of one model."""

    seed: int | None
    """None: nothing is drawn; the values are arbitrary until a checkpoint replaces them."""

    def normal(self, name: str, std: float) -> Callable[[tuple[int, ...]], torch.Tensor]:
        """A function from full shape to normal(0, std) values in fp32, for the parameter of this
        canonical name.
        """

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            if self.seed is None:
                return torch.empty(shape, dtype=torch.float32)
            generator = torch.Generator("cpu").manual_seed(stable_seed(self.seed, name))
            return torch.normal(0.0, std, shape, generator=generator, dtype=torch.float32)

        return draw
