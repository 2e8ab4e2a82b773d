"""Write a page with the charts and figures of runs.

Reads the files that a run writes next to its checkpoints; the command line of
`megatron_ds.reports`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.checks import drawing_problems, folder_problems, output_problems
from megatron_ds.config.fields import exclusive_problem, option_field
from megatron_ds.config.problems import Problem
from megatron_ds.planning.hardware import HARDWARE
from megatron_ds.reports.history import names_of, read_run, run_problems, runs_field

SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class Options:
    """Writes one HTML page with the charts and figures of runs, which opens offline."""

    PROGRAM: ClassVar[str] = "report.py"

    runs: tuple[str, ...] = runs_field()
    output: str = option_field("report.html", metavar="FILE")
    """File to write."""
    png: str | None = option_field(None, metavar="DIR")
    """Folder that also gets each chart as PNG."""
    peak_tflops: float | None = option_field(None, above=0)
    """Peak of a device in 10^12 operations per second, for the model FLOPs utilization (MFU)."""
    hardware: str | None = option_field(None, choices=tuple(HARDWARE))
    """Kind of device, for the MFU of a run in bf16 or fp16 (docs/running/planning.md lists their
    peaks)."""

    def problems(self) -> Iterator[Problem]:
        yield from run_problems("runs", self.runs)
        yield from output_problems("output", self.output)
        yield from folder_problems("png", self.png)
        if None not in (self.hardware, self.peak_tflops):
            yield exclusive_problem("peak_tflops", "hardware")
        yield from drawing_problems("output", self.output, SUFFIXES)


def work(options: Options) -> None:
    # matplotlib takes half a second to import.
    from megatron_ds.reports import figures
    from megatron_ds.reports.charts import charts_of
    from megatron_ds.reports.page import page

    paths = list(dict.fromkeys(options.runs))
    runs = dict(zip(names_of(paths), map(read_run, map(Path, paths)), strict=True))
    peak = HARDWARE[options.hardware].tflops_16 if options.hardware else options.peak_tflops
    charts = list(charts_of(runs, peak))
    Path(options.output).write_text(page(runs, charts, peak), encoding="utf-8")
    print(f"wrote {options.output}")
    if options.png is not None:
        folder = Path(options.png)
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            figures.save(chart, folder / f"{chart.name}.png")
        print(f"wrote {len(charts)} charts to {folder}")


main = cli.program(Options, work)
