"""The sweep over versions of DeepSpeed: its report is read, and its page is current."""

from __future__ import annotations

import json
from pathlib import Path

from tests.versions import run

REPORT = """<testsuites><testsuite>
<testcase classname="tests.dist.test_layouts" name="test_layout_equals_one_process[a]"/>
<testcase classname="tests.dist.test_layouts" name="test_layout_equals_one_process[b]">
<failure message="Failed: b did not finish">Traceback
E   TypeError: no stream
</failure></testcase>
<testcase classname="tests.dist.test_nonfinite" name="test_x"><error message="no ranks"/></testcase>
<testcase classname="tests.dist.test_x" name="test_x"><error message="not counted"/></testcase>
</testsuite></testsuites>"""


def test_results_are_those_of_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT, encoding="utf-8")

    results = run.read_report(path)

    layouts = results["tests/dist/test_layouts.py::test_layout_equals_one_process"]
    failed = {"test_layout_equals_one_process[b]": "TypeError: no stream"}
    assert layouts == {"cases": 2, "failed": failed}
    assert results["tests/dist/test_nonfinite.py"] == {
        "cases": 1,
        "failed": {"test_x": "no ranks"},
    }
    assert sum(result["cases"] for result in results.values()) == 3
    text = run.page({"1.2.3": results})
    assert "| **1 of 2** |" in text
    assert "| 1 | `test_layout_equals_one_process[b]` | TypeError: no stream |" in text


def test_page_is_current() -> None:
    """`make test-deepspeed` writes both."""
    stored = json.loads(run.RESULTS.read_text(encoding="utf-8"))

    assert run.OUTPUT.read_text(encoding="utf-8") == run.page(stored)
