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
    valid_data: tuple[str, ...] = option_field((), nargs="*", metavar="PATH")
    json_keys: tuple[str, ...] = option_field(("text",), nargs="*", metavar="KEY")
    overlapping_eval: int = option_field(32, minimum=1)
    strict_lambada: bool = option_field(False, only_with=when(task=LAMBADA))
    tasks: tuple[str, ...] = option_field((), nargs="*", metavar="NAME", aliases=("task-list",))
    num_fewshot: int | None = _of_tasks(None, minimum=0)
    limit: int | None = _of_tasks(None, minimum=1)
    include_path: tuple[str, ...] = _of_tasks((), nargs="*", metavar="FOLDER")
    output: str | None = option_field(None, metavar="FILE", aliases=("results-path",))

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if bool(self.valid_data) == bool(self.tasks):
            yield Problem("one-evaluation-required")
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            yield Problem("harness-missing", "tasks")
        yield from texts.problems(self.valid_data, self.json_keys, format_of(self.task))
        if self.output is not None:
            yield from output_problems("output", self.output)
