"""Reads from a trace where the time of the steps and the memory at their peak went.

A trace is the list of events of the Chrome trace format, as torch.profiler writes it. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

STEP = "iteration"
"""Regions of a step are called by it and a number."""
OUTSIDE = "outside of steps"
HOST, DEVICE = "user_annotation", "gpu_user_annotation"
"""Categories of torch.profiler: a region on the host, and its operations on an accelerator."""
Event = Mapping[str, Any]


@dataclass
class Row:
    """Regions of one name, in all steps together."""

    calls: int = 0
    total: float = 0.0
    """Microseconds, with the regions inside."""
    own: float = 0.0
    """Microseconds, without the regions inside."""
    device: float = 0.0
    """Microseconds from the first to the last operation on the accelerator, with the regions
    inside; 0 on a CPU."""
    peak_bytes: int = 0
    """Allocated directly in the region and in use at the peak of memory."""


@dataclass
class Report:
    """Time and memory by region.

    Regions are nested by time, also across threads: the backward pass runs in a thread of its own
    while the thread that called it waits.
    """

    steps: int
    rows: dict[str, Row] = field(default_factory=dict)
    peak_bytes: int = 0
    """Largest sum of the allocations of the profile: above what was in use when it began."""

    @classmethod
    def of(cls, events: Sequence[Event], regions: Collection[str], steps: int) -> Report:
        """Reads a trace.

        Args:
            events: Of the trace.
            regions: Names of the regions that were opened.
            steps: Number of the steps.
        """
        report = cls(steps)
        spans = [each for each in events if each.get("ph") == "X" and each["name"] in regions]
        for event in spans:
            if event.get("cat") == DEVICE:
                report._row(event["name"]).device += event["dur"]
        on_host = [each for each in spans if each.get("cat") == HOST]
        report._read(on_host, [each for each in events if each.get("name") == "[memory]"])
        return report

    def text(self) -> str:
        """Table of operators, merged over numbers in their names, sorted by self time."""
        merged: dict[str, Row] = {}
        for name, row in self.rows.items():
            one = merged.setdefault(re.sub(r" \d+", "", name), Row())
            for key, value in vars(row).items():
                setattr(one, key, getattr(one, key) + value)
        whole = sum(row.own for row in merged.values()) or 1.0
        has_device = any(row.device for row in merged.values())
        lines = [
            f"{'region':32}{'calls':>7}{'total ms':>11}{'own ms':>11}{'own %':>7}"
            + (f"{'device ms':>11}" if has_device else "")
            + f"{'at peak MB':>12}"
        ]
        for name, row in sorted(merged.items(), key=lambda item: -item[1].own):
            lines.append(
                f"{name:32}{row.calls / self.steps:7.1f}{row.total / self.steps / 1e3:11.3f}"
                f"{row.own / self.steps / 1e3:11.3f}{100 * row.own / whole:7.1f}"
                + (f"{row.device / self.steps / 1e3:11.3f}" if has_device else "")
                + f"{row.peak_bytes / 2**20:12.2f}"
            )
        peak = f"peak of the memory allocated in the profile (MB): {self.peak_bytes / 2**20:.2f}"
        return "\n".join(["calls and times per step:", *lines, peak])

    def to_dict(self) -> dict[str, Any]:
        """The rows in all steps together, times in microseconds."""
        rows = {name: vars(row) for name, row in self.rows.items()}
        return {"steps": self.steps, "peak_bytes": self.peak_bytes, "regions": rows}

    def _row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row())

    def _read(self, spans: Sequence[Event], memory: Sequence[Event]) -> None:
        kind = max((event["args"]["Device Type"] for event in memory), default=0)
        stack: list[Event] = []
        changes: list[_Change] = []
        for event in _in_order(spans, memory):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if event.get("ph") == "X":
                row = self._row(event["name"])
                row.calls += 1
                row.total += event["dur"]
                row.own += event["dur"]
                if stack:
                    end = stack[-1]["ts"] + stack[-1]["dur"]
                    inside = min(event["ts"] + event["dur"], end) - event["ts"]
                    self._row(stack[-1]["name"]).own -= inside
                stack.append(event)
                continue
            values = event["args"]
            if values["Device Type"] == kind:
                region = stack[-1]["name"] if stack else OUTSIDE
                changes.append(_Change(values["Addr"], values["Bytes"], region))
        self._read_memory(changes)

    def _read_memory(self, changes: Sequence[_Change]) -> None:
        live: dict[int, _Change] = {}
        in_use = peak_at = 0
        for number, change in enumerate(changes, start=1):
            in_use += _apply(change, live)
            if in_use > self.peak_bytes:
                self.peak_bytes, peak_at = in_use, number
        live.clear()
        for change in changes[:peak_at]:
            _apply(change, live)
        for change in live.values():
            self._row(change.region).peak_bytes += change.size


class _Change(NamedTuple):
    """An allocation or, with a negative size, its end."""

    address: int
    size: int
    region: str


def _apply(change: _Change, live: dict[int, _Change]) -> int:
    """Bytes by which memory in use changes. What was allocated before the trace does not count."""
    # An address that is in use has been freed by a thread that the trace does not see.
    known = live.pop(change.address, None)
    before = 0 if known is None else known.size
    if change.size <= 0:
        return -before
    live[change.address] = change
    return change.size - before


def _in_order(spans: Sequence[Event], memory: Sequence[Event]) -> Iterator[Event]:
    """All events by time; of spans that begin together the longest first."""
    yield from sorted([*spans, *memory], key=lambda each: (each["ts"], -each.get("dur", 0)))
