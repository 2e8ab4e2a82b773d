"""Options of an evaluation."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds.config.checks import output_problems
from megatron_ds.config.fields import ANY_VALUE, option_field, when
from megatron_ds.config.problems import Problem
from megatron_ds.evaluation import texts
from megatron_ds.evaluation.tasks import LAMBADA, PERPLEXITY, TASKS, format_of
from megatron_ds.inference.cli import GenerationOptions

TASK_NAMES = when(tasks=ANY_VALUE)
_of_tasks = functools.partial(option_field, only_with=TASK_NAMES)


@dataclass(frozen=True)
class ModelOptions(GenerationOptions):
    """Model options; the model may be replicated over groups of processes."""

    micro_batch_size: int = option_field(8, minimum=1)
    """Texts or windows per batch; does not affect the results."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size; groups of as many processes share the texts."""
        return self.checkpoint.tensor_model_parallel_size or 1

    def problems(self) -> Iterator[Problem]:
        yield from self.checkpoint.problems(is_replicated=True)


@dataclass(frozen=True)
class Options(ModelOptions):
    """Evaluates a trained GPT on texts: perplexity, and accuracy of predicting last words.

    Perplexity is of complete documents, each after the end of another one, in overlapping windows.
    It is printed per token, per word and, to compare models with other tokenizers, as bits per
    byte.
    WIKITEXT103 and LAMBADA are the tasks of Megatron-LM's tasks/main.py; --tasks runs tasks of
    lm-evaluation-harness.

    Flags of pretrain_gpt.py are accepted, too: tokenizer flags override the checkpoint's, model
    flags must agree with the checkpoint, other flags have no effect.
    """

    PROGRAM: ClassVar[str] = "evaluate.py"

    task: str = option_field(PERPLEXITY, choices=TASKS)
    """What is evaluated."""
    valid_data: tuple[str, ...] = option_field((), nargs="*", metavar="PATH")
    """Files, URLs or folders with documents (JSON lines, parquet, arrow, csv, tsv or plain text by
    suffix, optionally compressed), or prefixes of token files (.bin and .idx); LAMBADA's last words
    are those of the documents."""
    json_keys: tuple[str, ...] = option_field(("text",), nargs="*", metavar="KEY")
    """Keys of the texts of a document."""
    overlapping_eval: int = option_field(32, minimum=1)
    """Tokens by which a window is moved; all but these give context. A larger number is faster and
    gives a higher perplexity; at least the sequence length: windows do not overlap."""
    strict_lambada: bool = option_field(False, only_with=when(task=LAMBADA))
    """Predict the complete last word instead of the last token."""
    tasks: tuple[str, ...] = option_field((), nargs="*", metavar="NAME", aliases=("task-list",))
    """Names of tasks of lm-evaluation-harness, instead of --task; a list may be separated by
    commas."""
    num_fewshot: int | None = _of_tasks(None, minimum=0)
    """Examples before each question (default: the task's)."""
    limit: int | None = _of_tasks(None, minimum=1)
    """Questions of each task (default: all)."""
    include_path: tuple[str, ...] = _of_tasks((), nargs="*", metavar="FOLDER")
    """Folders with tasks of your own (YAML)."""
    output: str | None = option_field(None, metavar="FILE", aliases=("results-path",))
    """Output file (JSON)."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if bool(self.valid_data) == bool(self.tasks):
            yield Problem("one-evaluation-required")
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            yield Problem("harness-missing", "tasks")
        yield from texts.problems(self.valid_data, self.json_keys, format_of(self.task))
        if self.output is not None:
            yield from output_problems("output", self.output)
