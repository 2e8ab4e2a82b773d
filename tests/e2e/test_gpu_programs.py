"""The programs for accelerators work: tried on the CPU with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator import certificate, collectives
from benchmarks.accelerator.processes import REPOSITORY, Outcome, run
from benchmarks.gpu import CANARY_FAILED, FIRST

pytestmark = pytest.mark.proof

Rows = list[dict[str, Any]]


def start(command: str, *options: object) -> Outcome:
    return run(["benchmarks/gpu.py", command, "--size", "tiny", *options], cpu=True)


def measure(tmp_path: Path, command: str, *options: object) -> Rows:
    output = tmp_path / "results.jsonl"
    done = start(command, "--output", output, *options)
    assert done.status == 0, done.output
    return read(output)


def read(output: Path) -> Rows:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references") / "data"
    done = start("references", "--data", folder)
    assert done.status == 0, done.output
    return folder


def test_smoke_runs_follow_the_cpu(tmp_path: Path, references: Path) -> None:
    moved = tmp_path / "moved"
    references.rename(moved)
    try:
        rows = measure(tmp_path, "smoke", "--jobs", "2", "--data", moved)
    finally:
        moved.rename(references)
    found = {row["name"]: row for row in rows}
    assert found.keys() == {"fp32", "bf16", "generation"}
    assert len(found["fp32"]["losses"]) == 3
    assert found["fp32"]["difference"] == 0
    assert 0 < found["bf16"]["difference"] < 0.05


@pytest.mark.parametrize(("size", "count"), [("tiny", 2), ("tiny-bf16", 1)])
def test_throughput_is_measured_in_every_program(tmp_path: Path, size: str, count: int) -> None:
    """With several micro-batches a step, too."""
    options = ["--trace", tmp_path / "trace.json", "--cases", "default", "plain"]
    rows = measure(tmp_path, "train", "--size", size, *options)
    measured = [row for row in rows if "seconds" in row]
    assert len(rows) == 2
    assert len(measured) == count  # the bare loop trains GPT-2 only
    for row in measured:
        assert row["samples"] == (2 if size == "tiny" else 4)
        assert row["tokens_per_second"] == pytest.approx(row["samples"] * 32 / row["seconds"])
        assert row["mfu_of_measured"] > row["mfu"] > 0
        assert any("mm" in kernel["name"] for kernel in row["kernels"])
    names = {event.get("name") for event in json.loads(Path(options[1]).read_text())["traceEvents"]}
    assert "aten::mm" in names


@pytest.mark.parametrize("command", ["attention", "head", "engine", "optimizers", "disk"])
def test_sweeps_report_what_a_device_lacks(tmp_path: Path, command: str) -> None:
    rows = measure(tmp_path, command)
    lacking = {"cudnn_attention", "efficient_attention", "apex FusedAdam"}
    for row in rows:
        assert ("failure" in row) == (row["name"] in lacking) or row["seconds"] > 0, row


def test_messages_of_context_parallel_ranks_are_measured(tmp_path: Path) -> None:
    rows = measure(tmp_path, "context")
    assert [row["name"] for row in rows] == ["p2p", "all_gather"]
    for row in rows:
        assert min(row["seconds"], row["attention_seconds"], row["messages_seconds"]) > 0
        assert 0 <= row["hidden"] <= 1


def test_layers_and_steps_in_fp8_are_compared_with_bf16(tmp_path: Path) -> None:
    rows = measure(tmp_path, "fp8")
    layers = [row for row in rows if "inputs" in row]
    shapes = {(row["inputs"], row["outputs"]) for row in layers}
    assert shapes == {(64, 192), (64, 64), (64, 256), (256, 64)}
    recipes = ["tensorwise", "rowwise", "blockwise"]
    assert [row["name"] for row in layers] == ["bf16", *recipes] * 4
    assert all(("ratio" in row) == (row["name"] != "bf16") for row in layers)
    steps = [row for row in rows if "size" in row]
    assert [row["name"] for row in steps] == ["bf16", *recipes, "bf16 again"]
    assert steps[0]["ratio"] == 1 < len({row["tokens_per_second"] for row in steps})
    assert all(row["seconds"] > 0 for row in rows)


def test_generation_is_measured_for_every_batch_size(tmp_path: Path) -> None:
    rows = measure(tmp_path, "generate")
    assert [row["batch"] for row in rows] == 4 * [1] + 4 * [2]
    assert {"greedy", "transformers, greedy", "sampled"} < {row["name"] for row in rows}


def test_tests_of_the_device_run(tmp_path: Path) -> None:
    selected = ["--on-cpu", "-k", "zero1-tp2 or moves or core"]
    rows = measure(tmp_path, "tests", "--jobs", "2", "--flags", *selected)
    assert [row["name"] for row in rows] == ["kernels", "runs"]
    assert sum(row["tests"] for row in rows) >= 8
    assert all(row["failures"] == row["errors"] == 0 for row in rows)


def test_the_first_command_measures_stage_after_stage(tmp_path: Path, references: Path) -> None:
    rows = measure(tmp_path, "first", "--data", references, "--jobs", "2")
    stages = [row for row in rows if row["command"] == "first"]
    words = [each for stage in FIRST for each in (stage.words, stage.beside) if each is not None]
    assert [row["name"] for row in stages] == words
    assert {"about", "smoke", "train", "head", "attention"} < {row["command"] for row in rows}


def test_nothing_is_measured_after_a_failed_canary(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    done = start("first", "--data", tmp_path, "--output", output)
    assert done.status == CANARY_FAILED, done.output
    assert [row.get("skipped") for row in read(output)][-1] == "the canary failed"


def test_nothing_starts_when_the_budget_is_used(tmp_path: Path) -> None:
    (row,) = measure(tmp_path, "second", "--budget", "0")
    assert "no time" in row["skipped"]
    output = tmp_path / "killed.jsonl"
    done = start("train", "--budget", "3", "--output", output)
    assert done.status == 1
    assert done.seconds < 60
    assert "time limit" in read(output)[0]["output"]


def test_a_certificate_of_two_ranks_is_accepted(tmp_path: Path) -> None:
    """Its collectives, layouts and speeds; the second time, nothing is measured again."""
    output = tmp_path / "certificate.json"
    done = start("certificate", "--ranks", 2, "--output", output)
    assert done.status == 0, done.output
    values = json.loads(output.read_text(encoding="utf-8"))
    assert certificate.problems(values) == []
    operations = {row["operation"] for row in values["collectives"]}
    assert operations == {*collectives.OPERATIONS}
    assert {row["name"] for row in values["layouts"]} == certificate.layouts(2).keys()
    assert [row["size"] for row in values["speeds"]] == list(certificate.TINY_SIZES)
    again = start("certificate", "--ranks", 2, "--output", output)
    assert again.status == 0, again.output
    assert "passed" not in again.output


def test_a_certificate_that_is_ended_goes_on(tmp_path: Path) -> None:
    """SIGTERM leaves the figures so far and no process; a budget of nothing says what is missing"""
    output = tmp_path / "certificate.json"
    words = ["benchmarks/gpu.py", "certificate", "--size", "tiny", "--ranks", "1"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(
        [sys.executable, *words, "--output", output], cwd=REPOSITORY, env=environment
    ) as process:
        deadline = time.monotonic() + 300
        while not output.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    before = json.loads(output.read_text(encoding="utf-8"))
    assert before["speeds"] == []
    done = start("certificate", "--ranks", 1, "--output", output, "--budget", 0)
    assert done.status == 1
    assert "layouts: data parallel, the same again missing" in done.output
    assert json.loads(output.read_text(encoding="utf-8")) == before
    done = start("certificate", "--ranks", 1, "--output", output)
    assert done.status == 0, done.output
    values = json.loads(output.read_text(encoding="utf-8"))
    assert certificate.problems(values) == []
    assert values["rates"] == before["rates"]
    output.write_text("{", encoding="utf-8")
    done = start("certificate", "--ranks", 1, "--output", output)
    assert done.status == 2
    assert output.read_text(encoding="utf-8") == "{"
