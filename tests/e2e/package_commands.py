"""What a user does, as commands: text, training, resuming, export and back.

tests/versions/bounds.py runs this file with other versions of packages. `make test` does not
collect it: its tests have each of these commands, with more cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.e2e.runs import REPOSITORY, Launcher, Settings, losses, to_flags

ITERATIONS = 4
MODEL: Settings = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
TRAINING: Settings = {
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": ITERATIONS,
    "lr": 1e-3,
    "zero_stage": 1,
    "log_interval": 1,
    "eval_iters": 1,
}
LAYOUTS: dict[int, Settings] = {
    1: {},
    2: {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
"""Ranks -> settings."""
SHARDED = pytest.mark.parametrize("layout", [2], indirect=True, scope="module")
"""Only of the run of two ranks, whose checkpoints have shards of the weights."""


@pytest.fixture(scope="module", autouse=True)
def _deadline() -> Iterator[None]:
    """The machine may also install other environments meanwhile."""
    with patch("tests.e2e.runs.DEADLINE", 1800.0):
        yield


@pytest.fixture(scope="module")
def settings(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A model, a tokenizer and token files, from a text."""
    folder = tmp_path_factory.mktemp("commands")
    text = folder / "text.jsonl"
    tokenizer: Settings = {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": folder / "vocab.json",
        "merge_file": folder / "merges.txt",
    }
    run_tool(launcher, "make_corpus", output=text, megabytes=0.2)
    run_tool(launcher, "train_tokenizer", input=text, vocab_size=400, output_dir=folder)
    prefix = folder / "text"
    run_tool(
        launcher, "preprocess_data", input=text, output_prefix=prefix, append_eod=True, **tokenizer
    )
    return {**MODEL, **TRAINING, **tokenizer, "data_path": f"{prefix}_text_document"}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> int:
    """A number of ranks."""
    return int(request.param)


@pytest.fixture(scope="module")
def checkpoints(
    launcher: Launcher, settings: Settings, layout: int, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Of a run that ended halfway and was resumed."""
    save = tmp_path_factory.mktemp("resumed")
    run = {**settings, **LAYOUTS[layout], "save": save, "load": save}
    launcher.start({**run, "exit_interval": ITERATIONS // 2}, ranks=layout).succeed()
    assert len(losses(save)) == ITERATIONS // 2
    launcher.start({**run, "tensorboard_dir": save / "events"}, ranks=layout).succeed()
    assert list((save / "events").glob("events.*"))
    return save


def run_tool(launcher: Launcher, name: str, *words: object, **flags: object) -> str:
    """The output of a tool, which must succeed."""
    options = [*map(str, words), *to_flags(flags)]
    return launcher.start(options, script=REPOSITORY / "tools" / f"{name}.py").succeed()


def test_a_resumed_run_equals_an_uninterrupted_one(
    launcher: Launcher, settings: Settings, layout: int, checkpoints: Path, tmp_path: Path
) -> None:
    run = {**settings, **LAYOUTS[layout], "save": tmp_path}
    launcher.start(run, ranks=layout).succeed()

    assert len(losses(tmp_path)) == ITERATIONS
    assert losses(checkpoints) == losses(tmp_path)


@SHARDED
def test_an_export_is_the_model_of_transformers_and_reads_back(
    launcher: Launcher, checkpoints: Path, tmp_path: Path
) -> None:
    exported, back, again = (tmp_path / name for name in ("exported", "back", "again"))
    tool = "convert_checkpoint"
    run_tool(launcher, tool, load=checkpoints, save=exported, to="hf", verify=True)
    run_tool(launcher, tool, load=exported, save=back, to="native", verify=True)
    run_tool(launcher, tool, load=back, save=again, to="hf")

    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (exported / weights).read_bytes()
    options = {"prompt": "import os", "out_seq_length": 4, "greedy": True}
    output = run_tool(launcher, "generate_samples_gpt", load=exported, **options)
    assert "Generated: " in output


@SHARDED
def test_the_losses_are_plotted_and_reported(
    launcher: Launcher, checkpoints: Path, tmp_path: Path
) -> None:
    figure = tmp_path / "loss.png"
    page = tmp_path / "report.html"
    run_tool(launcher, "plot_loss", checkpoints, output=figure)
    run_tool(launcher, "report", checkpoints, output=page)

    assert figure.stat().st_size > 1000
    assert page.stat().st_size > 1000
