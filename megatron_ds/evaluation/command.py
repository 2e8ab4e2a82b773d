"""Runs an evaluation and prints its results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ds.evaluation import texts
from megatron_ds.evaluation.options import Options
from megatron_ds.evaluation.tasks import WIKITEXT, Task
from megatron_ds.inference.cli import loaded_model, log_rank0, open_checkpoint
from megatron_ds.inference.prompts import replace_text_file
from megatron_ds.launch import environment

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
    with loaded_model(options, source) as (model, mesh):
        scorer = Scorer(model, mesh, options.micro_batch_size)
        start = time.perf_counter()
        if options.tasks:
            from megatron_ds.evaluation import harness

            result = harness.run_tasks(options, scorer, tokenizer)
        else:
            result = _run_task(options, scorer, tokenizer)
        seconds = time.perf_counter() - start
    if environment.rank() == 0:
        log_rank0(f"evaluated in {seconds:.1f} s")
        print(harness.table(result) if options.tasks else _lines(result))
        if options.output is not None:
            with replace_text_file(options.output) as file:
                record = {**result, "checkpoint": str(source.path)}
                file.write(json.dumps(record, indent=2, default=str) + "\n")


def _run_task(options: Options, scorer: Scorer, tokenizer: Tokenizer) -> Figures:
    length = scorer.model.config.seq_length
    stride = min(options.overlapping_eval, length)
    task = Task(options.task, tokenizer, length, stride, options.strict_lambada)
    # WikiText's files have a suffix of their own.
    format = "text" if options.task == WIKITEXT else "auto"
    documents = texts.read_texts(options.valid_data, options.json_keys, tokenizer, format)
    return task.figures(task.evaluate(documents, lambda asked: scorer.score(_reported(asked))))


def _lines(figures: Figures) -> str:
    width = max(map(len, figures))
    shown = {
        name: f"{value:.8g}" if isinstance(value, float) else value
        for name, value in figures.items()
    }
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in shown.items())


def _reported(requests: Iterator[ScoredText]) -> Iterator[ScoredText]:
    """The requests; prints how many there were, now and then."""
    due = time.perf_counter() + REPORT_SECONDS
    for number, request in enumerate(requests):
        if time.perf_counter() > due:
            due += REPORT_SECONDS
            log_rank0(f"scored {number:,} windows or texts")
        yield request
