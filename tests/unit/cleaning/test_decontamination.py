"""Decontamination: matching of task texts, and the remaining fragments of a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.cleaning.decontamination import Decontaminate, TaskOptions
from megatron_ds.cleaning.stages import Document, Dropped, SplitInto
from megatron_ds.config.problems import UserError
from tests.cleaning_runs import write
from tests.problems import codes, raises_problem

QUESTION = "Which of the seven old bridges over the river Pregel did nobody ever cross twice?"
SHORT = "The quick brown fox jumps over lazy dogs"


def stage(folder: Path, *values: Any, **options: Any) -> Decontaminate:
    small = {"contamination_margin_chars": 0, "min_fragment_chars": 0, **options}
    tasks = str(write(folder / "task.jsonl", *values))
    return Decontaminate(TaskOptions(eval_task_files=(tasks,), **small))


def ngrams(stage: Decontaminate) -> int:
    return int(stage.settings["eval_task_files"].split()[0])


def fragments(stage: Decontaminate, text: str) -> list[str]:
    outcome = stage(Document(text, None))
    assert isinstance(outcome, SplitInto)
    return outcome.texts


def test_sentences_with_a_match_are_removed(tmp_path: Path) -> None:
    decontaminate = stage(tmp_path, {"question": QUESTION})
    text = f"First one. Second, then: {QUESTION.upper()} Third. Fourth."
    assert fragments(decontaminate, text) == ["First one.", "Third. Fourth."]
    assert decontaminate(Document("First one. Second, then. Third.", None)) is None


def test_case_and_punctuation_are_ignored(tmp_path: Path) -> None:
    decontaminate = stage(tmp_path, QUESTION)
    text = "A. " + QUESTION.upper().replace(" ", " -- ") + " B! C."
    assert fragments(decontaminate, text) == ["A.", "B! C."]


def test_match_requires_thirteen_words(tmp_path: Path) -> None:
    decontaminate = stage(tmp_path, QUESTION)
    words = QUESTION.split()
    assert decontaminate(Document(" ".join(words[:12]), None)) is None
    assert decontaminate(Document(" ".join(words[:13]), None)) == Dropped("task text")
    assert decontaminate(Document(" ".join(words[2:]), None)) == Dropped("task text")


def test_short_task_matches_only_in_full(tmp_path: Path) -> None:
    decontaminate = stage(tmp_path, SHORT, "Too short to count as a task")
    assert ngrams(decontaminate) == 1
    assert fragments(decontaminate, f"A. {SHORT}. B.") == ["A.", "B."]
    assert decontaminate(Document("A. The quick brown fox jumps over lazy. B.", None)) is None
    assert decontaminate(Document("Too short to count as a task.", None)) is None


def test_margins_fragments_and_dropping(tmp_path: Path) -> None:
    text = "Far before. Near. " + QUESTION + " Near. Far after."
    with_margin = stage(tmp_path, QUESTION, contamination_margin_chars=4)
    assert fragments(with_margin, text) == ["Far before.", "Far after."]
    assert fragments(stage(tmp_path, QUESTION, min_fragment_chars=17), text) == [text[:17]]
    options: dict[str, Any]
    for options in ({"min_fragment_chars": 100}, {"contamination_action": "drop"}):
        outcome = stage(tmp_path, QUESTION, **options)(Document(text, None))
        assert outcome == Dropped("task text")
    many = "A. " + f"{QUESTION} B. " * 3
    assert len(fragments(stage(tmp_path, QUESTION, max_fragments=4), many)) == 4
    outcome = stage(tmp_path, QUESTION, max_fragments=3)(Document(many, None))
    assert outcome == Dropped("task text in too many places")


def test_fragments_of_real_text_are_clean(tmp_path: Path, shared_data: Path) -> None:
    """The fragments of all contaminated documents contain no task text."""
    lines = (shared_data / "openwebtext-1000.jsonl").read_text().splitlines()[:40]
    texts = [json.loads(line)["text"] for line in lines]
    tasks = [" ".join(text.split()[40:60]) for text in texts[:20]]
    decontaminate = stage(tmp_path, *tasks, contamination_margin_chars=200, min_fragment_chars=200)
    for number, text in enumerate(texts):
        outcome = decontaminate(Document(text, None))
        assert (outcome is not None) == (number < 20)
        for fragment in outcome.texts if isinstance(outcome, SplitInto) else []:
            assert fragment in text
            assert decontaminate(Document(fragment, None)) is None


def test_task_texts_are_all_strings_or_selected_keys(tmp_path: Path) -> None:
    value = {"id": 1, "inner": {"a": [SHORT]}, "question": QUESTION}
    of_question = len(QUESTION.split()) - 12
    assert ngrams(stage(tmp_path, value)) == 1 + of_question
    assert ngrams(stage(tmp_path, value, eval_task_keys=("question",))) == of_question
    path = tmp_path / "tasks.txt"
    path.write_text(f"{SHORT}\n\n{QUESTION}\n")
    tasks = TaskOptions(eval_task_files=(str(path),))
    assert ngrams(Decontaminate(tasks)) == 1 + of_question


def test_rejected_task_lines_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"q": "x"}\n{"q": \n5\n')
    with pytest.raises(UserError) as raised:
        Decontaminate(TaskOptions(eval_task_files=(str(path),), eval_task_keys=("question",)))
    problems = raised.value.problems
    assert codes(problems) == ["rejected-task"] * 3
    assert [str(problem).split(": ")[0] for problem in problems] == [
        f"--eval-task-files {path}:{n}" for n in (1, 2, 3)
    ]


def test_only_too_short_tasks_are_rejected(tmp_path: Path) -> None:
    with raises_problem("no-task-texts", "eval_task_files", "min_ngram_size"):
        stage(tmp_path, "a b c")
