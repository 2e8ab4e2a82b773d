"""Time by stage of a pipeline, in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class StageTimer:
    """Sums seconds by stage. Time of a nested stage counts only for the inner one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inner = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds that were measured in another process."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.add(stage, elapsed - self._inner)
            self._inner = outer + elapsed

    def timed_iter(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; the time until each is available counts for the stage."""
        iterator = iter(items)
        while True:
            with self.stage(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
