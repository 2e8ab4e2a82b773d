"""Figure of the statistics of a cleaning run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ds.cleaning.stats import EDGES, Counts, ranked

REASONS_SHOWN = 5
"""Reasons shown per stage; the others are summed in one bar."""
KEPT, LOST, BEFORE = "tab:blue", "tab:red", "0.75"
Bar = tuple[str, int, str]
"""Name, documents, and the label at the end."""


def draw(path: Path, counts: Counts) -> None:
    """Write a PNG with documents after each stage, drop reasons, and lengths before and after."""
    from matplotlib.figure import Figure

    before, after = counts.before, counts.after
    flow, lost = _flow(counts), _reasons(counts)
    height = 2.2 + 0.32 * max(len(flow) + len(lost) + 2, 10)
    figure = Figure(figsize=(13, height), layout="constrained")
    heights = (len(flow) + 1.5, len(lost) + 1.5)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1), height_ratios=heights)
    figure.suptitle(
        f"Cleaning: {after.documents:,} documents of {before.documents:,} "
        f"({_share(after.documents, before.documents)}), {after.characters:,} characters of "
        f"{before.characters:,} ({_share(after.characters, before.characters)})"
    )
    _bars(figure.add_subplot(grid[0, 0]), flow, KEPT, "Documents after each stage")
    lost = lost or [("nothing", 0, "0")]
    _bars(figure.add_subplot(grid[1, 0]), lost, LOST, "Dropped, by stage and reason")
    _histogram(figure.add_subplot(grid[:, 1]), counts)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _flow(counts: Counts) -> list[Bar]:
    bars = [("read", counts.before.documents, f"{counts.before.documents:,}")]
    for name, stage in counts.stages.items():
        change = stage.left - bars[-1][1]
        shown = f" ({change:+,})".replace("-", "−") if change else ""
        bars.append((name, stage.left, f"{stage.left:,}{shown}"))
    return bars


def _reasons(counts: Counts) -> list[Bar]:
    """Rejected lines, then the reasons of each stage, most frequent first."""
    shown: list[tuple[str, int]] = []
    of_stages = {name: stage.dropped for name, stage in counts.stages.items()}
    for name, dropped in {"not read": counts.bad, **of_stages}.items():
        reasons = ranked(dropped)
        rest = [count for _, count in reasons[REASONS_SHOWN:]]
        shown += ((f"{name}: {reason}", count) for reason, count in reasons[:REASONS_SHOWN])
        if rest:
            shown.append((f"{name}: {len(rest)} other reasons", sum(rest)))
    documents = counts.before.documents + counts.bad.total()
    return [(name, count, f"{count:,} ({_share(count, documents)})") for name, count in shown]


def _bars(axes: Any, bars: list[Bar], color: str, title: str) -> None:
    names, values, labels = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), values, color=color, height=0.7)
    axes.bar_label(drawn, labels, padding=4)
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    # Space on the right for the labels at the ends of the bars.
    axes.set_xlim(0, max(*values, 1) * 1.25)
    axes.set_title(title, loc="left")
    axes.set_xlabel("documents")
    axes.xaxis.set_major_locator(_locator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
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
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(_locator())
    axes.grid(alpha=0.3)
    axes.legend()


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, integer=True)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"
