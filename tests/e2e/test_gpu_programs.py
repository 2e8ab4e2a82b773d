"""The programs for accelerators work: tried on the CPU with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator.processes import run
from benchmarks.accelerator.train import BARE, OURS

pytestmark = pytest.mark.proof


def measure(tmp_path: Path, command: str, *options: str) -> dict[str, Any]:
    output = tmp_path / "result.json"
    words = ["benchmarks/gpu.py", command, "--size", "tiny", "--output", output, *options]
    done = run(words, cpu=True)
    assert done.status == 0, done.output
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["machine"]["device"] == "cpu"
    return result


def test_smoke_runs_follow_the_cpu(tmp_path: Path) -> None:
    rows = measure(tmp_path, "smoke", "--jobs", "2")["runs"]
    assert [row["name"] for row in rows] == ["cpu", "fp32", "bf16", "generation"]
    fp32, bf16 = rows[1:3]
    assert len(fp32["losses"]) == 3
    assert fp32["difference"] == 0
    assert 0 < bf16["difference"] < 0.05


def test_throughput_is_measured_in_every_program(tmp_path: Path) -> None:
    found = measure(tmp_path, "train", "--compare", OURS, BARE)
    for row in found["contenders"]:
        assert row["tokens_per_second"] == pytest.approx(2 * 32 / row["seconds"])
        assert row["mfu"] > 0
        assert any("mm" in kernel["name"] for kernel in row["kernels"])


def test_trace_of_a_step_is_written(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    measure(tmp_path, "profile", "--trace", str(trace), "--flags", "--seed", "7")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_sweeps_report_what_a_device_lacks(tmp_path: Path) -> None:
    found = measure(tmp_path, "sweep")
    by_kernel = {row["kernel"]: row for row in found["attention"]}
    assert by_kernel["math"]["seconds"] > 0
    assert "failure" in by_kernel["cudnn_attention"]
    assert all(row["seconds"] > 0 for row in found["engine"])
    assert {"torch, fused", "torch, foreach"} <= {
        row["optimizer"] for row in found["optimizers"] if "seconds" in row
    }


def test_generation_is_measured_for_every_batch_size(tmp_path: Path) -> None:
    rows = measure(tmp_path, "generate")["generation"]
    assert [(row["name"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 2) for name in ("megatron_ds", "transformers")
    ]


def test_tests_of_the_device_run(tmp_path: Path) -> None:
    selected = "zero1-tp2 or moves or core"
    found = measure(tmp_path, "tests", "--flags", "tests/gpu", "--on-cpu", "-k", selected)
    assert found["tests"]["tests"] == 8
    assert found["tests"]["failures"] == found["tests"]["skipped"] == 0
