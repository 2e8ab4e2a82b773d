"""Time by stage of a pipeline, in seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class StageTimer:
    """Sums seconds by stage. Time of a nested stage counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        outer = self._inner
        self._inner = 0.0
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
        self.seconds[stage] += elapsed - self._inner
        self._inner = outer + elapsed

    def timed_iter(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, none of them None; the time until each counts for the stage."""
        iterator = iter(items)
        while True:
            with self.stage(stage):
                item = next(iterator, None)
            if item is None:
                return
            yield item
