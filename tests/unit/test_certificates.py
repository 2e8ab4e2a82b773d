"""Files of benchmarks/certificates are accepted only with figures that can be."""

from __future__ import annotations

import json
import math
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accelerator import certificate, certificate_files, collectives
from benchmarks.accelerator.certificate_files import RefusedFileError
from benchmarks.accelerator.models import SIZES
from benchmarks.accelerator.processes import Outcome
from megatron_ds.planning.hardware import HARDWARE
from tests.pages import measured

RANKS = 8


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.json")
        path.write_text(json.dumps(changed))
        with (
            patch.object(certificate, "run", return_value=Outcome(1, 0.0, "it failed")),
            patch.object(certificate, "_commit", return_value=values()["commit"]),
            suppress(RefusedFileError),
        ):
            list(certificate.measure(path, RANKS, ABOUT, rates, tiny=False))


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


ABOUT = {key: values()[key] for key in ("device", "versions")}


def rates() -> dict[str, Any]:
    """The measured rates of the device."""
    measured: dict[str, Any] = values()["rates"]
    return measured


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of the programs of a measurement, which all fail."""
    commands: list[list[str]] = []

    def run(words: Any, **_: Any) -> Outcome:
        commands.append([str(word) for word in words])
        return Outcome(1, 0.0, "it failed")

    monkeypatch.setattr(certificate, "run", run)
    monkeypatch.setattr(certificate, "_commit", lambda: values()["commit"])
    return commands


def test_measuring_continues_where_it_ended(tmp_path: Path, started: list[list[str]]) -> None:
    path = tmp_path / "file.json"
    rows = list(certificate.measure(path, RANKS, ABOUT, rates, tiny=True))
    assert len(started) == 1 + len(certificate.layouts(RANKS)) + len(certificate.TINY_SIZES)
    assert [row["name"] for row in rows if row["passed"]] == ["rates of the device"]
    assert list(certificate.lines(rows[1]))[1:] == ["    it failed"]
    assert json.loads(path.read_text())["rates"] == rates()
    started.clear()
    layouts = values()["layouts"]
    content = json.loads(path.read_text()) | {"layouts": layouts[:-1]}
    path.write_text(json.dumps(content))
    list(certificate.measure(path, RANKS, ABOUT, dict, tiny=True))
    assert len(started) == 1 + 1 + len(certificate.TINY_SIZES)
    assert json.loads(path.read_text())["layouts"] == layouts[:-1]


def test_of_a_complete_file_nothing_is_measured(tmp_path: Path, started: list[list[str]]) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(values()))
    assert list(certificate.measure(path, RANKS, ABOUT, dict, tiny=False)) == []
    assert started == []
    assert json.loads(path.read_text()) == values()


def test_a_layout_that_ends_early_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first losses are no result."""
    monkeypatch.setattr(certificate, "_commit", lambda: values()["commit"])
    path = tmp_path / "file.json"
    content = values() | {"speeds": [], "layouts": []}
    path.write_text(json.dumps(content))
    outcomes: list[tuple[int, int]] = []

    def run(words: Any, **_: Any) -> Outcome:
        status, steps = outcomes.pop() if outcomes else (1, 0)
        if "--save" in words:
            lines = steps * [json.dumps({"lm_loss": 5.6})]
            Path(words[words.index("--save") + 1], "metrics.jsonl").write_text("\n".join(lines))
        return Outcome(status, 0.0, "")

    monkeypatch.setattr(certificate, "run", run)
    for status, steps, kept in ((1, 4, 0), (0, 2, 0), (0, 4, 1)):
        outcomes[:] = [(status, steps)]
        list(certificate.measure(path, RANKS, ABOUT, rates, tiny=True))
        assert len(json.loads(path.read_text())["layouts"]) == kept


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(values())[:500],
        "[]",
        "",
        "\0",
        json.dumps(values() | {"device": "NVIDIA A100"}),
        json.dumps(values() | {"ranks": 4}),
        json.dumps(values() | {"commit": "0123456789"}),
        json.dumps(values() | {"versions": {"torch": "2.12.0", "deepspeed": "0.19.8"}}),
        json.dumps(values() | {"speeds": [speed_of("tiny", 1.0)]}),
        json.dumps(values() | {"speeds": [{"size": "124m"}]}),
        json.dumps(values() | {"layouts": {}}),
        json.dumps(values() | {"collectives": [[]]}),
        json.dumps(values() | {"links": []}),
        json.dumps(values() | {"rates": None}),
        '{"command": "train", "name": "default"}\n',
    ],
)
def test_a_file_that_cannot_be_continued_stays(
    content: str, tmp_path: Path, started: list[list[str]]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(RefusedFileError, match=re.escape(str(path))):
        list(certificate.measure(path, RANKS, ABOUT, rates, tiny=False))
    assert path.read_text() == content
    assert started == []


@pytest.mark.parametrize(
    ("key", "value"), [("device", "some card"), ("commit", "unknown"), ("ranks", 9)]
)
def test_what_would_be_refused_is_not_measured(
    key: str, value: Any, tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = values() | {key: value}
    monkeypatch.setattr(certificate, "_commit", lambda: head["commit"])
    about = {"device": head["device"], "versions": head["versions"]}
    path = tmp_path / "file.json"
    (row,) = certificate.measure(path, head["ranks"], about, rates, tiny=False)
    assert row["name"].startswith(key)
    assert not row["passed"]
    assert started == []
    assert not path.exists()


def test_files_of_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    """Truncated, with a figure that cannot be, of tiny models, or a copy; two runs are accepted."""
    again = values()
    again["rates"]["bf16_tflops"] -= 1
    for name, content in (("a", values()), ("b", again)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert certificate_files.accepted(tmp_path) == {"a": values(), "b": again}
    fast = values()
    fast["speeds"][0]["seconds"] = 0.01
    tiny = values() | {"speeds": [speed_of(name, 1.0) for name in certificate.TINY_SIZES]}
    files = {
        "copy": json.dumps(values()),
        "fast": json.dumps(fast),
        "tiny": json.dumps(tiny),
        "truncated": json.dumps(values())[:-9],
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(RefusedFileError) as caught:
        certificate_files.accepted(tmp_path)
    lines = str(caught.value).splitlines()
    assert [Path(line.partition(".json")[0]).name for line in lines] == [
        "copy",
        *2 * ["fast"],
        "tiny",
        "truncated",
    ]


def test_files_in_the_folder_are_accepted() -> None:
    certificate_files.accepted(certificate.FOLDER)


def test_a_file_has_its_rows_on_the_page(tmp_path: Path) -> None:
    """Predicted rows of eight devices have its speeds, with the micro-batch if it is another."""
    content = values()
    smaller = content["speeds"][1]
    smaller["micro_batch"] //= 2
    smaller["tokens_per_second"] /= 2
    (tmp_path / "h100-8.json").write_text(json.dumps(content))
    lines = measured.certificates(tmp_path).splitlines()
    predicted = [line for line in lines if line.startswith("| 8 h100 |")]
    assert [row.rpartition(" | ")[2] for row in predicted] == [
        f"{row['tokens_per_second']:,.0f}{more} |"
        for row, more in zip(content["speeds"], ("", " (micro-batch 16)", "", ""), strict=True)
    ]
    assert sum(line.endswith("| none yet |") for line in lines) == 2 * len(predicted)
    assert sum("[h100-8](../../benchmarks/certificates/h100-8.json)" in line for line in lines) == 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Ascend910B", "910b"),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ],
)
def test_devices_are_known_by_their_names(name: str, kind: str | None) -> None:
    assert certificate.hardware_of(name) == (kind and HARDWARE[kind])
