"""tools/slurm.py with Slurm's programs replaced by scripts that record how they are called."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.programs import REPOSITORY
from megatron_ds.slurm import command
from megatron_ds.slurm.time_limit import seconds_of
from tests.unit.reports.run_files import event, start, steps, write_run

TOOL = command
GOLDEN = REPOSITORY / "tests" / "golden" / "slurm.sbatch"
JOB = "JobState={state} Reason=BeginTime Restarts=2 RunTime=00:01 TimeLimit=08:00 NodeList=n[1-2]"
FLAGS = shlex.split("""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --train-iters 8 --data-path 'two words'
    --tokenizer-type NullTokenizer --vocab-size 120""")


class Programs:
    """Slurm's programs in a folder of PATH, with their calls and the state of the job."""

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "calls"
        self._state = folder / "state"
        self.set_state("RUNNING")
        show = f'[ "$1" = show ] && exec cat {self._state}; true'
        for name, then in (("sbatch", "echo 7"), ("scontrol", show), ("srun", "exit 143")):
            path = folder / name
            path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self._calls}\n{then}\n')
            path.chmod(0o755)

    def set_state(self, state: str) -> None:
        self._state.write_text(JOB.format(state=state))

    @property
    def calls(self) -> list[str]:
        """The calls that change something."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line for line in lines if not line.startswith("scontrol show")]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(REPOSITORY)
    return Programs(folder)


def submit_words(run: Path, *others: object) -> list[object]:
    size = ["--nodes", "1-4", "--ranks-per-node", 2, "--time", "8:00:00"]
    return ["submit", run, *size, *others, *FLAGS]


def test_the_file_of_a_job_is_the_example_with_the_settings_of_the_run(
    run: Any, programs: Programs
) -> None:
    printed = run(*submit_words(Path("a run"), "--print", "--sbatch", "partition=gpu")).out
    subprocess.run(["bash", "-n"], input=printed, text=True, check=True)
    shown = printed.replace(sys.executable, "PYTHON").replace(str(REPOSITORY), "REPOSITORY")
    assert shown == GOLDEN.read_text()
    assert programs.calls == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a\ntouch pwned #", ()),
        ("a run", ("--sbatch", "comment=a\ntouch pwned")),
        ("a run", ("--sbatch", "comment=a\rb")),
    ],
)
def test_no_name_becomes_a_line_of_the_job(
    name: str, words: tuple[str, ...], run: Any, programs: Programs
) -> None:
    shown = run(*submit_words(Path(name), "--print", *words), status=2)
    assert "[job-file-control-character]" in shown.err
    assert "touch" not in shown.out


def test_a_run_is_submitted_once(run: Any, programs: Programs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "with 3 nodes it leaves some idle" in run(*submit_words(folder)).out
    assert programs.calls == [f"sbatch --parsable {folder / 'slurm.sbatch'}"]
    assert "[slurm-job-is-alive]" in run(*submit_words(folder), status=2).err
    programs.set_state("COMPLETED")
    (folder / "config.yaml").write_text("lr: 0.5\n")
    assert "num-layers is required" in run("submit", folder, "--ranks-per-node", 1, status=2).err


def test_all_problems_are_reported_before_the_submission(
    run: Any, programs: Programs, tmp_path: Path
) -> None:
    """Claim (command-line): the settings of a job are validated for each number of its nodes before
    it is submitted"""
    words = ["--sbatch", "nodes=4", "--time", "1", "--save", "other", "--load", "hf:model"]
    shown = run(*submit_words(tmp_path), *words, "--tensor-model-parallel-size", 16, status=2).err
    assert {
        "slurm-option-has-flag",
        "slurm-signal-before-start",
        "slurm-save-elsewhere",
        "slurm-load-elsewhere",
        "hub-model-without-owner",
        "world-size-not-divisible",
    } <= {*re.findall(r"\[([a-z-]+)\]$", shown, re.MULTILINE)}
    words = ["--nodes", "x", "--time", "soon", "--program", "no.py"]
    shown = run(*submit_words(tmp_path / "s3://"), *words, status=2).err
    assert {"slurm-not-nodes", "slurm-not-a-time", "run-missing"} <= {
        *re.findall(r"\[([a-z-]+)\]$", shown, re.MULTILINE)
    }
    assert "[slurm-nodes-unusable]" in run(*submit_words(tmp_path), "--nodes", "3-4", status=2).err
    assert programs.calls == []


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("8:00:00", 28800),
        ("2-12", 216000),
        ("2-12:01", 216060),
        ("1-0:0:1", 86401),
        ("UNLIMITED", None),
        ("1:2:3:4", None),
        ("", None),
    ],
)
def test_time_limits_are_read_as_sbatch_does(limit: str, seconds: int | None) -> None:
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize(
    ("status", "iterations", "state", "expected"),
    [
        (143, [4], "RUNNING", True),
        (4, [], "RUNNING", True),
        (6, [4], "RUNNING", True),
        (7, [4], "RUNNING", True),
        (137, [4, 4], "RUNNING", True),
        (143, [2, 4, 4], "RUNNING", True),
        (143, [8, 8, 8], "RUNNING", False),
        (143, [8], "COMPLETING", False),
        *((each, [4], "RUNNING", False) for each in (0, 1, 2, 3, 5, 130)),
    ],
)
def test_a_job_is_queued_again_while_its_run_may_continue(
    status: int,
    iterations: list[int],
    state: str,
    expected: bool,
    run: Any,
    programs: Programs,
    tmp_path: Path,
) -> None:
    """Each attempt before ended with 143, and left a checkpoint.

    Claim (command-line): a job is queued again after a signal, a lost rank and a hang, and not
    after errors, at the end of the run, or without progress
    """
    words = ["--job", 7, *FLAGS, "--save", tmp_path]
    (tmp_path / "slurm.jsonl").write_text('{"event": "sub')  # the disk was full
    for number, iteration in enumerate(iterations, start=1):
        write_run(tmp_path, [], [start(0), event("checkpoint", iteration)])
        is_last = number == len(iterations)
        programs.set_state(state if is_last else "RUNNING")
        code = status if is_last else 143
        run("restart", code, *words, status=code)
    if not iterations:
        run("restart", status, *words, status=status)
    requeued = ["scontrol requeue 7"] * (max(1, len(iterations)) - (not expected))
    assert programs.calls == requeued
    last = json.loads((tmp_path / "slurm.jsonl").read_text().splitlines()[-1])
    assert (last["status"], last["iteration"]) == (status, [0, *iterations][-1])


def test_of_a_run_without_a_folder_only_the_signal_of_the_time_limit_continues(
    run: Any, programs: Programs
) -> None:
    for save, status in (("s3://bucket/run", 4), ("s3://bucket/run", 143)):
        run("restart", status, "--job", 7, *FLAGS, "--save", save, status=status)
    run("restart", 143, "--job", 7, *FLAGS, status=143)
    assert programs.calls == ["scontrol requeue 7"]


def test_the_job_uses_the_most_nodes_on_which_the_run_can_train(
    run: Any, programs: Programs, tmp_path: Path
) -> None:
    file = tmp_path / "slurm.sbatch"
    file.write_text(run(*submit_words(tmp_path), "--print").out)
    given = {"SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_ON_NODE": "9", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", file], env={**os.environ, **given}, check=False)
    assert done.returncode == 143
    trains, requeues = programs.calls
    assert trains.startswith("srun --nodes=2 --ntasks-per-node=2 --cpus-per-task=4 ")
    assert trains.endswith(f"--vocab-size 120 --save {tmp_path} --load {tmp_path}")
    assert requeues == "scontrol requeue 7"


def test_status_and_tail_show_job_and_run(run: Any, programs: Programs, tmp_path: Path) -> None:
    assert "[slurm-no-job]" in run("status", tmp_path, status=2).err
    write_run(tmp_path, steps(range(1, 5)), [start(0)])
    ends = {"event": "end", "job": "7", "status": 143, "iteration": 4}
    records = [{"event": "submit", "job": "7"}, ends]
    (tmp_path / "slurm.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (tmp_path / "slurm.out").write_text("one\ntwo\nthree\n")
    shown = run("status", tmp_path).out
    assert "job 7: RUNNING on n[1-2], 00:01 of 08:00, 2 restarts" in shown
    assert "attempt ended with status 143 at iteration 4" in shown
    assert "iteration 4 of 8" in shown
    programs.set_state("PENDING")
    assert "job 7: PENDING (BeginTime)" in run("status", tmp_path).out
    programs.set_state("COMPLETED")
    assert run("tail", tmp_path, "--lines", 2).out == "two\nthree\n"
