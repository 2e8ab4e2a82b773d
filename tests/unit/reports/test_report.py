"""The page of a report, and its tool."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.reports import charts, report
from tests.unit.reports.run_files import event, start, steps, write_run

TOOL = report
SHOWN = ("loss-iteration", "loss-time", "scaling")
"""Charts that the test draws, which takes a tenth of a second each."""


class Page(HTMLParser):
    """Tags, attributes and text of a page, whose tags must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_needs_nothing_else_and_describes_its_charts(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (logging): the charts and tables of a report are computed from the files of the runs,
    and its page needs no other file"""

    def some_charts(*arguments: Any) -> list[charts.Chart]:
        found = charts_of(*arguments)
        return [each for each in found if each.name in SHOWN]

    charts_of = charts.charts_of
    monkeypatch.setattr(charts, "charts_of", some_charts)
    warning = event("warning", 3, text="a <b> & 'c'")
    for name, ranks in (("one", 1), ("two", 2)):
        records = steps(range(1, 7), loss_scale=1024.0)
        records.append({"iteration": 6, "validation_loss": 3.5, "ppl": 33.0})
        write_run(tmp_path / name, records, [start(0, ranks), warning, start(3, ranks)])
    output = tmp_path / "out.html"
    pictures = tmp_path / "png"
    folders = (tmp_path / "one", tmp_path / "two" / "metrics.jsonl")
    printed = run(*folders, "--output", output, "--png", pictures, "--peak-tflops", 1)
    text = output.read_text(encoding="utf-8")
    page = Page(text)

    assert len(text) < 400_000
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert [link for link in links if not link.startswith("#")] == []
    assert "url(http" not in text
    assert page.all("script") == page.all("link") == []
    drawn = page.all("svg")
    assert all(svg["role"] == "img" for svg in drawn)
    assert str(drawn[0]["aria-label"]).startswith("Loss against iteration: one from ")
    assert {path.stem for path in pictures.glob("*.png")} == set(SHOWN)
    assert len(drawn) == len(SHOWN)
    assert f"wrote {output}\nwrote {len(SHOWN)} charts to {pictures}\n" == printed.out
    assert (pictures / "scaling.png").read_bytes().startswith(b"\x89PNG")
    axes = [each["id"] for each in page.all("input")]
    assert axes == ["loss-iteration", "loss-time"]
    assert sum("checked" in each for each in page.all("input")) == 1
    assert all(each["scope"] in ("row", "col") for each in page.all("th"))
    assert "warning: a <b> & 'c'" in page.text
    # The colors of runs and letters follow the theme; text is text.
    fixed = set(re.findall(r"(?<=: )#\w{6}", text[text.index("<body>") :]))
    assert fixed <= {"#ffffff", "#808080"}  # edges of points, and the ideal line
    assert {"iteration", "Final figures", "Scaling", "resumed on 2 ranks"} <= set(page.text)


def test_a_run_that_does_not_exist_and_one_without_steps_are_named(
    run: Any, tmp_path: Path
) -> None:
    errors = run(tmp_path / "no", tmp_path / "neither", status=2).err
    assert errors.count("[run-missing]") == 2
    assert f"RUN {tmp_path / 'no'}" in errors
    (tmp_path / "other").mkdir()
    assert "[run-without-metrics]" in run(tmp_path / "other", status=2).err
    write_run(tmp_path / "empty", [])
    assert "no training steps" in run(tmp_path / "empty", status=1).err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--output gone/x.html", "samples-folder-missing"),
        ("--output x.md", "plot-suffix"),
        ("--hardware h100 --peak-tflops 3", "mutually-exclusive"),
        ("--png metrics.jsonl/x", "not-a-folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_a_problem_before_the_charts_are_drawn(
    arguments: str, code: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path, steps(range(1, 3))))
    assert f"[{code}]" in run(tmp_path, *arguments.split(), status=2).err


def test_the_peak_of_a_known_device_gives_the_utilization(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "charts_of", lambda runs, peak_tflops: [])
    write_run(tmp_path, steps(range(1, 3), tflops=98.9))
    run(tmp_path, "--hardware", "h100", "--output", tmp_path / "x.html")
    assert {"MFU", "10.0%"} <= set(Page((tmp_path / "x.html").read_text("utf-8")).text)


@pytest.mark.parametrize("arguments", [[], ["--png", "x"]])
def test_a_run_is_required(run: Any, arguments: list[str]) -> None:
    assert "RUN is required" in run(*arguments, status=2).err
