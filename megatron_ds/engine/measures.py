"""Measurements of steps other than loss and norm, taken without waiting for the device.

Times of a step's parts, sums by layer, what the routers report, and regions for a profiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from deepspeed.utils.timer import SynchronizedWallClockTimer

from megatron_ds.config import ProfilingConfig
from megatron_ds.engine.norms import StepNorms
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.recording.step_recorder import recording
from megatron_ds.engine.regions import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Open,
    mark_collectives,
    mark_layers,
    mark_passes,
)
from megatron_ds.model.experts.router_log import router_metrics
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import COMMUNICATION, STEP, StepResult

COARSE = (FORWARD, BACKWARD, OPTIMIZER)


class StepMeasures:
    """Measures the steps of an engine.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._norms = StepNorms(parts)
        self._record_every = parts.config.logging.record_every
        self.timers = StepTimers(
            parts.config.profiling,
            interval=parts.config.logging.log_interval,
            is_compiled=parts.compiles_collectives,
        )

    def measure(self, iteration: int, step: Callable[[], StepResult]) -> StepResult:
        """Take a step, and add to its result what was measured. Collective."""
        parts = self._parts
        log = self._parts.model.router_log
        timing = self.timers.measuring(parts.engine, parts.mesh, iteration)
        is_recorded = self._record_every is not None and iteration % self._record_every == 0
        counting = self._norms.counting(iteration, is_recorded=is_recorded)
        passes = recording(parts) if is_recorded else nullcontext()
        with timing, passes as recorder, counting as sums:
            result = step()
            stages = parts.mesh.pp
            means = log.take() if stages.size == 1 else log.take_of_stages(stages, parts.device)
        extras = {**router_metrics(means), **result.extras}
        norms: dict[str, Any] = {}
        if sums is not None and not result.skipped:
            self._norms.complete(sums, result.grad_norm)
            extras |= self._norms.metrics(sums)
            if is_recorded:
                updates = {"update": self._norms.of_updates(sums)}
                norms = self._norms.by_parameter(sums) | updates
        record = None if recorder is None else recorder.record(result) | norms
        return dataclasses.replace(result, extras=extras, record=record)

    @contextmanager
    def marked(self, open_region: Open) -> Iterator[None]:
        """See `ZeroEngine.marked`."""
        parts = self._parts
        with ExitStack() as stack:
            stack.enter_context(mark_passes(parts.engine, open_region))
            if not parts.compiles_collectives:
                stack.enter_context(mark_collectives(parts.mesh, open_region))
            if not parts.is_compiled:
                stack.enter_context(mark_layers(parts.engine.module, open_region))
            yield


class StepTimers:
    """Times the steps at the end of a log interval, and leaves other steps unchanged.

    DeepSpeed's timers put events into the device's stream, or read the clock of a CPU. Its
    `wall_clock_breakdown` uses them, too, but waits for the device in every step.

    Args:
        options: Options that select what is timed. --log-straggler needs steps and communication.
        interval: Iterations between log lines.
        is_compiled: Layers are compiled, for which collectives must stay what they are.
    """

    def __init__(self, options: ProfilingConfig, *, interval: int, is_compiled: bool) -> None:
        self._level = options.timing_log_level
        self._log_interval = interval
        self._is_on = options.times_parts
        self._is_compiled = is_compiled
        self._timers = SynchronizedWallClockTimer()

    @contextmanager
    def measuring(self, engine: Any, mesh: Mesh, iteration: int) -> Iterator[None]:
        """Times what happens inside, if this iteration is due."""
        with ExitStack() as stack:
            if self._is_on and iteration % self._log_interval == 0:
                stack.enter_context(self._time(STEP))
                if self._level > 0:
                    stack.enter_context(mark_passes(engine, self._time_pass))
                if not self._is_compiled:
                    stack.enter_context(mark_collectives(mesh, self._time_collective))
            yield

    def take(self) -> dict[str, float]:
        """Milliseconds by name since the last call. Waits for the device."""
        timers = self._timers.get_timers()
        return {name: timer.elapsed(reset=True) for name, timer in timers.items()}

    @contextmanager
    def _time(self, *names: str) -> Iterator[None]:
        # One inside another of its name, as in a recomputation, is part of it.
        timers = [timer for name in names if not (timer := self._timers(name)).started_]
        for timer in timers:
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.stop()

    @contextmanager
    def _time_pass(self, name: str) -> Iterator[None]:
        if self._level == 1 and name not in COARSE:
            yield
            return
        with self._time(name):
            yield

    def _time_collective(self, name: str) -> AbstractContextManager[None]:
        return self._time(COMMUNICATION, *([name] if self._level > 1 else []))
