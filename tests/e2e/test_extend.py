"""The programs of examples/extend/: runs with parts of their own, through the public names."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron_ds.conversion.native import open_native
from tests.e2e.runs import (
    RANKS,
    REPOSITORY,
    SCHEDULE,
    Launcher,
    Settings,
    checkpoint_differences,
    evaluations,
    losses,
    steps,
    to_flags,
)
from tests.problems import raises_problem
from tests.proofs.cases import with_proofs

EXAMPLES = REPOSITORY / "examples" / "extend"
WITHOUT_DROPOUT: Settings = {"attention_dropout": 0, "hidden_dropout": 0}
WRONG = """
from megatron_ds.extend import Extensions, Logger, pretrain
pretrain(Extensions(dataset=lambda request: [], loss=lambda logits: logits, loggers=[Logger]))
"""
LAYER = """
from megatron_ds.extend import Extensions, pretrain
pretrain(Extensions(layer=lambda builder: builder.mlp()))
"""
CROSS_ENTROPY = """
from torch.nn.functional import cross_entropy
from megatron_ds.extend import Extensions, pretrain
pretrain(Extensions(loss=lambda logits, labels: cross_entropy(logits, labels, reduction="none")))
"""
CONTROL = """
import sys
from megatron_ds.extend import Callback, Extensions, pretrain

class Control(Callback):
    def after_step(self, state, result):
        rank = int(__import__("os").environ["RANK"])
        if state.iteration == 2:
            self.control.learning_rate_factor = FACTOR
        self.control.log(own_figure=10 * state.iteration)
        if state.iteration == STOP and rank == 1:
            self.control.stop("seen enough")

record = pretrain(Extensions(callbacks=[Control()]))
print(f"record {record.status:d} {[*record.iterations]} {record.checkpoint}")
"""


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 50 for path in EXAMPLES.glob("*.py"))


def test_a_logger_writes_each_step_once_after_a_resume(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (extension): an own logger writes each step once, after a resume, too"""
    settings = {**base, "global_batch_size": 4, "save": tmp_path, "train_iters": 4}
    script = EXAMPLES / "logger.py"
    launcher.start({**settings, "save_interval": 2, "exit_interval": 3}, script=script).succeed()
    launcher.start({**settings, "load": tmp_path}, script=script, ranks=2).succeed()
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["lm_loss"]) for row in rows] == losses(tmp_path)


