"""Files of benchmarks/certificates are accepted only with figures that can be."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator import certificate
from benchmarks.accelerator.models import SIZES
from benchmarks.accelerator.processes import Outcome
from megatron_ds.planning.hardware import HARDWARE

RANKS = 8
SECONDS = 0.2
FILES = sorted(certificate.FOLDER.glob("*.json"))


def values() -> dict[str, Any]:
    """A file of eight H100."""
    size = SIZES["124m"]
    speed = {
        "size": "124m",
        "micro_batch": 64,
        "seconds": SECONDS,
        "tokens_per_second": 64 * size.sequence * RANKS / SECONDS,
        "planned": 3e6,
        "planned_after": 3e6,
    }
    losses = [6.1, 6.0, 5.9]
    names = certificate.layouts(RANKS)
    return {
        "format": 1,
        "date": "2026-11-30",
        "commit": "abc",
        "device": "NVIDIA H100 80GB HBM3",
        "ranks": RANKS,
        "versions": {"torch": "2.13.0"},
        "rates": {"bf16_tflops": 740.0, "copy_tb_s": 2.9, "memory_gib": 79.0},
        "links": {"gb_s": 380.0, "latency_s": 3e-5},
        "collectives": [{"operation": "send", "passed": True}],
        "layouts": [{"name": name, "losses": list(losses)} for name in names],
        "speeds": [speed],
    }


def test_a_file_with_figures_that_can_be_is_accepted() -> None:
    assert certificate.problems(values()) == []


@pytest.mark.parametrize(
    ("keys", "to", "problem"),
    [
        (["rates", "bf16_tflops"], 1100.0, "rates.bf16_tflops"),
        (["rates", "copy_tb_s"], 3.6, "rates.copy_tb_s"),
        (["rates", "copy_tb_s"], float("nan"), "rates.copy_tb_s"),
        (["links", "gb_s"], 500.0, "links.gb_s"),
        (["collectives", 0, "passed"], False, "collectives"),
        (["collectives"], [], "collectives"),
        (["layouts", 1, "losses", 2], 5.9000001, "layouts, the same again"),
        (["layouts", 4, "losses", 0], 6.2, "layouts, tensor parallel"),
        (["layouts", 3, "losses"], [6.1], "layouts, ZeRO 3"),
        (["layouts"], [], "layouts: there are no losses"),
        (["speeds", 0, "seconds"], 0.1, "speeds, 124m"),
        (["speeds", 0, "size"], "125m", "speeds, 125m"),
        (["device"], None, "device"),
        (["ranks"], "8", "ranks"),
        (["speeds"], {}, "speeds"),
    ],
)
def test_figures_that_cannot_be_are_refused(keys: list[Any], to: Any, problem: str) -> None:
    changed = values()
    *path, last = keys
    target: Any = changed
    for key in path:
        target = target[key]
    target[last] = to
    (found,) = certificate.problems(changed)
    assert found.startswith(problem)


def test_a_speed_above_the_products_of_the_device_is_refused() -> None:
    changed = values()
    (speed,) = changed["speeds"]
    flops = SIZES["124m"].flops_per_token(is_causal=True)
    floor = 64 * SIZES["124m"].sequence * flops / 740e12
    for ratio, count in ((0.9, 1), (1.1, 0)):
        speed["seconds"] = ratio * floor
        speed["tokens_per_second"] = 64 * SIZES["124m"].sequence * RANKS / speed["seconds"]
        assert len(certificate.problems(changed)) == count


def test_a_plan_with_measured_rates_follows_them() -> None:
    size = SIZES["1.3b"]
    slow = values()
    slow["rates"]["bf16_tflops"] = 370.0
    seconds = [
        certificate.planned(size, RANKS, 8, certificate.with_measured_rates(each)).seconds
        for each in (values(), slow)
    ]
    assert 1.5 < seconds[1] / seconds[0] < 2.1
    assert certificate.with_measured_rates(values()).inside == 380e9
    assert certificate.hardware_of("NVIDIA H200") == HARDWARE["h200"]
    assert certificate.hardware_of("some card") is None


def test_measuring_continues_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    started: list[str] = []

    def run(words: Any, **_: Any) -> Outcome:
        started.append(str(words[0]))
        return Outcome(1, 0.0, "it failed")

    monkeypatch.setattr(certificate, "run", run)
    monkeypatch.setattr(certificate, "_commit", lambda: "abc")
    about = {key: values()[key] for key in ("device", "versions", "rates")}
    rows = list(certificate.measure(path, RANKS, about, tiny=True))
    assert started
    assert not any(row["passed"] for row in rows)
    assert json.loads(path.read_text())["speeds"] == []  # measured again the next time
    started.clear()
    speeds = [{"size": size} for size in certificate.TINY_SIZES]
    path.write_text(json.dumps(values() | {"speeds": speeds}))
    list(certificate.measure(path, RANKS, about, tiny=True))
    assert started == []
    other = copy.deepcopy(about) | {"device": "NVIDIA A100"}
    list(certificate.measure(path, RANKS, other, tiny=True))
    assert started  # another device is measured from the start


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_files_in_the_folder_are_accepted(path: Path) -> None:
    assert certificate.problems(json.loads(path.read_text("utf-8"))) == []


def test_the_devices_of_the_predictions_are_known() -> None:
    for kind in certificate.DEVICES.values():
        assert dataclasses.is_dataclass(HARDWARE[kind])
