"""The demo as a user runs it, with a smaller model and text.

Claim (checkpoints): a checkpoint generates from any folder without the original tokenizer files
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megatron_ds.demo import command, steps
from megatron_ds.demo import corpus as make_corpus
from tests.e2e.runs import Launcher, records
from tests.proofs.cases import with_proofs

ITERATIONS = 20
SMALL = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "2",
    "--seq-length": "128",
    "--lr-warmup-iters": "2",
    "--eval-interval": "10",
    "--eval-iters": "1",
    "--log-interval": "5",
}


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
    monkeypatch.chdir(steps.REPOSITORY)
    text = tmp_path / "my.jsonl"
    folder = tmp_path / "run"
    make_corpus.main(["--output", str(text), "--megabytes", "0.3"])
    monkeypatch.setattr(steps, "MODEL", smaller(steps.MODEL))
    monkeypatch.setattr(steps, "TRAINING", smaller(steps.TRAINING))
    monkeypatch.setattr(steps, "process_count", lambda: 1)
    monkeypatch.setattr(steps, "FIRST_ITERATIONS", ITERATIONS // 2)
    monkeypatch.setattr(steps, "FEWEST_ITERATIONS", ITERATIONS)
    monkeypatch.setattr(steps, "MOST_ITERATIONS", ITERATIONS)
    if forked:
        monkeypatch.setattr(command.subprocess, "call", launcher.call)

    code = command.main(["--data", str(text), "--output", str(folder)])

    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert text.is_file()
    found = records(folder / "checkpoints")
    iterations = [record["iteration"] for record in found if "lm_loss" in record]
    assert iterations == list(range(1, ITERATIONS + 1))
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
    assert re.search(rf"training loss .* in {ITERATIONS} iterations\n", printed.out)

    # The checkpoint has all that generation needs: not even the vocabulary is elsewhere.
    moved = (folder / "checkpoints").rename(tmp_path / "moved")
    shutil.rmtree(folder)
    tool = steps.REPOSITORY / "tools" / "generate_samples_gpt.py"
    options = ["--prompt", "One", "--out-seq-length", "4", "--greedy", "--load", "moved"]
    output = launcher.start(options, script=tool, folder=moved.parent).succeed()
    assert "Context: One\nGenerated: " in output
