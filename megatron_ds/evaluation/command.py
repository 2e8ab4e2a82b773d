"""The command line of an evaluation: options, texts, results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_ds import cli
from megatron_ds.config.fields import option_field, when
from megatron_ds.config.problems import Problem
from megatron_ds.evaluation import texts
from megatron_ds.evaluation.tasks import LAMBADA, PERPLEXITY, TASKS, WIKITEXT, Task
from megatron_ds.inference.cli import GenerationOptions, loaded_model, log_rank0, open_checkpoint
from megatron_ds.inference.prompts import output_problems, replace_text_file
from megatron_ds.launch import environment, output

if TYPE_CHECKING:
    from megatron_ds.evaluation.scoring import ScoredText

REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Options(GenerationOptions):
    """Evaluates a trained GPT on texts: perplexity, and accuracy of predicting last words.

    Perplexity is of whole documents, each after the end of another one, in overlapping windows. It
    is printed per token, per word and, to compare models with other tokenizers, as bits per byte.
    WIKITEXT103 and LAMBADA are the tasks of Megatron-LM's tasks/main.py.

    Flags of pretrain_gpt.py are accepted, too: those of the tokenizer override the checkpoint's,
    those of the model must agree with the checkpoint, the others have no effect.
    """

    PROGRAM: ClassVar[str] = "evaluate.py"

    task: str = option_field(PERPLEXITY, "what is evaluated", choices=TASKS)
    valid_data: tuple[str, ...] = option_field(
        (),
        "files, URLs or folders with documents (JSON lines, parquet, arrow, csv, tsv or plain text "
        "by suffix, optionally compressed), or prefixes of token files (.bin and .idx); LAMBADA's "
        "last words are those of the documents",
        nargs="*",
        metavar="PATH",
        required=True,
    )
    json_keys: tuple[str, ...] = option_field(
        ("text",), "keys of the texts of a document", nargs="*", metavar="KEY"
    )
    overlapping_eval: int = option_field(
        32,
        "tokens by which a window is moved; all but these give context. A larger number is faster "
        "and gives a higher perplexity; at least the sequence length: windows do not overlap",
        minimum=1,
    )
    strict_lambada: bool = option_field(
        False,
        "predict the complete last word instead of the last token",
        only_with=when(task=LAMBADA),
    )
    micro_batch_size: int = option_field(
        8, "texts or windows per batch; does not affect the results", minimum=1
    )
    output: str | None = option_field(None, "output file (JSON)", metavar="FILE")

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size; groups of as many processes share the texts."""
        return self.checkpoint.tensor_model_parallel_size or 1

    def problems(self) -> Iterator[Problem]:
        yield from self.checkpoint.problems(is_replicated=True)
        yield from texts.problems(self.valid_data)
        if self.output is not None:
            yield from output_problems("output", self.output)


def run(options: Options) -> None:
    """Loads the model and evaluates.

    Raises:
        UserError: If options, checkpoint and texts do not fit.
    """
    from megatron_ds.evaluation.scoring import Scorer

    source, model_config, tokenizer = open_checkpoint(options)
    length = model_config.seq_length
    stride = min(options.overlapping_eval, length)
    task = Task(options.task, tokenizer, length, stride, options.strict_lambada)
    with loaded_model(options, source) as (model, mesh):
        scorer = Scorer(model, mesh, options.micro_batch_size)
        # WikiText's files have a suffix of their own.
        format = "text" if options.task == WIKITEXT else "auto"
        documents = texts.read_texts(options.valid_data, options.json_keys, tokenizer, format)
        start = time.perf_counter()
        totals = task.evaluate(documents, lambda asked: scorer.score(_reported(asked)))
        seconds = time.perf_counter() - start
    if environment.rank() == 0:
        figures = task.figures(totals) | {"checkpoint": str(source.path)}
        log_rank0(f"scored {totals.tokens:,} tokens in {seconds:.1f} s")
        width = max(map(len, figures))
        for name, value in figures.items():
            shown = f"{value:.8g}" if isinstance(value, float) else value
            print(f"{name.replace('_', ' '):<{width}}  {shown}")
        if options.output is not None:
            with replace_text_file(options.output) as file:
                file.write(json.dumps(figures, indent=2) + "\n")


def _reported(requests: Iterator[ScoredText]) -> Iterator[ScoredText]:
    """The requests; prints how many there were, now and then."""
    due = time.perf_counter() + REPORT_SECONDS
    for number, request in enumerate(requests):
        if time.perf_counter() > due:
            due += REPORT_SECONDS
            log_rank0(f"scored {number:,} windows or texts")
        yield request


def main(argv: Sequence[str]) -> None:
    with output.exit_without_traceback():
        environment.adopt_ranks()
        options = cli.parse(Options, argv, rank=environment.rank())
        environment.prepare_environment()
        run(options)
