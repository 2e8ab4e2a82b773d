"""Report of a cleaning run: statistics as JSON, and a figure of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ds.cleaning.stats import EDGES, Counts

REASONS_SHOWN = 5
"""Reasons shown per stage; the others are summed in one bar."""
KEPT, LOST, BEFORE = "tab:blue", "tab:red", "0.75"


def write_numbers(path: Path, counts: Counts) -> None:
    path.write_text(json.dumps(counts.to_json(), indent=2) + "\n", encoding="utf-8")


def draw(path: Path, counts: Counts) -> None:
    """Write a PNG with documents after each stage, drop reasons, and lengths before and after."""
    from matplotlib.figure import Figure

    lost = _reasons(counts)
    flow = _flow(counts)
    befores = [flow[0][1], *(count for _, count in flow[:-1])]
    height = 2.2 + 0.32 * max(len(flow) + len(lost) + 2, 10)
    figure = Figure(figsize=(13, height), layout="constrained")
    grid = figure.add_gridspec(
        2, 2, width_ratios=(1, 1), height_ratios=(len(flow) + 1.5, len(lost) + 1.5)
    )
    read, kept = counts.before.documents, counts.after.documents
    figure.suptitle(
        f"Cleaning: {kept:,} documents of {read:,} ({_share(kept, read)}), "
        f"{counts.after.characters:,} characters of {counts.before.characters:,} "
        f"({_share(counts.after.characters, counts.before.characters)})"
    )
    _bars(
        figure.add_subplot(grid[0, 0]),
        flow,
        [_flow_label(count, before) for (_, count), before in zip(flow, befores, strict=True)],
        KEPT,
        "Documents after each stage",
    )
    _bars(
        figure.add_subplot(grid[1, 0]),
        lost or [("nothing", 0)],
        [f"{count:,} ({_share(count, read + counts.bad.total())})" for _, count in lost] or ["0"],
        LOST,
        "Dropped, by stage and reason",
    )
    _histogram(figure.add_subplot(grid[:, 1]), counts)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _flow(counts: Counts) -> list[tuple[str, int]]:
    return [
        ("read", counts.before.documents),
        *((name, stage.left) for name, stage in counts.stages.items()),
    ]


def _flow_label(count: int, before: int) -> str:
    change = "" if count == before else f" ({count - before:+,})".replace("-", "−")
    return f"{count:,}{change}"


def _reasons(counts: Counts) -> list[tuple[str, int]]:
    """Bars: rejected lines, then the reasons of each stage, most frequent first."""
    shown: list[tuple[str, int]] = []
    of_all = {"not read": counts.bad} | {
        name: stage.dropped for name, stage in counts.stages.items()
    }
    for name, dropped in of_all.items():
        ranked = sorted(dropped.items(), key=lambda pair: (-pair[1], pair[0]))
        head, rest = ranked[:REASONS_SHOWN], ranked[REASONS_SHOWN:]
        shown += ((f"{name}: {reason}", count) for reason, count in head)
        if rest:
            others = sum(count for _, count in rest)
            shown.append((f"{name}: {len(rest)} other reasons", others))
    return shown


def _bars(
    axes: Any, bars: list[tuple[str, int]], labels: list[str], color: str, title: str
) -> None:
    names, values = [name for name, _ in bars], [value for _, value in bars]
    places = range(len(bars))
    axes.barh(places, values, color=color, height=0.7)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    # Space on the right for the labels at the ends of the bars.
    axes.set_xlim(0, max(*values, 1) * 1.25)
    for place, value, label in zip(places, values, labels, strict=True):
        axes.annotate(label, (value, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_title(title, loc="left")
    axes.set_xlabel("documents")
    axes.xaxis.set_major_locator(_locator())
    axes.xaxis.set_major_formatter(_thousands)
    axes.spines[["top", "right"]].set_visible(False)


def _histogram(axes: Any, counts: Counts) -> None:
    edges = [*EDGES, 2 * EDGES[-1]]
    used = [at for at, count in enumerate(counts.before.bins[1:]) if count] or [0]
    first, last = used[0], used[-1] + 1
    axes.stairs(counts.before.bins[1:], edges, fill=True, color=BEFORE, label="before", baseline=0)
    axes.stairs(counts.after.bins[1:], edges, color=KEPT, linewidth=2, label="after", baseline=0)
    axes.set_xscale("log")
    axes.set_xlim(edges[first], edges[last])
    axes.set_title("Length of documents, before and after", loc="left")
    axes.set(xlabel="characters (each bin is √2 wide)", ylabel="documents")
    axes.xaxis.set_major_formatter(_thousands)
    axes.yaxis.set_major_formatter(_thousands)
    axes.yaxis.set_major_locator(_locator())
    axes.grid(alpha=0.3)
    axes.legend()


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, integer=True)


def _thousands(value: float, _: int) -> str:
    return f"{value:,.0f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"
