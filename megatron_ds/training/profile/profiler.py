"""Takes a profile with torch.profiler. Imported only if one is taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from torch.profiler import profile, record_function, supported_activities

from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.fileio.atomic import atomic_write
from megatron_ds.launch.device import memory_history

STEP = "iteration"
"""Regions of a step are called by it and a number."""
ROWS = 40
"""Number of rows of the summary."""


class ProfilerSession:
    """A profile of consecutive steps, which begins with the construction.

    Args:
        engine: Engine whose steps are measured.
        folder: Folder of the files `NAME.trace.json`, `NAME.summary.txt` and, on a device that
            records the history of its memory, `NAME.memory.pickle`.
        name: Name of the files without suffix.
        write: Prints the summary.
    """

    def __init__(
        self, engine: ZeroEngine, folder: Path, name: str, write: Callable[[str], object]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / name
        self._write = write
        self._step: AbstractContextManager[object] | None = None
        self._number = 0
        with ExitStack() as stack:
            stack.enter_context(memory_history(self._file("memory.pickle")))
            self._profile = stack.enter_context(
                profile(activities=supported_activities(), profile_memory=True, acc_events=True)
            )
            stack.enter_context(engine.marked(record_function))
            self._installed = stack.pop_all()

    def next_step(self, iteration: int) -> None:
        """Begins a step, and ends the one before."""
        self._end_step()
        self._number += 1
        self._step = record_function(f"{STEP} {iteration}")
        self._step.__enter__()

    def finish(self) -> None:
        """Ends the last step, removes what was installed, and writes the files."""
        self._end_step()
        self._installed.close()
        trace = self._file("trace.json")
        self._profile.export_chrome_trace(str(trace))
        averages = self._profile.key_averages()
        has_device = any(row.self_device_time_total for row in averages)
        time = "self_device_time_total" if has_device else "self_cpu_time_total"
        table = averages.table(time, row_limit=ROWS, max_name_column_width=32)
        text = f"profile of {self._number} steps: {trace}\n{table.rstrip()}"
        with atomic_write(self._file("summary.txt")) as file:
            file.write(f"{text}\n".encode())
        self._write(text)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _file(self, suffix: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{suffix}")
