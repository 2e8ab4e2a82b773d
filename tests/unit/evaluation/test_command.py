"""The command line of an evaluation, and how it cuts and cleans texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ds import cli
from megatron_ds.evaluation import tasks, texts
from megatron_ds.evaluation.options import Options
from megatron_ds.evaluation.scoring import Score, windows
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import printed_codes, raises_problem

NUMBERS = NullTokenizer(90)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["one-evaluation-required"]),
        ("--valid-data FILE --tasks a", ["one-evaluation-required"]),
        ("--valid-data FILE --task PIQA", ["invalid-choice"]),
        ("--valid-data FILE.no", ["no-input-file"]),
        ("--valid-data FILE --overlapping-eval 0 --limit 0", ["out-of-range", "out-of-range"]),
        ("--valid-data FILE --tensor-model-parallel-size 2", ["evaluation-needs-whole-models"]),
        ("--valid-data FILE --output FILE/x", ["samples-folder-missing"]),
        ("--valid-data FILE --json-keys txt", ["document-without-text"]),
        ("--valid-data FILE EMPTY", ["file-without-text"]),
        ("--valid-data EMPTY --task WIKITEXT103", ["file-without-text"]),
    ],
)
def test_wrong_settings_are_reported_before_the_model_is_loaded(
    words: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "1 2"}\n', encoding="utf-8")
    empty = tmp_path / "empty.txt"
    empty.touch()
    words = words.replace("FILE", str(file)).replace("EMPTY", str(empty))
    arguments = ["--load", str(tmp_path), *words.split()]
    with pytest.raises(SystemExit) as end:
        cli.parse(Options, arguments)
    assert end.value.code == 2
    assert sorted(printed_codes(capsys.readouterr().err)) == expected


@pytest.mark.parametrize("stride", [1, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 5, 6, 7, 23])
def test_windows_score_each_token_but_the_first_once(size: int, stride: int) -> None:
    ids = list(range(size))
    cut = list(windows(ids, 5, stride))
    scored = [number for text in cut for number in text.ids[len(text.ids) - text.scored :]]
    assert scored == ids[1:]
    assert all(len(text.ids) <= 6 for text in cut)
    # But for the first window, each one has the tokens before those that it scores.
    assert all(len(text.ids) - text.scored == 6 - stride for text in cut[1:])


def test_documents_without_text_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": " "}) + '\n{"other": 1}\n', encoding="utf-8")
    with raises_problem("document-without-text"):
        list(texts.read_texts([str(file)], ["text"], NUMBERS))


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [("LAMBADA", "1", "cloze-without-context"), ("WIKITEXT103", "1", "nothing-to-score")],
)
def test_a_text_needs_something_to_predict(name: str, content: str, code: str) -> None:
    task = tasks.Task(name, NUMBERS, 5, 5, is_strict=True)
    with raises_problem(code):
        task.evaluate(iter([tasks.Text(content)]), lambda asked: (Score(0, True) for _ in asked))
