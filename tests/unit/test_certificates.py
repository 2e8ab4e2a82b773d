"""Files of benchmarks/certificates are accepted only with figures that can be."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accelerator import certificate, certificate_rules, collectives
from benchmarks.accelerator.models import SIZES
from benchmarks.accelerator.processes import Outcome
from megatron_ds.planning.hardware import HARDWARE

RANKS = 8
FILES = sorted(certificate.FOLDER.glob("*.json"))


def values() -> dict[str, Any]:
    """A file of eight H100."""
    seconds = {"124m": 0.2, "345m": 0.25, "1.3b": 0.35, "llama-0.5b": 0.2}
    losses = [5.6, 5.5, 5.45, 5.4]
    return {
        "format": 1,
        "date": "2026-11-30",
        "commit": "abcdef12",
        "device": "NVIDIA H100 80GB HBM3",
        "ranks": RANKS,
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "rates": {"bf16_tflops": 740.0, "copy_tb_s": 2.9, "memory_gib": 79.6},
        "links": {"bytes": 2**28, "gb_s": 380.0, "latency_s": 3e-5},
        "collectives": [
            {"layout": sizes, "axis": axis, "operation": name, "ranks": 2, "passed": True}
            for sizes, axis, _ in collectives.groups_of(RANKS)
            for name in collectives.OPERATIONS
        ],
        "layouts": [{"name": name, "losses": list(losses)} for name in certificate.layouts(RANKS)],
        "speeds": [speed_of(name, seconds[name]) for name in certificate.MEASURED],
    }


def speed_of(name: str, seconds: float) -> dict[str, Any]:
    """The row of a size."""
    size = SIZES[name]
    micro_batch = size.micro_batches_for(80)[0]
    return {
        "size": name,
        "micro_batch": micro_batch,
        "seconds": seconds,
        "tokens_per_second": micro_batch * size.sequence * RANKS / seconds,
        "peak_bytes": 7e10,
        "planned": 3e6,
        "planned_after": 3e6,
    }


def test_a_file_with_figures_that_can_be_is_accepted() -> None:
    assert certificate.problems(values()) == []


@pytest.mark.parametrize(
    ("keys", "to", "problem"),
    [
        (["rates", "bf16_tflops"], 1100.0, "rates.bf16_tflops"),
        (["rates", "copy_tb_s"], 3.6, "rates.copy_tb_s"),
        (["rates", "copy_tb_s"], float("nan"), "rates.copy_tb_s"),
        (["rates", "memory_gib"], 140.0, "rates.memory_gib"),
        (["rates", "memory_gib"], "80", "rates.memory_gib"),
        (["links", "gb_s"], 500.0, "links.gb_s"),
        (["links", "gb_s"], "fast", "links.gb_s"),
        (["links", "latency_s"], -1.0, "links.latency_s"),
        (["collectives", 0, "passed"], False, "collectives"),
        (["collectives", 0, "passed"], "yes", "collectives.0.passed"),
        (["collectives", 0], "all", "collectives.0"),
        (["collectives"], [], "collectives"),
        (["layouts", 1, "losses", 2], 5.4500001, "layouts, the same again"),
        (["layouts", 4, "losses", 0], 5.7, "layouts, tensor parallel"),
        (["layouts", 3, "losses"], [5.6], "layouts, ZeRO 3"),
        (["layouts", 3, "losses", 1], "low", "layouts, ZeRO 3"),
        (["layouts", 3, "losses", 1], float("nan"), "layouts, ZeRO 3"),
        (["layouts", 3, "name"], "ZeRO 2", "layouts: ZeRO 3"),
        (["layouts"], [], "layouts: data parallel"),
        (["speeds", 0, "seconds"], 0.1, "speeds, 124m"),
        (["speeds", 0, "seconds"], 0, "speeds.0.seconds"),
        (["speeds", 0, "seconds"], float("inf"), "speeds.0.seconds"),
        (["speeds", 0, "micro_batch"], -64, "speeds.0.micro_batch"),
        (["speeds", 0, "peak_bytes"], 9e11, "speeds, 124m"),
        (["speeds", 0], speed_of("345m-2048", 1.0), "speeds, 345m-2048"),
        (["speeds", 0], speed_of("345m", 0.3), "speeds, 345m"),
        (["speeds"], [speed_of(name, 1.0) for name in certificate.MEASURED[:3]], "speeds: llama"),
        (["speeds"], {}, "speeds"),
        (["device"], None, "device"),
        (["device"], "NVIDIA Z900", "device"),
        (["ranks"], "8", "ranks"),
        (["ranks"], 0, "ranks"),
        (["format"], 2, "format"),
        (["date"], "2999-01-01", "date"),
        (["date"], "yesterday", "date"),
        (["commit"], "unknown", "commit"),
        (["versions", "deepspeed"], None, "versions.deepspeed"),
    ],
)
def test_figures_that_cannot_be_are_refused(keys: list[Any], to: Any, problem: str) -> None:
    changed = values()
    *path, last = keys
    target: Any = changed
    for key in path:
        target = target[key]
    target[last] = to
    found = certificate.problems(changed)
    assert found
    assert found[0].startswith(problem), found


def test_collectives_of_every_group_are_needed() -> None:
    """Of 64 ranks nothing is accepted, though each rank would be as fast."""
    changed = values()
    changed["collectives"] = changed["collectives"][:1]
    found = certificate.problems(changed)
    assert len(found) == len(list(collectives.groups_of(RANKS)))
    changed = values() | {"ranks": 64}
    for row in changed["speeds"]:
        row["tokens_per_second"] *= 8
    assert certificate.problems(changed)[0].startswith("ranks")


def test_a_layout_that_was_left_out_is_missing() -> None:
    changed = values()
    changed["layouts"] = [row for row in changed["layouts"] if row["name"] != "tensor parallel"]
    (found,) = certificate.problems(changed)
    assert found.startswith("layouts: tensor parallel")


@pytest.mark.parametrize("content", [None, [], {}, "text", {"ranks": 1}])
def test_any_content_is_judged_without_an_error(content: object) -> None:
    assert certificate.problems(content)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_of_a_file_is_judged_without_an_error(data: st.DataObject) -> None:
    changed: Any = values()
    target = changed
    while True:
        keys = sorted(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(target[key], dict | list) or not target[key] or data.draw(st.booleans()):
            break
        target = target[key]
    anything = [None, True, -1, 0, 10**30, 0.5, math.nan, math.inf, "", "x", [], {}, [[]], [{}]]
    target[key] = data.draw(st.sampled_from(anything))
    assert isinstance(certificate.problems(changed), list)


def test_a_speed_above_the_products_of_the_device_is_refused() -> None:
    changed = values()
    speed = changed["speeds"][0]
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
    monkeypatch.setattr(certificate, "_commit", lambda: "abcdef12")
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
    for kind in certificate_rules.DEVICES.values():
        assert dataclasses.is_dataclass(HARDWARE[kind])
