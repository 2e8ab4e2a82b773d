from __future__ import annotations

import gzip
import itertools
import json
import sys
from pathlib import Path

import pytest

from megatron_ds.demo.command import run
from megatron_ds.demo.results import BAR_COUNT, MARK, bars, clear, step_seconds, summary
from megatron_ds.demo.steps import iterations_of, length_flags
from megatron_ds.demo.texts import prompt_prefixes, split_of
from tests.problems import raises_problem
from tests.token_files import write_texts


def test_clear_removes_only_results_of_a_demo(tmp_path: Path) -> None:
    (tmp_path / "loss.png").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").touch()
    (tmp_path / "mine.txt").touch()
    (tmp_path / MARK).touch()

    clear(tmp_path, None)

    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", MARK}


@pytest.mark.parametrize(
    ("name", "data", "code", "field"),
    [
        ("checkpoints", None, "demo-folder-not-empty", "output"),
        ("corpus.jsonl", "corpus.jsonl", "demo-data-among-results", "data"),
        ("loss.png", "missing.jsonl", "demo-data-missing", "data"),
    ],
)
def test_clear_keeps_what_may_be_no_result_of_a_demo(
    tmp_path: Path, name: str, data: str | None, code: str, field: str
) -> None:
    (tmp_path / name).touch()
    with raises_problem(code, field, contains=data or name):
        clear(tmp_path, tmp_path / data if data else None)
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(("documents", "split"), [(3, "1,1,1"), (100, "90,5,5")])
def test_validation_and_test_have_at_least_one_document(
    tmp_path: Path, documents: int, split: str
) -> None:
    assert split_of(write_texts(tmp_path / "a.jsonl", ["x"] * documents)) == split


def test_rejects_too_few_documents(tmp_path: Path) -> None:
    with raises_problem("demo-corpus-too-small", "data", contains="2"):
        split_of(write_texts(tmp_path / "a.jsonl", ["x"] * 2))


def test_prompts_are_prefixes_of_the_last_documents(tmp_path: Path) -> None:
    texts = ["first", "a b c d e f g h i j", "x" * 99, "last\none"]
    corpus = write_texts(tmp_path / "a.jsonl", texts)

    assert prompt_prefixes(corpus) == ["a b c d e f g h", "x" * 48, "last one"]


def test_prompts_are_from_held_out_documents(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "a.jsonl", [str(number) for number in range(40)])
    training = int(split_of(corpus).split(",")[0])

    assert all(int(prompt) >= training for prompt in prompt_prefixes(corpus))


@pytest.mark.parametrize("compressed", [False, True])
def test_corpus_is_read_like_the_tools_read_it(tmp_path: Path, compressed: bool) -> None:
    good = [json.dumps({"text": text}).encode() for text in ("first one", "second", "third")]
    bad = [b'{"text": "broken', b'{"txt": 1}', b'{"text": null}', b'{"text": "\xff"}', b"", b"[]"]
    content = b"\xef\xbb\xbf" + b"\n".join([*good, b'{"text": " "}', *bad])
    corpus = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    corpus.write_bytes(gzip.compress(content) if compressed else content)

    assert split_of(corpus) == "1,1,1"
    assert prompt_prefixes(corpus) == ["first one", "second", "third"]


def test_failing_command_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")

    with raises_problem("demo-command-failed", contains=f"{script} failed (exit code 3)"):
        run("a step", [sys.executable, script], tmp_path)


@pytest.mark.parametrize(
    ("validation", "comparison"), [(4.25, "the GPT is 1.75 better"), (6.5, "the GPT is 0.50 WORSE")]
)
def test_summary_compares_the_last_losses_with_the_unigram_model(
    tmp_path: Path, validation: float, comparison: str
) -> None:
    """Test runs are too short to get below the unigram loss."""
    (tmp_path / "checkpoints").mkdir()
    records = [
        {"iteration": 1, "validation_loss": 8.0},
        {"iteration": 2, "lm_loss": 7.5, "validation_loss": validation},
        {"iteration": 2, "test_loss": 7.0},
    ]
    metrics = tmp_path / "checkpoints" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "unigram.json").write_text('{"loss": 6.0}')

    shown = summary(tmp_path, 125.7, {"to make it": "make", "x": "y"})

    assert "Done in 2:05" in shown
    assert "training loss       7.5000 ▁ 7.5000 in 1 iterations" in shown
    assert shown.endswith("  to make it  make\n  x           y")
    assert f"validation loss     {validation:.4f}" in shown
    assert "test loss           7.0000" in shown
    assert f"unigram model       6.0000: {comparison}" in shown


@pytest.mark.parametrize(
    ("seconds", "count"), [(0.01, 300), (0.3, 300), (0.45, 200), (0.62, 145), (0.9, 100), (9, 100)]
)
def test_the_number_of_iterations_follows_from_the_time_of_a_step(
    seconds: float, count: int
) -> None:
    assert iterations_of(seconds) == count
    assert length_flags(count) == ["--train-iters", count, "--lr-wsd-decay-iters", count // 4]


def test_the_time_of_a_step_is_that_of_a_typical_one(tmp_path: Path) -> None:
    """Without the first ones, and whatever an evaluation or a pause takes."""
    times = [9.0] * 10 + [0.2, 0.25, 0.3, 30.0, 0.25]
    records = [{"iteration": at, "lm_loss": 1.0, "seconds": one} for at, one in enumerate(times)]
    lines = [*records, {"iteration": 15, "validation_loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert step_seconds(tmp_path) == 0.25


def test_bars_fall_with_the_loss() -> None:
    losses = [8 - 0.01 * step for step in range(300)]
    shown = bars(losses)
    assert len(shown) == BAR_COUNT
    assert (shown[0], shown[-1]) == ("█", "▁")
    assert all(first >= second for first, second in itertools.pairwise(shown))
    assert bars([2.0, 2.0]) == "▁▁"
