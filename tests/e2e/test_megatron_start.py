"""A run of Megatron that is continued here, in several layouts, and a model that it published."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from megatron_ds.loading.programs import convert as convert_checkpoint
from tests.e2e.runs import Launcher, Settings, steps

LOSSES = (5.560256, 5.651052, 5.564013)
NORMS = (1.072, 0.955, 0.869)
"""What the program that saved the checkpoint prints for the steps that follow it."""


def run_of(folder: Path, case: str) -> Settings:
    data = folder / "data"
    files = {"vocab_file": data / "vocab.json", "merge_file": data / "merges.txt"}
    files |= {"load": folder / case, "data_path": data / "tiny_text_document"}
    steps_of = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 6, "eval_iters": 0}
    adam = {"lr": 0.01, "lr_decay_style": "constant", "weight_decay": 0.01, "adam_beta2": 0.999}
    others = {"tokenizer_type": "GPT2BPETokenizer", "split": "90,5,5", "clip_grad": 1.0}
    others |= {"hidden_dropout": 0, "attention_dropout": 0, "log_interval": 1, "num_workers": 0}
    return {**files, **steps_of, **adam, **others}


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"tensor_model_parallel_size": 2, "zero_stage": 1}, 2),
        ({"pipeline_model_parallel_size": 2, "zero_stage": 1}, 2),
        pytest.param({"zero_stage": 3}, 2, marks=pytest.mark.proof),
    ],
)
def test_a_continued_run_has_the_losses_that_megatron_prints(
    layout: Settings, ranks: int, launcher: Launcher, megatron_checkpoints: Path, tmp_path: Path
) -> None:
    """Claim (checkpoints): a run of Megatron-LM continues with the losses and gradient norms that
    it would have printed, on several layouts"""
    settings = {**run_of(megatron_checkpoints, "mlm25_tp1"), **layout, "save": tmp_path}

    output = launcher.start(settings, ranks=ranks).succeed()

    found = steps(tmp_path)
    assert [record["iteration"] for record in found] == [4, 5, 6]
    assert [record["lm_loss"] for record in found] == pytest.approx(LOSSES, abs=2e-6)
    assert [record["grad_norm"] for record in found] == pytest.approx(NORMS, abs=6e-4)
    assert "at iteration 3, after 12 samples" in output


@pytest.mark.parametrize("target", ["torch_dist", "megatron"])
def test_an_export_continues_with_the_losses_that_megatron_prints(
    target: str, launcher: Launcher, megatron_checkpoints: Path, tmp_path: Path
) -> None:
    """From Megatron to a sharded run here, and by an export with optimizer states to another.

    Claim (checkpoints): a run of Megatron-LM that continues here, sharded, and from an export of
    it, has the losses that Megatron-LM prints
    """
    settings = run_of(megatron_checkpoints, "mlm25_tp1") | {"save": tmp_path / "ours"}
    sharded = {"zero_stage": 3} if target == "torch_dist" else {"tensor_model_parallel_size": 2}
    launcher.start({**settings, **sharded, "exit_interval": 4}, ranks=2).succeed()
    load = tmp_path / "ours"
    if target == "megatron":  # by way of the universal format
        load = tmp_path / "universal"
        flags = ["--load", tmp_path / "ours", "--save", load, "--to", "universal"]
        assert convert_checkpoint.main([*map(str, flags)]) == 0
    flags = ["--load", load, "--save", tmp_path / "theirs", "--to", target, "--optimizer-states"]
    assert convert_checkpoint.main([*map(str, flags)]) == 0

    settings |= {"load": tmp_path / "theirs", "save": tmp_path / "new"}
    output = launcher.start(settings).succeed()

    assert "at iteration 4, after 16 samples" in output
    found = steps(tmp_path / "new")
    assert [record["iteration"] for record in found] == [5, 6]
    assert [record["lm_loss"] for record in found] == pytest.approx(LOSSES[1:], abs=2e-6)
    assert [record["grad_norm"] for record in found] == pytest.approx(NORMS[1:], abs=6e-4)


def test_published_weights_start_a_run_that_resumes(
    launcher: Launcher, megatron_checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    case = shutil.copytree(megatron_checkpoints / "mlm25_tp1", folder)
    (case / "iter_0000003").rename(case / "release")
    (case / "latest_checkpointed_iteration.txt").write_text("release")
    settings = {**run_of(megatron_checkpoints, ""), "load": folder, "save": folder}

    output = launcher.start({**settings, "train_iters": 2}).succeed()

    assert "foreign-weights-alone" in output
    assert steps(folder)[0]["iteration"] == 1
    assert steps(folder)[0]["lm_loss"] < 5.5  # ln(300) is 5.7
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
    shape |= {"ffn_hidden_size": 128}
    output = launcher.start({**settings, **shape, "train_iters": 3}).succeed()
    assert re.search(r"loaded checkpoint from .* at iteration +2", output)