def test_a_callback_is_called_on_every_rank(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (extension): own callbacks are called on every rank"""
    settings = {**base, "global_batch_size": 4, "save": tmp_path, "train_iters": 3}
    settings |= {"eval_interval": 1, "eval_iters": 1}
    launcher.start(settings, script=EXAMPLES / "callback.py", ranks=2).succeed()
    known = [(one["validation_loss"], one["iteration"]) for one in evaluations(tmp_path)[:3]]
    loss, iteration = min(known)
    assert (tmp_path / "best.txt").read_text() == f"{iteration} {loss}\n"


def test_callbacks_change_the_rate_stop_the_run_and_log_figures(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (extension): callbacks scale the learning rate, log figures, and stop a run from one
    rank; a resumed run keeps the factor bit for bit, with the callback and without"""
    settings = {**base, "global_batch_size": 4, "train_iters": 6, "lr_decay_style": "linear"}
    script = tmp_path / "own.py"
    script.write_text(CONTROL.replace("FACTOR", "0.3").replace("STOP", "99"))
    whole = tmp_path / "whole"
    launcher.start({**settings, "save": whole}, script=script, ranks=2).succeed()
    stopping = tmp_path / "stopping.py"
    stopping.write_text(CONTROL.replace("FACTOR", "0.3").replace("STOP", "4"))
    parts = tmp_path / "parts"
    output = launcher.start({**settings, "save": parts}, script=stopping, ranks=2).succeed()
    assert f"record 0 [1, 2, 3, 4] {parts / 'global_step4'}" in output
    assert "exiting program at iteration 4 for a callback" in output
    launcher.start({**settings, "save": parts, "load": parts}, ranks=2).succeed()

    assert losses(parts) == losses(whole)
    assert not checkpoint_differences(parts / "global_step6", whole / "global_step6")
    rates = [step["learning_rate"] for step in steps(whole)]
    plain = [settings["lr"] * (1 - iteration / 6) for iteration in range(6)]
    assert rates == pytest.approx([*plain[:2], *(0.3 * rate for rate in plain[2:])])
    assert [step["own_figure"] for step in steps(whole)] == [10, 20, 30, 40, 50, 60]


def test_ranks_that_set_different_factors_end_the_run(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (extension): ranks whose callbacks set different factors of the learning rate end with
    an error"""
    script = tmp_path / "own.py"
    script.write_text(CONTROL.replace("FACTOR", "0.5 + rank").replace("STOP", "99"))
    settings = {**base, "global_batch_size": 4, "train_iters": 6, "save": tmp_path / "run"}
    result = launcher.start(settings, script=script, ranks=2).wait()
    assert set(result.codes) == {1}
    assert "[learning-rate-factors-differ]" in result.output
    assert "from 0.5 to 1.5" in result.output
    assert not list((tmp_path / "run").glob("global_step*"))


def test_a_part_that_does_not_fit_is_a_problem_before_the_start(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (extension): a part of the wrong type or with other arguments is reported before the
    start, with all other problems"""
    script = tmp_path / "own.py"
    script.write_text(WRONG)
    result = launcher.start({**base, "save": tmp_path / "run", "lr": -1}, script=script).wait()
    assert result.codes == (2,)
    assert result.output.count("[extension-with-other-arguments]") == 2
    assert "--lr -1.0" in result.output
    assert "[data-replaced]" in result.output
    assert not (tmp_path / "run").exists()


def test_an_own_cross_entropy_trains_like_the_built_in_one(
    launcher: Launcher, base: Settings, uninterrupted: Path, tmp_path: Path
) -> None:
    """Claim (extension): an own loss that repeats the cross entropy has the losses of the built-in
    one; with a sharded vocabulary, an own loss has those of one process"""
    script = tmp_path / "own.py"
    save = tmp_path / "run"
    script.write_text(CROSS_ENTROPY)
    launcher.start({**base, **SCHEDULE, "save": save}, script=script, ranks=RANKS).succeed()
    assert losses(save) == pytest.approx(losses(uninterrupted), rel=1e-6)
    for ours, theirs in zip(evaluations(save), evaluations(uninterrupted), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_an_own_loss_is_the_same_with_a_sharded_vocabulary(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (extension): an own loss that repeats the cross entropy has the losses of the built-in
    one; with a sharded vocabulary, an own loss has those of one process"""
    settings = {**base, **WITHOUT_DROPOUT, "train_iters": 3}
    for size in (1, 2):
        own = {"tensor_model_parallel_size": size, "save": tmp_path / str(size)}
        script = EXAMPLES / "loss.py"
        launcher.start({**settings, **own}, script=script, ranks=size).succeed()
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def test_a_run_on_an_own_dataset_resumes_bit_for_bit(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (extension): a resumed run on an own dataset continues bit for bit, and reads every
    item once per epoch; masked tokens have no loss"""
    lines = [{"prompt": "1 2 3", "answer": f"{n} {n + 1}"} for n in range(10)]  # two epochs
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    schedule = {"global_batch_size": 4, "train_iters": 5, "save_interval": 2, "eval_iters": 1}
    settings = {**base, **schedule, "data_path": None, "split": None}
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    for own in (
        {"save": whole, "num_workers": 1},
        {"save": resumed, "load": whole, "ckpt_step": 2},
    ):
        words = [str(tmp_path / "pairs.jsonl"), *to_flags({**settings, **own})]
        launcher.start(words, script=EXAMPLES / "dataset.py").succeed()
    assert steps(resumed) == steps(whole)[2:]
    assert not checkpoint_differences(resumed / "global_step5", whole / "global_step5")


@pytest.fixture(scope="module")
def own_layer(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of layer.py on one process."""
    save = tmp_path_factory.mktemp("layer")
    settings = {**base, **WITHOUT_DROPOUT, "train_iters": 3, "save": save, "save_interval": 2}
    launcher.start(settings, script=EXAMPLES / "layer.py").succeed()
    return save


@pytest.mark.parametrize("axis", with_proofs(["pipeline", "tensor"], ["pipeline"]))
def test_an_own_layer_trains_and_resumes_in_other_layouts(
    axis: str, launcher: Launcher, base: Settings, own_layer: Path, tmp_path: Path
) -> None:
    """Claim (extension): an own layer trains and resumes in every layout; its weights are not
    converted, or continued without it"""
    settings = {**base, **WITHOUT_DROPOUT, f"{axis}_model_parallel_size": 2, "train_iters": 3}
    settings |= {"load": own_layer, "ckpt_step": 2, "save": tmp_path, "sequence_parallel": True}
    launcher.start(settings, script=EXAMPLES / "layer.py", ranks=2).succeed()
    assert losses(tmp_path) == pytest.approx(losses(own_layer)[2:], rel=1e-5)


def test_weights_of_an_own_layer_stay_with_its_program(
    launcher: Launcher, base: Settings, own_layer: Path, tmp_path: Path
) -> None:
    """Claim (extension): an own layer trains and resumes in every layout; its weights are not
    converted, or continued without it"""
    with raises_problem("checkpoint-with-own-layer"):
        open_native(own_layer)
    settings = {**base, **WITHOUT_DROPOUT, "train_iters": 4}
    result = launcher.start({**settings, "load": own_layer}).wait()
    assert "[resume-part-changed]" in result.output
    (tmp_path / "own.py").write_text(LAYER)
    result = launcher.start(settings, script=tmp_path / "own.py").wait()
    assert "[layer-of-other-type]" in result.output
