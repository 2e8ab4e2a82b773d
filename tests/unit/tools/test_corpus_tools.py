"""Corpus, tokenizer, unigram loss and loss curve: the small tools of the demo."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_ds.tokenizer.gpt2 import GPT2BPETokenizer
from megatron_ds.training.loss_curves import read_curves
from tests.problems import printed_codes, raises_problem
from tests.token_files import write_pair, write_texts
from tools import make_corpus, plot_loss, train_tokenizer, unigram_loss


def test_corpus_is_real_text_and_deterministic(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    for path in (first, second):
        assert make_corpus.main(["--output", str(path), "--megabytes", "1"]) == 0

    texts = [json.loads(line)["text"] for line in first.read_text().splitlines()]

    assert first.read_bytes() == second.read_bytes()
    assert len(texts) > 20
    assert 0.5e6 < sum(len(text.encode()) for text in texts) <= 1e6
    assert sum("def " in text for text in texts) > len(texts) / 2


def test_sources_are_decoded_by_their_declared_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1"))
    (tmp_path / "broken.py").write_bytes(b"# coding: no-such-coding\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "excluded.py").write_text("pass\n")

    assert list(make_corpus.sources(tmp_path)) == ["# coding: latin-1\n# é\n"]


def test_trained_tokenizer_loads_as_gpt2_files(tmp_path: Path) -> None:
    text = "import os\nimport sys\nimport re\n" * 20 + "é€\n"
    corpus = write_texts(tmp_path / "corpus.jsonl", [text])

    flags = ["--vocab-size", "265", "--output-dir", str(tmp_path)]
    assert train_tokenizer.main(["--input", str(corpus), *flags]) == 0
    tokenizer = GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ids = tokenizer.encode(text)

    assert (tokenizer.vocab_size, tokenizer.eod) == (265, 264)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) / 2


def test_a_smaller_vocabulary_than_requested_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_texts(tmp_path / "corpus.jsonl", ["ab ab"])
    flags = ["--vocab-size", "300", "--output-dir", str(tmp_path)]
    assert train_tokenizer.main(["--input", str(corpus), *flags]) == 0
    assert printed_codes(capsys.readouterr().err) == ["vocabulary-smaller"]


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


def test_loss_is_plotted_to_terminal_and_png(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = metrics(tmp_path / "metrics.jsonl")
    picture = tmp_path / "loss.png"

    code = plot_loss.main(["--metrics", str(curve), "--output", str(picture), "--baseline", "6.5"])
    rows = [line.partition("|")[2] for line in capsys.readouterr().out.splitlines() if "|" in line]
    first_dots = [row.index(".") for row in rows if "." in row]

    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert first_dots == sorted(first_dots)
    assert len(first_dots) > 10
    assert sum(row.count("-") > 40 for row in rows) == 1
    assert sum("o" in row for row in rows) == 1


def test_steps_without_finite_loss_are_not_plotted(tmp_path: Path) -> None:
    curves = read_curves(metrics(tmp_path / "metrics.jsonl"))

    assert len(curves.train) == 39
    assert curves.validation == [(40, 4.5)]
    assert curves.test == [(40, 4.6)]


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"lm_loss": 1}', b'{"lm_loss": "x"}', b"\xff"])
def test_lines_that_are_no_metrics_are_rejected(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "lm_loss": 2.5}\n' + line)

    with raises_problem("metrics-line-invalid", contains="line 2"):
        read_curves(path)


def test_unknown_picture_format_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = metrics(tmp_path / "metrics.jsonl")
    assert plot_loss.main(["--metrics", str(curve), "--output", "loss.xyz"]) == 2
    assert printed_codes(capsys.readouterr().err) == ["plot-suffix"]


def test_a_folder_of_metrics_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot_loss.main(["--metrics", str(tmp_path)]) == 2
    assert printed_codes(capsys.readouterr().err) == ["not-a-file"]


def test_metrics_without_steps_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("")

    with raises_problem("metrics-without-steps"):
        read_curves(path)
