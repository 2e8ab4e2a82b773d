"""Initial weights: a function of the run's seed, the parameter's name and the element alone.

Owns the random numbers. They come from a counter-based generator (Philox; Salmon et al. 2011), in
which every element of a parameter has its own counter. A rank draws its shard only, in any number
of threads, and every layout starts from the same model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_ds.parallel.rng import stable_seed
from megatron_ds.parallel.sharding import Init

BLOCK = 2**15
"""Elements that are always computed together: vector instructions may round the last elements of an
array differently, so results must not depend on where a shard ends. A block stays in the cache."""
CHUNK = 2**20
"""Elements of a thread's task; a multiple of BLOCK."""
COUNTER_ELEMENTS = 8
"""fp32 numbers that Philox4x64 makes of one counter."""
MAX_THREADS = 8

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Initializer:
    """Draws the initial values of one model.

    Args:
        seed: Seed of the run. None: nothing is drawn, and the values are arbitrary until a
            checkpoint replaces them.
        threads: Threads of a draw. None: one per available core, at most MAX_THREADS.
    """

    seed: int | None
    threads: int | None = None

    def normal(self, name: str, std: float) -> Init:
        """Return a function that draws normal(0, std) values for the parameter of this name."""
        return self._draws(name, std, uniform=False)

    def uniform(self, name: str, std: float) -> Init:
        """Return the same for values of a uniform distribution around 0 with this deviation."""
        return self._draws(name, std, uniform=True)

    def _draws(self, name: str, std: float, *, uniform: bool) -> Init:
        """Return a function that draws values.

        Without a seed, inside `torch.device("meta")`, they are tensors without values.
        """

        def draw(shape: tuple[int, ...], dim: int, ranges: Sequence[range]) -> Tensor:
            # The sharded dimension is the slowest, so that each range is contiguous.
            other_sizes = [size for index, size in enumerate(shape) if index != dim]
            if self.seed is None and torch.empty(0).is_meta:
                return torch.empty(sum(map(len, ranges)), *other_sizes).movedim(0, dim)
            row = math.prod(other_sizes)
            values = np.empty((sum(map(len, ranges)), *other_sizes), dtype=np.float32)
            if self.seed is not None:
                flat = values.reshape(-1)
                filled = 0
                for rows in ranges:
                    part = flat[filled : filled + len(rows) * row]
                    self._fill(part, rows.start * row, stable_seed(self.seed, name), std, uniform)
                    filled += len(part)
            return torch.from_numpy(values).movedim(0, dim)

        return draw

    def _fill(self, out: Array, first: int, key: int, std: float, uniform: bool) -> None:
        """Fill `out` with the elements from `first` on."""
        last = first + len(out)
        starts = range(first - first % CHUNK, last, CHUNK)
        threads = min(self.threads or _default_threads(), len(starts))

        def fill_chunk(start: int) -> None:
            low = max(start, first)
            high = min(start + CHUNK, last)
            _fill_chunk(out[low - first : high - first], low, key, std, uniform=uniform)

        if threads <= 1:
            for start in starts:
                fill_chunk(start)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill_chunk, starts))


def _fill_chunk(out: Array, first: int, key: int, std: float, *, uniform: bool) -> None:
    """Fill `out` with values of the elements from `first` on.

    numpy releases the interpreter's lock in each of these calls.
    """
    start = first - first % BLOCK
    generator = np.random.Generator(np.random.Philox(key=key, counter=start // COUNTER_ELEMENTS))
    block = np.empty(BLOCK, dtype=np.float32)
    cosine = np.empty(BLOCK // 2, dtype=np.float32)
    while start < first + len(out):
        generator.random(out=block, dtype=np.float32)
        if uniform:
            np.subtract(block, np.float32(0.5), out=block)
            np.multiply(block, np.float32(math.sqrt(12.0) * std), out=block)
        else:
            _make_normal(block, cosine, std)
        low = max(start, first)
        high = min(start + BLOCK, first + len(out))
        out[low - first : high - first] = block[low - start : high - start]
        start += BLOCK


def _make_normal(block: Array, cosine: Array, std: float) -> None:
    """Make normal(0, std) values of uniform ones in [0, 1) (Box and Muller 1958)."""
    radius = block[: BLOCK // 2]
    angle = block[BLOCK // 2 :]
    np.subtract(np.float32(1.0), radius, out=radius)  # from [0, 1) to (0, 1]
    np.log(radius, out=radius)
    np.multiply(radius, np.float32(-2.0 * std * std), out=radius)
    np.sqrt(radius, out=radius)
    np.multiply(angle, np.float32(2.0 * math.pi), out=angle)
    np.cos(angle, out=cosine)
    np.sin(angle, out=angle)
    np.multiply(angle, radius, out=angle)
    np.multiply(radius, cosine, out=radius)


def _default_threads() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(available or 1, MAX_THREADS)
