"""tools/ladder.py on runs whose files are written by the tests."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.config.problems import ignore
from megatron_ds.ladder import command, runs
from megatron_ds.ladder.records import LadderRecord, RunEntry, read_ladder
from megatron_ds.launch.ranks import ray_cluster
from megatron_ds.slurm import command as slurm
from tests.unit.reports.run_files import event, start, steps, write_run

TOOL = command
RECIPE = """\
num-layers: 4
hidden-size: 256
num-attention-heads: 16
seq-length: 64
vocab-size: 127
tokenizer-type: NullTokenizer
mock-data: true
use-mup: true
mup-base-hidden-size: 64
mup-base-head-dim: 16
micro-batch-size: 4
global-batch-size: 64
train-iters: 4000
lr: 4e-3
lr-warmup-fraction: 0.05
eval-iters: 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the resampled laws of an interval takes as long as the law."""
    fit = command.fit_ladder
    monkeypatch.setattr(
        command,
        "fit_ladder",
        lambda ladder, options: fit(ladder, dataclasses.replace(options, resamples=20)),
    )


def law(run: RunEntry) -> float:
    """Losses of Hoffmann's form."""
    loss: float = 1.2 + 60 / run.parameters**0.34 + 80 / run.tokens**0.28
    return loss


def write_losses(
    ladder: LadderRecord, chosen: Sequence[RunEntry], loss: Callable[[RunEntry], float] = law
) -> None:
    """The files of complete runs."""
    for run in chosen:
        write_final(ladder.save_of(run), run, loss(run))


def write_final(folder: Path, run: RunEntry, loss: float, **settings: Any) -> Path:
    """The files of a run that has made its last step."""
    records = steps(range(run.steps - 2, run.steps + 1), consumed_tokens=run.tokens)
    records.append({"iteration": run.steps, "validation_loss": loss, "ppl": 1.0})
    begin = start(0, **settings)
    begin["config"]["model"] = {"hidden_size": run.hidden_size, "num_layers": run.layers}
    return write_run(folder, records, [begin, event("end", run.steps, status=0)])


def planned(run: Any, folder: Path, recipe: Path, *words: object) -> LadderRecord:
    run("plan", folder, *words, "--config", recipe)
    return read_ladder(folder)


def test_a_plan_has_the_settings_of_each_run(run: Any, recipe: Path, tmp_path: Path) -> None:
    """Claim (command-line): a ladder's runs train with the rate, data and remaining settings of
    the recipe"""
    ladder = planned(run, tmp_path / "ladder", recipe, "--budget", "10%")
    assert len(ladder.runs) == 4
    for entry in ladder.runs:
        words = ["--config", str(ladder.settings_of(entry))]
        config, problems = build_config(words, world_size=1, warn=ignore)
        assert problems == []
        assert config.model.hidden_size == entry.hidden_size < 256
        assert config.model.num_attention_heads == entry.hidden_size // 16
        assert (config.model.use_mup, config.model.mup_base_hidden_size) == (True, 64)
        assert (config.optimizer.lr, config.data.mock_data) == (4e-3, True)
        assert config.schedule.train_iters == entry.steps
        assert config.schedule.lr_warmup_fraction == 0.05
        assert config.schedule.global_batch_size == entry.samples
        assert config.checkpoint.save == config.checkpoint.load == str(ladder.save_of(entry))
    assert ladder.target.tokens == 4000 * 64 * 64


def test_seeds_repeat_each_run(run: Any, recipe: Path, tmp_path: Path) -> None:
    ladder = planned(run, tmp_path / "ladder", recipe, "--seeds", 2, "--sizes", 5e4, 2e5)
    assert [entry.seed for entry in ladder.runs] == [1234, 1235, 1234, 1235]
    assert len({entry.parameters for entry in ladder.runs}) == 2


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        (["--budget", "much"], 2, "ladder-not-a-budget"),
        (["--budget", "1e6"], 2, "ladder-budget-too-small"),
        (["--curriculum-seqlen", 8, 64, 100], 2, "ladder-of-changing-schedule"),
        (["--num-layers", 0], 2, "out-of-range"),
    ],
)
def test_impossible_ladders_are_refused(
    words: list[object], status: int, code: str, run: Any, recipe: Path, tmp_path: Path
) -> None:
    shown = run("plan", tmp_path / "new", *words, "--config", recipe, status=status)
    assert f"[{code}]" in shown.err
    assert not (tmp_path / "new").exists()


