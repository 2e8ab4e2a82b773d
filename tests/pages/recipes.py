"""The first lines of each file of examples/recipes, and the table of its README, by the plan."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
from pathlib import Path
from typing import Any

from megatron_ds.planning import command as plan
from megatron_ds.planning.plan_report import duration
from tests.pages.flags import REPOSITORY, markdown_table

FOLDER = REPOSITORY / "examples" / "recipes"
OUTPUT = FOLDER / "README.md"
BEGIN = "<!-- begin: generated table -->\n"
END = "<!-- end -->\n"
TINY = FOLDER / "tiny.yaml"
RANKS = (8, 64)
DAY = 86400
COLUMNS = ("parameters", "tokens", "operations", *(f"{ranks} H100" for ranks in RANKS))


def recipes() -> list[Path]:
    """The files, without the one that makes each of them tiny."""
    return sorted(path for path in FOLDER.glob("*.yaml") if path != TINY)


def page() -> str:
    """README.md with a row for each recipe."""
    head, _, rest = OUTPUT.read_text(encoding="utf-8").partition(BEGIN)
    rows = [(f"[{path.stem}]({path.name})", *_figures(path)) for path in recipes()]
    table = markdown_table(("recipe", *COLUMNS), rows)
    return f"{head}{BEGIN}{table}{END}{rest.partition(END)[2]}"


def text(path: Path) -> str:
    """A recipe with its first lines: its title, which stays, and the figures of the plan."""
    title, _, rest = path.read_text(encoding="utf-8").partition("\n")
    settings = rest.partition("\n\n")[2] if rest.startswith("#") else rest.lstrip()
    figures = zip(COLUMNS, _figures(path), strict=True)
    lines = "".join(f"# {name:<12}{value}\n" for name, value in figures)
    return f"{title}\n#\n{lines}\n{settings}"


def write() -> None:
    """Writes the first lines of the recipes."""
    for path in recipes():
        path.write_text(text(path), encoding="utf-8")


@functools.cache
def _figures(path: Path) -> tuple[str, ...]:
    """The values of `COLUMNS`."""
    plans = [_plan(path, ranks) for ranks in RANKS]
    stages = plans[0].get("stages", [])
    tokens, operations = (sum(stage[key] for stage in stages) for key in ("tokens", "operations"))
    if not stages:
        steps = plans[0]["days"] * DAY / plans[0]["seconds"]["step"]
        tokens, operations = (steps * plans[0][f"{key}_per_step"] for key in ("tokens", "flops"))
    in_stages = f" in {len(stages)} stages" if stages else ""
    return (
        f"{plans[0]['parameters']:,}",
        f"{_rounded(tokens)}{in_stages}, {_rounded(plans[0]['tokens_per_step'])} per step",
        f"{operations:.2e}",
        *(_costs(planned, tokens) for planned in plans),
    )


def _costs(planned: dict[str, Any], tokens: float) -> str:
    """Memory, speed and time."""
    stages = planned.get("stages", [])
    peak = max((stage["peak"] for stage in stages), default=planned["memory"]["peak"])
    days = sum(stage["days"] for stage in stages) or planned["days"]
    return (
        f"{peak / 1e9:.0f} GB of each, {_rounded(tokens / days / DAY)} tokens/s, {duration(days)}"
    )


def _plan(path: Path, ranks: int) -> dict[str, Any]:
    printed = io.StringIO()
    words = ["--config", str(path), "--world-size", str(ranks), "--hardware", "h100", "--json"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        assert plan.main(words) == os.EX_OK, path
    planned: dict[str, Any] = json.loads(printed.getvalue())
    return planned


def _rounded(count: float) -> str:
    """A number with a suffix."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    unit, suffix = next((item for item in units if count >= item[0]), (1.0, ""))
    return f"{count / unit:.3g}{suffix}"
