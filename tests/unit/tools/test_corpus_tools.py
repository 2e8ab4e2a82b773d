"""Corpus, tokenizer, unigram loss and loss curve: the small tools of the demo."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_ds.demo import corpus as make_corpus
from megatron_ds.evaluation import unigram_loss
from megatron_ds.reports import plot_loss
from megatron_ds.reports.charts import smooth
from megatron_ds.reports.history import names_of, read_history, read_run
from tests.problems import printed_codes, raises_problem
from tests.token_files import write_pair
from tests.unit.conftest import Run

TOOL = plot_loss


def test_sources_are_decoded_by_their_declared_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1"))
    (tmp_path / "broken.py").write_bytes(b"# coding: no-such-coding\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "excluded.py").write_text("pass\n")

    assert list(make_corpus.sources(tmp_path)) == ["# coding: latin-1\n# é\n"]


def test_unigram_loss_of_known_tokens(tmp_path: Path) -> None:
    """Training tokens 0 0 0 1, validation tokens 0 2, three ids: (3+1, 1+1, 0+1) / 7."""
    prefix = write_pair(tmp_path / "d", [[0, 0], [0, 1], [0, 2], [2, 2]])

    train, valid = unigram_loss.train_and_validation(prefix, "2,1,1")

    assert unigram_loss.unigram_loss(train, valid, 3) == pytest.approx(
        -(math.log(4 / 7) + math.log(1 / 7)) / 2
    )
    with raises_problem("token-outside-vocabulary", "vocab_size", contains="2"):
        unigram_loss.unigram_loss(train, valid, 2)


def metrics(path: Path) -> Path:
    records: list[dict[str, object]] = [
        {"iteration": i, "lm_loss": 8.0 - i / 10} for i in range(1, 41)
    ]
    records[10]["lm_loss"] = None
    records.append({"iteration": 40, "validation_loss": 4.5, "ppl": 90.0})
    records.append({"iteration": 40, "test_loss": 4.6, "ppl": 99.5})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_loss_is_plotted(tmp_path: Path, run: Run) -> None:
    curve = metrics(tmp_path / "metrics.jsonl")
    picture = tmp_path / "loss.png"

    printed = run("--metrics", curve, "--output", picture, "--baseline", 6.5).out

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert printed == f"wrote {picture}\n"


def run_folder(folder: Path, iterations: range, loaded: str | None = None) -> Path:
    """A --save folder whose steps take two seconds and 10 tokens."""
    (folder / f"global_step{iterations[-1]}").mkdir(parents=True)
    config = {"config": {"checkpoint": {"load": loaded}}}
    (folder / f"global_step{iterations[-1]}" / "run.json").write_text(json.dumps(config))
    records: list[dict[str, object]] = [
        {"iteration": i, "consumed_tokens": 10 * i, "lm_loss": 9.0 - i / 10, "seconds": 2.0}
        for i in iterations
    ]
    records.append({"iteration": iterations[-1], "validation_loss": 4.5, "ppl": 90.0})
    records.append({"iteration": iterations[-1], "test_loss": 4.6, "ppl": 90.0})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return folder


def test_a_curve_begins_with_that_of_the_run_that_is_continued(tmp_path: Path) -> None:
    first = run_folder(tmp_path / "a", range(1, 9))
    second = run_folder(tmp_path / "b", range(5, 11), str(first / "global_step8"))
    third = run_folder(tmp_path / "c", range(7, 10), str(second))
    resumed = third / "global_step12" / "run.json"
    resumed.parent.mkdir()
    resumed.write_text(json.dumps({"config": {"checkpoint": {"load": str(third)}}}))
    curves = read_run(third)
    assert [iteration for iteration, _ in curves.points()] == list(range(1, 10))
    assert curves.losses("validation") == [(9, 4.5)]
    assert [curves.axis(name)[-1] for name in ("iteration", "tokens", "time")] == [9, 90, 18.0]
    assert read_run(run_folder(tmp_path / "d", range(3, 5), "no-such-folder")).points()[0][0] == 3
    assert read_run(run_folder(tmp_path / "e", range(1, 5), str(first))).axis("time")[3] == 8.0


def test_smoothing_is_an_average_of_both_sides() -> None:
    assert smooth([4.0, 2.0, 8.0], 0.0) == [4.0, 2.0, 8.0]
    assert smooth([5.0] * 3, 0.9) == pytest.approx([5.0] * 3)
    assert smooth([4.0, 2.0, 8.0], 0.5) == pytest.approx([4.0, 4.0, 40 / 7])


@pytest.mark.parametrize("axis", ["iteration", "tokens", "time"])
def test_runs_are_plotted_together(axis: str, tmp_path: Path, run: Run) -> None:
    runs = [run_folder(tmp_path / name, range(1, 5)) for name in ("a", "b", "a2/b")]
    picture = tmp_path / "loss.svg"
    printed = run("--metrics", *runs[:2], "--output", picture, "--x", axis, "--baseline", 6.5)
    assert printed.out == f"wrote {picture}\n"
    # matplotlib names the texts of its glyphs in comments.
    written = picture.read_text()
    for text in ("a", "b", "validation", "test", "a, b", "baseline: 6.50"):
        assert f"<!-- {text} -->" in written
    unique = names_of([str(runs[1]), str(runs[2] / "metrics.jsonl")])
    assert unique == [str(runs[1]), str(runs[2] / "metrics.jsonl")]


def test_steps_without_finite_loss_are_not_plotted(tmp_path: Path) -> None:
    curves = read_history(metrics(tmp_path / "metrics.jsonl"))

    assert len(curves.points()) == 39
    assert curves.losses("validation") == [(40, 4.5)]
    assert curves.losses("test") == [(40, 4.6)]


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"lm_loss": 1}', b'{"lm_loss": "x"}', b"\xff"])
def test_lines_that_are_no_metrics_are_rejected(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "lm_loss": 2.5}\n' + line + b"\n")

    with raises_problem("metrics-line-invalid", contains="line 2"):
        read_history(path)


def test_unknown_picture_format_is_rejected(tmp_path: Path, run: Run) -> None:
    printed = run(metrics(tmp_path / "x"), "--output", "gone/loss.xyz", status=2)
    assert printed_codes(printed.err) == ["samples-folder-missing", "plot-suffix"]


def test_a_folder_without_metrics_is_named(tmp_path: Path, run: Run) -> None:
    printed = run("--metrics", tmp_path, status=2)
    assert printed_codes(printed.err) == ["run-without-metrics"]
    assert f"RUN {tmp_path}: " in printed.err


def test_metrics_without_steps_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("")

    with raises_problem("metrics-without-steps"):
        read_history(path)
