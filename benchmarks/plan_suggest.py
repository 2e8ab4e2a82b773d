"""CPU seconds of suggesting layouts (tools/plan.py --suggest), and which layout comes first.

    python benchmarks/plan_suggest.py [--against CHECKOUT] [--rounds 3] [--output suggest.json]

With --against, another checkout of this project searches the same models in turns, and the ratio
of the medians is printed: of the complete command, and without what a command of one layout takes,
which is the start of Python, the imports and the settings. CPU seconds depend little on what else
runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json

HERE = Path(__file__).resolve().parent.parent
ONE_LAYOUT = "--preset gpt2-124m --world-size 8 --micro-batch-size 1"
CASES = {
    "124M on 8 H100": "--preset gpt2-124m --world-size 8",
    "8B on 8 H100": "--preset llama3-8b --world-size 8",
    "8B on 8 H100, 131,072 tokens": (
        "--preset llama3-8b --seq-length 131072 --world-size 8 --global-batch-size 32"
    ),
    "70B on 512 H100": "--preset llama3-70b --world-size 512",
    "Mixtral 8x7B on 64 H100": "--preset mixtral-8x7b --seq-length 4096 --world-size 64",
    "405B on 16,384 H100": ("--preset llama3.1-405b --world-size 16384 --global-batch-size 2048"),
    "DeepSeek-V3 on 2,048 H100": (
        "--preset deepseek-v3-671b --world-size 2048 --global-batch-size 15360"
    ),
}
"""Flags of models and devices."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    arguments = parser.parse_args(argv)
    folders = [HERE, *([arguments.against.resolve()] if arguments.against else [])]
    rows = {name: measure(CASES[name], folders, arguments.rounds) for name in arguments.cases}
    print(report(rows))
    if arguments.output is not None:
        machine = asdict(this_machine())
        write_json(
            arguments.output, {"machine": machine, "versions": versions(["numpy"]), "rows": rows}
        )
    return 0


def measure(flags: str, folders: list[Path], rounds: int) -> list[dict[str, Any]]:
    """CPU seconds of each checkout, and its first layout."""
    seconds: list[list[float]] = [[] for _ in folders]
    first = [""] * len(folders)
    starts = [plan(folder, ONE_LAYOUT)[0] for folder in folders]
    for _ in range(rounds):
        for index, folder in enumerate(folders):
            used, values = plan(folder, flags)
            seconds[index].append(used)
            first[index] = values["suggestions"][0]["flags"]
    return [
        {"seconds": statistics.median(used), "start": start, "first": flags_of_first}
        for used, start, flags_of_first in zip(seconds, starts, first, strict=True)
    ]


def plan(folder: Path, flags: str) -> tuple[float, dict[str, Any]]:
    """CPU seconds of a plan, and its JSON."""
    before = _children_seconds()
    words = [sys.executable, str(folder / "tools" / "plan.py"), *flags.split(), "--bf16", "--json"]
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    return _children_seconds() - before, json.loads(done.stdout)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The table in Markdown."""
    lines = [
        "| | CPU s | against | ratio | ratio without the start | first layout, and against |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (ours, *others) in rows.items():
        cells = [name, f"{ours['seconds']:.2f}"]
        for theirs in others:
            search = (ours["seconds"] - ours["start"]) / (theirs["seconds"] - theirs["start"])
            cells += [f"{theirs['seconds']:.2f}", f"{ours['seconds'] / theirs['seconds']:.2f}"]
            cells += [f"{search:.2f}"]
        cells += ["<br>".join(f"`{item['first']}`" for item in (ours, *others))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
