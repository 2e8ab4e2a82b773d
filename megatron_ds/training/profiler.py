"""Takes a profile with torch.profiler. Imported only if one is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from torch.profiler import profile, record_function, supported_activities

from megatron_ds.engine.protocol import Engine
from megatron_ds.fileio.atomic import atomic_write
from megatron_ds.launch.device import memory_history
from megatron_ds.training.profile_report import STEP, Report


class ProfilerSession:
    """A profile of consecutive steps, which begins with the construction.

    Args:
        engine: Whose steps are measured.
        folder: Of the files `NAME.trace.json`, `NAME.summary.txt`, `NAME.summary.json` and, on
            a device that records the history of its memory, `NAME.memory.pickle`.
        name: Of the files.
        write: Prints the summary.
    """

    def __init__(
        self, engine: Engine, folder: Path, name: str, write: Callable[[str], object]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._write = folder / name, write
        self._regions: set[str] = set()
        self._step: AbstractContextManager[object] | None = None
        self._number = 0
        with ExitStack() as stack:
            stack.enter_context(memory_history(self._file("memory.pickle")))
            self._profile = stack.enter_context(
                profile(activities=supported_activities(), profile_memory=True, acc_events=True)
            )
            stack.enter_context(engine.marked(self._open))
            self._installed = stack.pop_all()

    def next_step(self, iteration: int) -> None:
        self._end_step()
        self._number += 1
        self._step = self._open(f"{STEP} {iteration}")
        self._step.__enter__()

    def finish(self) -> None:
        self._end_step()
        self._installed.close()
        trace = self._file("trace.json")
        self._profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        report = Report.of(events, self._regions, self._number)
        text = f"profile of {self._number} steps: {trace}\n{report.text()}"
        with atomic_write(self._file("summary.txt")) as file:
            file.write(f"{text}\n".encode())
        with atomic_write(self._file("summary.json")) as file:
            file.write(json.dumps(report.to_dict(), indent=1).encode())
        self._write(text)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _open(self, region: str) -> AbstractContextManager[object]:
        self._regions.add(region)
        return record_function(region)

    def _file(self, kind: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{kind}")
