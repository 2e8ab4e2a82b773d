"""Steps with non-finite gradients end to end: logs, resume, and the limit.

Claim (non-finite): too many consecutive skipped steps stop the run with an explanation
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ds.launch.exit_codes import ExitCode
from tests.e2e.runs import Launcher, Settings, records, steps

FP16 = {"fp16": True, "allow_fp16_on_cpu": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}


def test_skips_are_counted_logged_and_survive_a_resume(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Scale, hysteresis and window are restored, so both runs skip the same steps."""
    settings = {**base, **FP16, "train_iters": 14, "lr_warmup_iters": 6}
    settings |= {"initial_loss_scale": 2**22, "loss_scale_window": 2}
    full = tmp_path / "full"
    parts = tmp_path / "parts"
    settings_full = {**settings, "save": full, "tensorboard_dir": full / "board"}
    output = launcher.start(settings_full, ranks=2).succeed()
    first = {**settings, "save": parts, "exit_interval": 4}
    launcher.start(first, ranks=2).succeed()
    resumed = launcher.start({**settings, "save": parts, "load": parts}, ranks=2)
    resumed.succeed()
    assert steps(parts) == steps(full)

    lines = records(full)
    skipped = [line["skipped"] for line in lines]
    scales = [line["loss_scale"] for line in lines]
    assert skipped[:3] == [True, True, True]  # the first uses up the hysteresis
    assert scales[:3] == [2**22, 2**21, 2**20]
    assert not all(skipped)
    assert any(later > before for before, later in itertools.pairwise(scales))
    # The learning rate does not change until a step is applied.
    rates = [line["learning_rate"] for line in lines]
    applied = skipped.index(False)
    assert set(rates[: applied + 1]) == {rates[0]}
    assert rates[applied + 1] != rates[0]
    for number, line in enumerate(lines, start=1):
        (printed,) = [text for text in output.splitlines() if f"iteration {number:8d}/" in text]
        assert f"number of skipped iterations: {int(line['skipped']):3d} |" in printed
        assert f"loss scale: {line['loss_scale']:.1f} |" in printed
    board = EventAccumulator(str(full / "board")).Reload()
    shown = [event.value for event in board.Scalars("loss-scale/loss-scale")]
    assert shown == scales


def test_a_broken_copy_of_a_weight_costs_one_step(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (non-finite): a gradient that is not finite in a copy that the norm does not count is
    skipped on all ranks, the good checkpoint before it stays, and the run is resumed"""
    settings = {**base, "global_batch_size": 8, "tensor_model_parallel_size": 2, "zero_stage": 1}
    settings |= {"attention_dropout": 0, "train_iters": 3, "save": tmp_path}
    settings |= {"save_interval": 1, "keep_last": 1}
    script = Path(__file__).with_name("broken_copy.py")
    output = launcher.start({**settings, "exit_interval": 2}, script=script, ranks=2).succeed()
    assert [record["skipped"] for record in records(tmp_path)] == [False, True]
    assert "[saved-after-skipped-step]" in output
    checkpoints = sorted(path.name for path in tmp_path.glob("global_step*"))
    assert checkpoints == ["global_step1", "global_step2"]

    output = launcher.start({**settings, "load": tmp_path}, ranks=2).succeed()
    assert f"loading checkpoint from {tmp_path} at iteration 2\n" in output
    assert "[checkpoint-skipped]" not in output
    assert [record["skipped"] for record in records(tmp_path)] == [False, True, False]
    assert [path.name for path in tmp_path.glob("global_step*")] == ["global_step3"]


@pytest.mark.parametrize(
    ("scale", "value"),
    [
        ({"loss_scale": 2**40, "max_consecutive_skipped_steps": 3}, "1.09951e+12"),
        (
            {"initial_loss_scale": 2**41, "min_loss_scale": 2**39, "hysteresis": 1},
            "--min-loss-scale 5.49756e+11",
        ),
    ],
    ids=["static", "dynamic"],
)
def test_a_run_that_skips_every_step_exits_with_an_error(
    launcher: Launcher, base: Settings, tmp_path: Path, scale: Settings, value: str
) -> None:
    settings = {**base, **FP16, **scale, "train_iters": 10, "save": tmp_path, "save_interval": 2}
    result = launcher.start(settings, ranks=2).wait()
    assert result.codes == (ExitCode.SKIPPED_STEPS, ExitCode.SKIPPED_STEPS)
    assert result.output.count("[too-many-skipped-steps]") == 1
    assert value in result.output
    assert "iteration 3: 3 consecutive steps" in result.output
    assert "Traceback" not in result.output
    assert f"Resume from {tmp_path / 'global_step2'}" in result.output
    assert "before iteration 1." in result.output
    assert "First non-finite gradient: " in result.output
    assert "on rank 0" in result.output
    assert [record["skipped"] for record in records(tmp_path)] == [True, True, True]
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == ["global_step2"]


def test_a_run_whose_last_steps_were_skipped_has_a_status_of_its_own(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """It is not ended before, because fewer steps are skipped in a row than the limit."""
    static = {**base, **FP16, "loss_scale": 2**40, "train_iters": 3, "save": tmp_path}
    result = launcher.start({**static, "max_consecutive_skipped_steps": 0}).wait()
    assert result.codes == (ExitCode.SKIPPED_STEPS,)
    assert result.output.count("[all-steps-skipped]") == 1
    assert [record["skipped"] for record in records(tmp_path)] == [True, True, True]
