"""Runs an evaluation and prints its results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ds.evaluation import texts
from megatron_ds.evaluation.options import Options
from megatron_ds.evaluation.tasks import Task, Totals, format_of
from megatron_ds.inference.cli import loaded_model, log_rank0, open_checkpoint
from megatron_ds.inference.prompts import replace_text_file
from megatron_ds.launch import environment
from megatron_ds.launch.output import columns

if TYPE_CHECKING:
    from megatron_ds.evaluation.scoring import ScoredText, Scorer
    from megatron_ds.tokenizer import Tokenizer

REPORT_SECONDS = 10.0
Figures = dict[str, Any]
"""Results by name."""


def run(options: Options) -> None:
    """Loads the model and evaluates.

    Raises:
        UserError: If options, checkpoint and texts do not fit.
    """
    from megatron_ds.evaluation.scoring import Scorer

    source, _, tokenizer = open_checkpoint(options)
    loaded = []
    if options.tasks:
        from megatron_ds.evaluation import harness

        # Before the model: data may be missing.
        names = [name for text in options.tasks for name in text.split(",") if name]
        loaded = harness.load_tasks(names, options.include_path)
    with loaded_model(options, source) as (model, mesh):
        scorer = Scorer(model, mesh, options.micro_batch_size)
        start = time.perf_counter()
        if options.tasks:
            result = harness.run_tasks(options, loaded, scorer, tokenizer)
        else:
            result = _run_task(options, scorer, tokenizer)
        seconds = time.perf_counter() - start
    if environment.rank() == 0:
        log_rank0(f"evaluated in {seconds:.1f} s")
        print(harness.table(result) if options.tasks else _lines(result))
        if options.output is not None:
            with replace_text_file(options.output) as file:
                record = {**result, "checkpoint": ", ".join(map(str, source.paths))}
                file.write(json.dumps(record, indent=2, default=str) + "\n")


def _run_task(options: Options, scorer: Scorer, tokenizer: Tokenizer) -> Figures:
    """The results of all files together and, if there are several, of each in `files`."""
    length = scorer.model.config.seq_length
    stride = min(options.overlapping_eval, length)
    task = Task(options.task, tokenizer, length, stride, options.strict_lambada)
    totals = {}
    for path in dict.fromkeys(options.valid_data):
        documents = texts.read_texts([path], options.json_keys, tokenizer, format_of(task.name))
        totals[path] = task.evaluate(documents, lambda asked: scorer.score(_reported(asked)))
    figures: Figures = task.figures(sum(totals.values(), Totals()))
    if len(totals) > 1:
        figures["files"] = {path: task.figures(total) for path, total in totals.items()}
    return figures


def _lines(figures: Figures) -> str:
    """A line for each figure or, of several files, one for each file and for all of them."""
    names = [name for name in figures if name != "files"]
    files = figures.get("files", {})
    rows = [[name.replace("_", " ") for name in names]]
    for row in (*files.values(), figures):
        values = (row[name] for name in names)
        rows.append([f"{one:.8g}" if isinstance(one, float) else str(one) for one in values])
    if files:
        rows = [[name, *row] for name, row in zip(("", *files, "total"), rows, strict=True)]
    else:
        rows = [list(row) for row in zip(*rows, strict=True)]
    return "\n".join(columns(rows))


def _reported(requests: Iterator[ScoredText]) -> Iterator[ScoredText]:
    """The requests; prints how many there were, now and then."""
    due = time.perf_counter() + REPORT_SECONDS
    for count, request in enumerate(requests):
        if time.perf_counter() > due:
            due += REPORT_SECONDS
            log_rank0(f"scored {count:,} windows or texts")
        yield request
