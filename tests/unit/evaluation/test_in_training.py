"""The tasks of a training run: what is checked before it starts, and what it leaves unchanged.

Claim (serving): unknown tasks, missing files and unusable documents are errors before the first
step
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ds.config import Config, EvaluationConfig
from megatron_ds.evaluation import in_training
from megatron_ds.evaluation.in_training import TaskEvaluation, restored_random_states
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import codes, raises_problem


def options(**values: Any) -> EvaluationConfig:
    return Config().with_values(values).evaluation


def evaluation(tasks: EvaluationConfig) -> TaskEvaluation:
    return TaskEvaluation(
        tasks,
        contextlib.nullcontext,  # type: ignore[arg-type]
        Mesh.single(),
        NullTokenizer(90),
        length=8,
        batch_size=2,
        in_lockstep=False,
        device=torch.device("cpu"),
    )


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_random_states_are_restored() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    with contextlib.suppress(KeyError), restored_random_states(torch.device("cpu")):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)
        raise KeyError
    assert draw() == expected


def test_names_are_separated_by_commas_and_spaces_and_files_have_a_task() -> None:
    found = options(eval_tasks=("a,b", "LAMBADA=x,y.jsonl", "c,", "perplexity=z"), eval_only=("w",))
    assert found.harness_tasks == ("a", "b", "c")
    assert found.file_tasks == (
        ("LAMBADA", "x,y.jsonl", "eval_tasks"),
        ("perplexity", "z", "eval_tasks"),
        ("perplexity", "w", "eval_only"),
    )


def test_the_harness_is_needed_for_its_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = options(eval_tasks=("LAMBADA=x", "hellaswag")).problems()
    assert (problem.code, problem.fields) == ("harness-missing", ("eval_tasks",))
    assert codes(options(eval_tasks=("LAMBADA=x",)).problems()) == []


def test_missing_files_are_reported_before_the_start() -> None:
    found = list(in_training.problems(options(eval_tasks=("LAMBADA=/no/a",), eval_only=("/no/b",))))
    assert [(each.code, each.fields) for each in found] == [
        ("no-input-file", ("eval_tasks",)),
        ("no-input-file", ("eval_only",)),
    ]


def test_files_are_read_before_the_first_step(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "1 2"}\n{"text": "3"}\n', encoding="utf-8")
    with raises_problem("cloze-without-context"):
        evaluation(options(eval_tasks=(f"LAMBADA={file}",)))


def test_files_with_equal_names_are_named_by_their_paths(tmp_path: Path) -> None:
    files = [tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt", tmp_path / "y.txt"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("1 2 3", encoding="utf-8")
    found = evaluation(options(eval_only=tuple(map(str, files))))
    names = [found._file_name(str(file)) for file in files]
    assert names == [str(files[0]), str(files[1]), "y.txt"]
