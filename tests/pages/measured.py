"""docs/running/measured.md: planned speeds, relative to published and measured ones."""

from __future__ import annotations

from pathlib import Path

from benchmarks import public_runs
from benchmarks.accelerator import certificate, certificate_files
from benchmarks.accelerator.models import SIZES
from benchmarks.public_runs import Run
from megatron_ds.planning.hardware import HARDWARE
from tests.pages.flags import REPOSITORY, markdown_table

OUTPUT = REPOSITORY / "docs" / "running" / "measured.md"
BEGIN = "<!-- begin: generated {} -->\n"
END = "<!-- end -->\n"
COLUMNS = ("run", "devices", "layout", "planned", "known", "planned / known", "half")
RANKS = 8
PREDICTED = ("h100", "h200", "a100")
"""Devices whose speeds are predicted before anybody has measured them."""
SHORT = {
    "zero-stage": "ZeRO",
    "tensor-model-parallel-size": "TP",
    "pipeline-model-parallel-size": "PP",
    "context-parallel-size": "CP",
    "expert-model-parallel-size": "EP",
    "micro-batch-size": "micro-batch",
    "global-batch-size": "batch",
    "recompute-granularity": "recomputes",
}
"""Flags of a layout in the table."""


def page() -> str:
    """The page with its tables."""
    text = OUTPUT.read_text(encoding="utf-8")
    tables = {
        "errors": _errors(),
        "runs": _runs(),
        "unjudged": _unjudged(),
        "certificates": certificates(certificate.FOLDER),
    }
    for name, table in tables.items():
        head, begin, rest = text.partition(BEGIN.format(name))
        text = head + begin + table + END + rest.partition(END)[2]
    return text


def _errors() -> str:
    halves = {
        "fitted": [run for run in public_runs.judged() if not run.is_tested],
        "tested": [run for run in public_runs.judged() if run.is_tested],
    }
    rows = []
    for name, runs in halves.items():
        errors = public_runs.errors(runs)
        mean = public_runs.mean_error(runs)
        rows.append(
            (name, str(len(runs)), f"{mean:.1%}", f"{min(errors):+.0%} to {max(errors):+.0%}")
        )
    return markdown_table(("half", "runs", "mean error", "errors"), rows)


def _runs() -> str:
    sources = public_runs.read()[1]
    rows = []
    for run in public_runs.judged():
        half = "tested" if run.is_tested else "fitted"
        rows.append((*_cells(run), half, f"[{run.source}](#sources)"))
    used = dict.fromkeys(run.source for run in public_runs.read()[0])
    names = "".join(f"- {name}: {sources[name]}\n" for name in used)
    return f"{markdown_table((*COLUMNS, 'source'), rows)}\n### Sources\n\n{names}"


def _unjudged() -> str:
    rows = [
        (*_cells(run), f"{run.reason} ({run.source})")
        for run in public_runs.read()[0]
        if run.reason
    ]
    return markdown_table((*COLUMNS[:-1], "why it is not judged"), rows)


def certificates(folder: Path) -> str:
    """Predicted speeds of eight devices, and the measured ones of the files of a folder.

    Raises:
        RefusedFileError: If a file is refused.
    """
    files = certificate_files.accepted(folder)
    rows = []
    for kind in PREDICTED:
        for name in certificate.MEASURED:
            size = SIZES[name]
            device = HARDWARE[kind]
            micro_batch = size.micro_batches_for(device.memory / 2**30)[0]
            plan = certificate.planned(size, RANKS, micro_batch, device)
            measured = [
                (speed["tokens_per_second"], speed["micro_batch"])
                for values in files.values()
                if certificate.hardware_of(values["device"]) == device and values["ranks"] == RANKS
                for speed in values["speeds"]
                if speed["size"] == name
            ]
            texts = [
                f"{rate:,.0f}" + (f" (micro-batch {other})" if other != micro_batch else "")
                for rate, other in measured
            ]
            known = ", ".join(texts) or "none yet"
            speed = f"{plan.tokens_per_second:,.0f}"
            rows.append((f"{RANKS} {kind}", name, str(micro_batch), speed, known))
    head = ("devices", "size", "micro-batch", "predicted tokens/s", "measured")
    others = [
        (
            f"[{file}](../../benchmarks/certificates/{file}.json)",
            f"{values['ranks']} {values['device']}",
            speed["size"],
            str(speed["micro_batch"]),
            f"{speed['tokens_per_second']:,.0f}",
            f"{speed['planned'] or 0:,.0f}",
            f"{speed['planned_after']:,.0f}",
        )
        for file, values in files.items()
        for speed in values["speeds"]
    ]
    titles = ("file", "devices", "size", "micro-batch", "tokens/s", "planned", "with its rates")
    found = markdown_table(titles, others) if others else "No file has been added yet.\n"
    return f"{markdown_table(head, rows)}\n{found}"


def _cells(run: Run) -> tuple[str, ...]:
    planned = run.planned()
    return (
        run.name,
        f"{run.devices:,} {run.device}",
        _layout(run.layout),
        f"{planned:,.0f}",
        f"{run.published:,.0f}",
        f"{planned / run.published:.2f}",
    )


def _layout(flags: str) -> str:
    """The flags of a layout in short."""
    parts = []
    for part in f" {flags}".split(" --")[1:]:
        name, _, value = part.partition(" ")
        if name in SHORT:
            parts.append(f"{SHORT[name]} {value}")
    return ", ".join(parts)
