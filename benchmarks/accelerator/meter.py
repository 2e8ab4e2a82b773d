"""Measures a training loop from inside: throughput, synchronizations, peak memory, kernels.

The same meter runs inside every contender's process. Knows only a function that takes a step.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ROWS = 30
"""Kernels that are reported."""


@dataclass
class Meter:
    """Runs the steps of a loop: warm-up, timed steps, one with counted synchronizations, a profile.

    Args:
        device: Device of the model.
        warm_up: Steps before the measurement.
        timed: Steps whose mean time is measured. There is no synchronization between them.
        trace: File for a Chrome trace of the profiled step.
    """

    device: torch.device
    warm_up: int
    timed: int
    trace: Path | None = None
    seconds: float = float("nan")
    """Per step."""
    syncs: int | None = None
    """Synchronizations of the host with the device in a step; None on a device without a count."""
    kernels: list[dict[str, Any]] = field(default_factory=list)
    busy: float | None = None
    """Share of a step's time in which the device computes."""
    _step: int = 0
    _start: float = 0.0

    @property
    def total(self) -> int:
        """Steps that the loop must take."""
        return self.warm_up + self.timed + 2

    def step(self, take_step: Callable[[], T]) -> T:
        """Take the next step of the loop."""
        number = self._step
        self._step = self._step + 1
        if number == self.warm_up:
            self._synchronize()
            self._start = time.perf_counter()
        if number == self.warm_up + self.timed:
            self._synchronize()
            self.seconds = (time.perf_counter() - self._start) / self.timed
            return self._count_syncs(take_step)
        if number == self.warm_up + self.timed + 1:
            return self._profile(take_step)
        return take_step()

    def report(self) -> dict[str, Any]:
        """Figures as plain values."""
        peak = getattr(self._backend, "max_memory_allocated", None)
        values = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name in ("seconds", "syncs", "busy", "kernels")
        }
        return {**values, "peak_bytes": None if peak is None else peak()}

    @property
    def _backend(self) -> Any:
        """torch's module for the device, such as `torch.cpu`."""
        return getattr(torch, self.device.type)

    def _synchronize(self) -> None:
        self._backend.synchronize()

    def _count_syncs(self, take_step: Callable[[], T]) -> T:
        set_mode = getattr(self._backend, "set_sync_debug_mode", None)
        if set_mode is None:
            return take_step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_mode("warn")
            try:
                return take_step()
            finally:
                set_mode("default")
                self.syncs = sum("synchroniz" in str(each.message) for each in caught)

    def _profile(self, take_step: Callable[[], T]) -> T:
        from torch.profiler import profile, supported_activities

        self._synchronize()
        with profile(activities=supported_activities()) as profiler:
            start = time.perf_counter()
            result = take_step()
            self._synchronize()
            seconds = time.perf_counter() - start
        rows = [(row.key, row.count, self._milliseconds(row)) for row in profiler.key_averages()]
        rows = sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])
        self.kernels = [dict(zip(("name", "calls", "ms"), row, strict=True)) for row in rows[:ROWS]]
        if self.device.type != "cpu":
            self.busy = sum(row[2] for row in rows) / 1e3 / seconds
        if self.trace is not None:
            profiler.export_chrome_trace(str(self.trace))
        return result

    def _milliseconds(self, row: Any) -> float:
        """Time of a kernel, or on a CPU of an operator without those that it calls."""
        if self.device.type == "cpu":
            return float(row.self_cpu_time_total) / 1e3
        # The operators on the host repeat the time of the kernels that they start.
        is_kernel = row.device_type.name != "CPU"
        return float(row.self_device_time_total) / 1e3 if is_kernel else 0.0
