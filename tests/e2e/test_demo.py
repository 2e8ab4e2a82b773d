"""The demo as a user runs it, with a smaller model and text.

Claim (checkpoints): a checkpoint generates from any folder without the original tokenizer files
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import Launcher, records
from tests.proofs.cases import with_proofs
from tests.tables import tables
from tools import demo, make_corpus

TABLES = tables(__file__)

ITERATIONS = 20
SMALL = TABLES["small"]


def smaller(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags with the values of SMALL."""
    before = (None, *flags)
    return tuple(SMALL.get(str(name), word) for name, word in zip(before, flags, strict=False))


@pytest.mark.parametrize("forked", with_proofs([True, False], [False]))
def test_the_demo_trains_resumes_and_generates_from_the_users_text(
    forked: bool,
    launcher: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Claim (command-line): `make demo` runs on the user's text"""
    monkeypatch.chdir(demo.REPOSITORY)
    text, folder = tmp_path / "my.jsonl", tmp_path / "run"
    make_corpus.main(["--output", str(text), "--megabytes", "0.3"])
    monkeypatch.setattr(demo, "MODEL", smaller(demo.MODEL))
    monkeypatch.setattr(demo, "TRAINING", smaller(demo.TRAINING))
    monkeypatch.setattr(demo, "process_count", lambda: 1)
    if forked:
        monkeypatch.setattr(demo.subprocess, "call", launcher.call)

    code = demo.main(["--data", str(text), "--output", str(folder)])

    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert text.is_file()
    found = records(folder / "checkpoints")
    steps = [record["iteration"] for record in found if "lm_loss" in record]
    assert steps == list(range(1, ITERATIONS + 1))
    loaded = rf"loaded checkpoint from \S+ at iteration +{ITERATIONS // 2}\n"
    assert re.search(loaded, printed.out + printed.err)
    assert (folder / "loss.png").stat().st_size > 1000
    last = {key: value for record in found for key, value in record.items()}
    for name in ("validation", "test"):
        assert re.search(rf"{name} loss +{last[f'{name}_loss']:.4f}", printed.out)
    unigram = json.loads((folder / "unigram.json").read_text())["loss"]
    # 20 steps of this small model do not get below the unigram loss; the summary must say so.
    better = unigram - last["validation_loss"]
    words = f"{abs(better):.2f} {'better' if better > 0 else 'WORSE'}"
    assert re.search(rf"unigram model +{unigram:.4f}: the GPT is {words}", printed.out)
    assert printed.out.count("Generated:") == 3

    # The checkpoint has all that generation needs: not even the vocabulary is elsewhere.
    moved = (folder / "checkpoints").rename(tmp_path / "moved")
    shutil.rmtree(folder)
    tool = demo.REPOSITORY / "tools" / "generate_samples_gpt.py"
    options = ["--prompt", "One", "--out-seq-length", "4", "--greedy", "--load", "moved"]
    output = launcher.start(options, script=tool, folder=moved.parent).succeed()
    assert "Context: One\nGenerated: " in output
