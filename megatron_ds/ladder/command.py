"""Train a ladder of small runs, and predict the loss of a large one from it.

Plans the ladder from a recipe, trains it, fits the laws, and judges the prediction by the log of
the large run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli.subcommands import Commands, run_command
from megatron_ds.ladder.derive import plan
from megatron_ds.ladder.options import PROGRAM, Fit, Judge, Plan, Run
from megatron_ds.ladder.records import REPORT, read_ladder
from megatron_ds.ladder.results import fit_ladder, judge, law_text, write_fit
from megatron_ds.ladder.runs import train


def fit(options: Fit, _: Sequence[str] = ()) -> None:
    """Fits the ladder, writes FOLDER/fit.json and the report, and prints the prediction."""
    from megatron_ds.ladder.page import write_page  # matplotlib takes half a second to import

    ladder = read_ladder(Path(options.folder))
    results = fit_ladder(ladder, options)
    write_fit(results)
    complete = {item.run.name for item in results.measured}
    if missing := [run.name for run in ladder.runs if run.name not in complete]:
        print(f"without {', '.join(missing)}, not complete")
    for item in results.fits:
        print(law_text(item.law))
    print(f"the large run: {results.prediction.text()}")
    path = Path(options.output) if options.output else ladder.folder / REPORT
    write_page(results, path)
    print(f"wrote {path}")


def run_ladder(options: Run, _: Sequence[str]) -> int:
    """Trains the runs, and fits the laws if none is missing."""
    status, is_complete = train(options)
    if is_complete:
        fit(Fit(folder=options.folder))
    return status


COMMANDS: Commands = {
    "plan": (Plan, plan),
    "run": (Run, run_ladder),
    "fit": (Fit, fit),
    "judge": (Judge, judge),
}


def main(argv: Sequence[str]) -> int:
    return run_command(PROGRAM, COMMANDS, argv, with_training=("plan",))
