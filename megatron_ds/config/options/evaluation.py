"""Options of evaluation: validation and test, tasks during training, and files."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import NamedTuple

from megatron_ds.config.fields import ANY_VALUE, Decides, option_field, when
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

FILE_TASKS = ("perplexity", "WIKITEXT103", "LAMBADA")
"""Tasks of --eval-tasks that read a file."""

_of_eval_tasks = functools.partial(option_field, only_with=when(eval_tasks=ANY_VALUE))


class FileTask(NamedTuple):
    """A task on a file."""

    name: str
    """One of FILE_TASKS."""
    path: str
    field: str
    """The option that has the path."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation: validation and test, tasks and files."""

    DECIDES = Decides.OPERATION

    eval_interval: int | None = option_field(1000, minimum=1, zero_is_off=True, common=True)
    """Number of iterations between validations."""
    eval_iters: int = option_field(100, minimum=0)
    """Number of global batches per validation and test; 0 disables them."""
    skip_train: bool = option_field(False)
    """Skip training; only evaluate on validation and test."""
    eval_tasks: tuple[str, ...] | None = option_field(None, nargs="*", metavar="TASK")
    """Tasks that are evaluated during training: names of lm-evaluation-harness, separated by commas
    or spaces, and perplexity=FILE, WIKITEXT103=FILE or LAMBADA=FILE."""
    eval_tasks_interval: int | None = _of_eval_tasks(None, minimum=1)
    """Number of iterations between evaluations of --eval-tasks (default: --eval-interval)."""
    eval_tasks_include_path: tuple[str, ...] = _of_eval_tasks((), nargs="*", metavar="FOLDER")
    """Folders with tasks of your own (YAML) for --eval-tasks."""
    eval_tasks_num_fewshot: int | None = _of_eval_tasks(None, minimum=0)
    """Examples before each question of --eval-tasks (default: the task's)."""
    eval_tasks_limit: int | None = _of_eval_tasks(None, minimum=1)
    """Questions of each of --eval-tasks (default: all)."""
    eval_only: tuple[str, ...] | None = option_field(
        None, nargs="*", metavar="FILE", decides=Decides.RUN
    )
    """Skip training; evaluate the loss of these files, in the formats of tools/evaluate.py, and no
    other data."""
    overlapping_eval: int = option_field(
        32, minimum=1, only_with=when(eval_tasks=ANY_VALUE, eval_only=ANY_VALUE)
    )
    """Tokens by which a window of --eval-only and of --eval-tasks with a file is moved, as in
    tools/evaluate.py."""

    @property
    def trains(self) -> bool:
        """Whether the run takes steps, and does not only evaluate."""
        return not self.skip_train and self.eval_only is None

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """The names in --eval-tasks that are the harness's."""
        entries = (entry for entry in self.eval_tasks or () if not _is_file_task(entry))
        return tuple(name for entry in entries for name in entry.split(",") if name)

    @property
    def file_tasks(self) -> tuple[FileTask, ...]:
        """The tasks on files of --eval-tasks and --eval-only."""
        entries = (entry for entry in self.eval_tasks or () if _is_file_task(entry))
        pairs = (entry.split("=", 1) for entry in entries)
        return (
            *(FileTask(name, path, "eval_tasks") for name, path in pairs),
            *(FileTask(FILE_TASKS[0], path, "eval_only") for path in self.eval_only or ()),
        )

    def problems(self) -> Iterator[Problem]:
        """Tasks that cannot be evaluated."""
        if self.harness_tasks and importlib.util.find_spec("lm_eval") is None:
            yield Problem("harness-missing", "eval_tasks")
        for folder in self.eval_tasks_include_path if self.eval_tasks is not None else ():
            if not os.path.isdir(folder):
                yield Problem("task-folder-missing", folder=folder)
        has_tasks = self.eval_tasks is not None or self.eval_only is not None
        if self.skip_train and self.eval_iters == 0 and not has_tasks:
            yield Problem("nothing-to-evaluate")


def _is_file_task(entry: str) -> bool:
    return entry.startswith(tuple(f"{name}=" for name in FILE_TASKS))
