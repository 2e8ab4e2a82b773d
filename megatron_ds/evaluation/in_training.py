"""The evaluations of a training run: --eval-tasks and --eval-only.

They change nothing in the training: random states are restored, and the model is back in the form
of the training when they end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_ds.config import EvaluationConfig
from megatron_ds.config.devices import is_host
from megatron_ds.config.options.evaluation import FileTask
from megatron_ds.config.problems import Problem, collect, renaming_fields
from megatron_ds.evaluation import texts
from megatron_ds.evaluation.scoring import NOTHING, Score, ScoredText, Scorer
from megatron_ds.evaluation.tasks import PERPLEXITY, Task, format_of
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer import Tokenizer

JSON_KEYS = ("text",)
FLAGS = {"tasks": "eval_tasks", "include_path": "eval_tasks_include_path"}
"""The run's options by the corresponding option of tools/evaluate.py."""


class Result(NamedTuple):
    """Result of a task."""

    name: str
    metrics: dict[str, float]
    is_perplexity: bool = False
    """Whether it is the loss of a file, like a validation loss."""


class Stopped(Exception):
    """The evaluation was interrupted."""


def problems(options: EvaluationConfig) -> Iterator[Problem]:
    """Problems with names and files; the first document of each file is read."""
    for task in options.file_tasks:
        yield from texts.problems([task.path], JSON_KEYS, format_of(task.name), task.field)
    if options.harness_tasks:
        from megatron_ds.evaluation import harness  # seconds

        unknown: list[Problem] = []
        with collect(unknown), renaming_fields(**FLAGS):
            harness.find_tasks(options.harness_tasks, options.eval_tasks_include_path)
        yield from unknown


@dataclass(frozen=True)
class TaskEvaluation:
    """Evaluates the model of a run.

    Reads the files, and loads the harness's tasks, which it may download.

    Attributes:
        options: The tasks.
        model: Context with this rank's shard in the form that generation needs.
        mesh: Data-parallel ranks share the work.
        tokenizer: The run's tokenizer.
        length: Largest number of tokens that the model reads at a time.
        batch_size: Texts of a forward pass.
        in_lockstep: See `Scorer`.
        device: Device whose random state is restored.

    Raises:
        UserError: If a file has nothing to evaluate, or a task of the harness cannot be loaded.
    """

    options: EvaluationConfig
    model: Callable[[], AbstractContextManager[GPTModel]]
    mesh: Mesh
    tokenizer: Tokenizer
    length: int
    batch_size: int
    in_lockstep: bool
    device: torch.device
    _loaded: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        options = self.options
        for task in options.file_tasks:  # what is wrong with a file must not end the run later
            self._figures(task, lambda asked: (NOTHING for _ in asked))
        if options.harness_tasks:
            from megatron_ds.evaluation import harness

            with renaming_fields(**FLAGS), restored_random_states(self.device):
                names = options.harness_tasks
                folders = options.eval_tasks_include_path
                self._loaded.extend(harness.load_tasks(names, folders))

    def run(self, is_stopped: Callable[[], bool]) -> list[Result]:
        """Evaluates every task. Collective.

        Args:
            is_stopped: Whether to interrupt the evaluation. Called equally often on every rank.

        Raises:
            Stopped: If `is_stopped` has returned True.
        """

        def check() -> None:
            if is_stopped():
                raise Stopped

        with restored_random_states(self.device), self.model() as model:
            scorer = Scorer(model, self.mesh, self.batch_size, self.in_lockstep, check)
            results = [self._file_result(task, scorer) for task in self.options.file_tasks]
            return [*results, *self._harness_results(scorer)]

    def _figures(
        self, task: FileTask, score: Callable[[Iterator[ScoredText]], Iterator[Score]]
    ) -> dict[str, float]:
        """Metrics of a file task, without token counts."""
        stride = min(self.options.overlapping_eval, self.length)
        work = Task(task.name, self.tokenizer, self.length, stride)
        documents = texts.read_texts(
            [task.path], JSON_KEYS, self.tokenizer, format_of(task.name), task.field
        )
        figures = work.figures(work.evaluate(documents, score))
        return {key: value for key, value in figures.items() if isinstance(value, float)}

    def _file_result(self, task: FileTask, scorer: Scorer) -> Result:
        name = self._file_name(task.path)
        figures = self._figures(task, scorer.score)
        if task.name == PERPLEXITY:
            return Result(name, figures, is_perplexity=True)
        return Result(f"{task.name}/{name}", figures)

    def _file_name(self, path: str) -> str:
        """The last part of the path, if no other path has the same."""
        names = Counter(Path(file).name for file in {one.path for one in self.options.file_tasks})
        name = Path(path).name
        return name if names[name] == 1 else path

    def _harness_results(self, scorer: Scorer) -> list[Result]:
        if not self._loaded:
            return []
        from megatron_ds.evaluation import harness

        fewshot = self.options.eval_tasks_num_fewshot
        limit = self.options.eval_tasks_limit
        results = harness.run_loaded(self._loaded, scorer, self.tokenizer, fewshot, limit)
        return [Result(name, metrics) for name, metrics in results.items() if metrics]


@contextmanager
def restored_random_states(device: torch.device) -> Iterator[None]:
    """Restores the random states of Python, NumPy and torch, which the harness seeds."""
    python = random.getstate()
    numpy = np.random.get_state()
    on_device = {} if is_host(device.type) else {"device_type": device.type}
    with torch.random.fork_rng([device] if on_device else [], **on_device):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