def test_a_plan_replaces_no_other_and_warns_without_mup(
    run: Any, recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text(RECIPE.replace("use-mup: true\n", ""))
    shown = run("plan", tmp_path / "new", "--budget", "10%", "--config", recipe)
    assert "[ladder-without-mup]" in shown.err
    assert "[ladder-exists]" in run("plan", tmp_path / "new", "--config", recipe, status=2).err
    assert "[ladder-missing]" in run("fit", tmp_path / "other", status=2).err


def test_complete_runs_are_fitted_and_judged(run: Any, recipe: Path, tmp_path: Path) -> None:
    """Claim (command-line): `ladder.py judge` tells from the large run's log whether its loss is in
    the predicted interval, also if it was shorter than planned"""
    words = ["--budget", "20%", "--tokens-per-parameter", 2, 5, 12]
    ladder = planned(run, tmp_path / "ladder", recipe, *words)
    target = ladder.target
    assert "[ladder-not-fitted]" in run("judge", ladder.folder, recipe, status=2).err
    write_losses(ladder, ladder.runs[:2])
    assert "[ladder-with-too-few-runs]" in run("fit", ladder.folder, status=2).err
    write_losses(ladder, ladder.runs)
    shown = run("run", ladder.folder).out
    assert str(ladder.folder / "report.html") in shown
    fitted = json.loads((ladder.folder / "fit.json").read_text())
    prediction = fitted["prediction"]
    assert prediction["terms"] == ["parameters", "tokens"]
    assert prediction["loss"] == pytest.approx(law(target), rel=0.02)
    assert prediction["low"] < prediction["loss"] < prediction["high"]
    good = write_final(tmp_path / "good", target, law(target))
    run("judge", ladder.folder, good)
    bad = write_final(tmp_path / "bad", target, 1.2 * law(target))
    run("judge", ladder.folder, bad, status=1)
    short = dataclasses.replace(target, steps=target.steps // 4, tokens=target.tokens // 4)
    run("judge", ladder.folder, write_final(tmp_path / "short", short, law(short)))
    run("judge", ladder.folder, write_final(tmp_path / "late", short, law(target)), status=1)
    other = dataclasses.replace(target, hidden_size=512)
    shown = run("judge", ladder.folder, write_final(tmp_path / "other", other, 2.0), status=2)
    assert "[ladder-of-other-model]" in shown.err


def test_a_ladder_of_one_length_is_fitted_by_operations(
    run: Any, recipe: Path, tmp_path: Path
) -> None:
    ladder = planned(run, tmp_path / "ladder", recipe, "--budget", "10%")
    write_losses(ladder, ladder.runs, lambda entry: 1.2 + 90 / entry.operations**0.12)
    run("fit", ladder.folder, "--output", tmp_path / "page.html")
    fitted = json.loads((ladder.folder / "fit.json").read_text())
    (only,) = fitted["laws"]
    assert only["terms"] == ["operations"]
    assert only["exponents"] == pytest.approx([0.12], rel=0.02)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg ") == 3
    for entry in ladder.runs:
        assert f"{entry.parameters:,}" in page


def test_only_runs_that_are_not_complete_are_trained(
    run: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (command-line): a ladder that was interrupted continues with the run that is not
    complete"""
    ladder = planned(run, tmp_path / "ladder", recipe, "--budget", "10%")
    trained: list[str] = []

    def train(ladder: LadderRecord, entry: RunEntry, *_: Any) -> int:
        trained.append(entry.name)
        if len(trained) == 3:
            return 130
        write_losses(ladder, [entry])
        return 0

    monkeypatch.setattr(runs, "_in_this_process", train)
    run("run", ladder.folder, "--only", "run-1")
    shown = run("run", ladder.folder, status=130)
    assert "[ladder-run-failed]" in shown.err
    assert trained == ["run-1", "run-0", "run-2"]
    assert not (ladder.folder / "fit.json").exists()
    assert "report.html" in run("run", ladder.folder).out
    assert trained[3:] == ["run-2", "run-3"]
    run("run", ladder.folder)
    assert len(trained) == 5
    assert "[ladder-without-run]" in run("run", ladder.folder, "--only", "x", status=2).err


def test_slurm_gets_an_array_of_the_runs_jobs(
    run: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (command-line): a ladder is one job array of Slurm, whose tasks are the job files of
    its runs"""
    calls = stand_ins(tmp_path, monkeypatch)
    ladder = planned(run, tmp_path / "a ladder", recipe, "--budget", "10%")
    write_losses(ladder, ladder.runs[1:2])
    run("run", ladder.folder, "--launcher", "slurm", "--time", 60, "--sbatch", "partition=gpu")
    array = ladder.folder / "slurm.sbatch"
    assert calls.read_text().splitlines() == [f"sbatch --parsable {array}"]
    text = array.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --array=0,2,3\n" in text
    for line in ("partition=gpu", "time=60", "requeue", "open-mode=append"):
        assert f"#SBATCH --{line}\n" in text
    assert text.count("--output=") == text.count("--job-name=") == 1
    assert not (ladder.save_of(ladder.runs[1]) / "slurm.sbatch").exists()
    # A task runs the job file of its run.
    job = ladder.save_of(ladder.runs[2]) / "slurm.sbatch"
    assert str(ladder.settings_of(ladder.runs[2])) in job.read_text()
    job.write_text('echo "$0"')
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "2"}
    done = subprocess.run(
        ["bash", array], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == job


@pytest.mark.parametrize("number", ["9", "7"])
def test_a_task_of_the_array_is_queued_again_and_shown_by_the_name_with_which_it_was_submitted(
    number: str,
    run: Any,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Claim (command-line): a task of a ladder's array is queued again alone, also the one whose
    number is that of the array, and `slurm.py status` shows how it has ended"""
    calls = stand_ins(tmp_path, monkeypatch)
    ladder = planned(run, tmp_path / "ladder", recipe, "--budget", "10%")
    words = ("run", ladder.folder, "--launcher", "slurm")
    run(*words)
    assert "[slurm-job-is-alive]" in run(*words, status=2).err
    write_run(ladder.save_of(ladder.runs[2]), [], [start(0), event("checkpoint", 4)])
    task = {
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
    }
    array = ladder.folder / "slurm.sbatch"
    done = subprocess.run(["bash", array], env={**os.environ, **task}, check=False)
    assert done.returncode == 143
    assert calls.read_text().splitlines()[-1] == "scontrol requeue 7_2"
    slurm.main(["status", str(ladder.save_of(ladder.runs[2]))])
    shown = capsys.readouterr().out
    assert "job 7_2: RUNNING" in shown
    assert "attempt ended with status 143 at iteration 4" in shown


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts stand-ins of Slurm's programs into PATH; returns the file with their calls."""
    programs = folder / "bin"
    programs.mkdir()
    calls = folder / "calls"
    fields = "JobState=RUNNING NodeList=n1 Restarts=0 RunTime=00:01 TimeLimit=08:00"
    show = f'[ "$1" = show ] && echo {fields}; true'
    for name, then in (("sbatch", "echo 7"), ("scontrol", show), ("srun", "exit 143")):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n{then}\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return calls


def test_ray_runs_this_program_for_each_run(
    run: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = planned(run, tmp_path / "ladder", recipe, "--budget", "10%")
    calls: list[SimpleNamespace] = []

    class Cluster:
        def __init__(self, address: str) -> None:
            self.address = address

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def run(self, commands: Any, cores: int, log: Any, *, noun: str) -> None:
            calls.append(SimpleNamespace(address=self.address, commands=commands, cores=cores))
            write_losses(ladder, ladder.runs)

    monkeypatch.setattr(ray_cluster, "RayCluster", Cluster)
    words = ["--launcher", "ray", "--ray-address", "head:6379", "--ray-cores", 2]
    assert "report.html" in run("run", ladder.folder, *words).out
    (call,) = calls
    assert (call.address, call.cores) == ("head:6379", 2)
    assert list(call.commands) == [entry.name for entry in ladder.runs]
    assert call.commands["run-3"][1:] == ["run", str(ladder.folder), "--only", "run-3"]
