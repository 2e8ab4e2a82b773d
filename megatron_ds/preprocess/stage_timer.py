"""What the time of a pipeline went to, in seconds by stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class StageTimer:
    """Adds up seconds by stage. A stage inside another counts for the inner one alone."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inner = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)

    def add(self, stage: str, seconds: float) -> None:
        """Seconds that were measured elsewhere, as in another process."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            self.add(stage, whole - self._inner)
            self._inner = outer + whole

    def timed_iter(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """The items; the time that getting them takes is the stage's."""
        iterator = iter(items)
        while True:
            with self.stage(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
