"""The sweeps over versions of DeepSpeed and of other packages: their pages are current."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from megatron_ds.config.support_matrix import AXES
from tests.pages import support_matrix
from tests.reports import read_cases
from tests.unit.test_requirements import ranges
from tests.versions import bounds, run

REPORT = """<testsuites><testsuite>
<testcase classname="tests.dist.test_layouts" name="test_layout_equals_one_process[a]"/>
<testcase classname="tests.dist.test_layouts" name="test_layout_equals_one_process[b]">
<failure message="Failed: b did not finish">Traceback
E   TypeError: no stream
</failure></testcase>
<testcase classname="tests.dist.test_nonfinite" name="test_x"><error message="no ranks"/></testcase>
<testcase classname="tests.dist.test_x" name="test_x"><error message="not counted"/></testcase>
</testsuite></testsuites>"""
TORCH_SETS: dict[str, tuple[int, dict[str, str]]] = {
    folder: (2, {}) for folder in bounds.FOLDERS["torch"]
}
"""Set of tests that needs torch -> how many ran, and the failed ones with their errors."""


def test_results_are_those_of_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT, encoding="utf-8")

    results = run.results_of(read_cases(path))

    layouts = results["tests/dist/test_layouts.py::test_layout_equals_one_process"]
    failed = {"test_layout_equals_one_process[b]": "TypeError: no stream"}
    assert layouts == {"cases": 2, "failed": failed}
    assert results["tests/dist/test_nonfinite.py"] == {"cases": 1, "failed": {"test_x": "no ranks"}}
    assert sum(result["cases"] for result in results.values()) == 3
    text = run.page({"1.2.3": results})
    assert "| **1 of 2** |" in text
    assert "| 1 | `test_layout_equals_one_process[b]` | TypeError: no stream |" in text


def test_page_is_current() -> None:
    """`make test-deepspeed` writes both."""
    stored = json.loads(run.RESULTS.read_text(encoding="utf-8"))

    assert run.OUTPUT.read_text(encoding="utf-8") == run.page(stored)


def test_support_matrix_claims_versions_that_the_record_has() -> None:
    record = json.loads(run.RESULTS.read_text(encoding="utf-8"))
    text = support_matrix.OUTPUT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| [A-Z]+ \| `(\S+)` \| .* \| ([^|]+) \|$", text, re.MULTILINE)

    assert {test for test, _ in rows} <= set(run.TESTS)
    assert len(rows) == len(support_matrix.PROOFS)
    for test, versions in rows:
        for version in re.findall(r"[\d.]+", versions):
            result = record[version][test]
            assert result["cases"] > 0
            assert result["failed"] == {}


def test_version_is_claimed_only_if_all_cases_passed() -> None:
    test = support_matrix.LAYOUTS
    record: support_matrix.Record = {"0.1.2": {test: {"cases": 2, "failed": {}}}}
    failed = copy.deepcopy(record)
    failed["0.1.2"][test]["failed"] = {"name": "error"}

    assert support_matrix.passing_versions(test, record) == ["0.1.2"]
    assert "| 0.1.2 |" in support_matrix.page(record)
    for other in (failed, {"0.1.2": {test: {"cases": 0, "failed": {}}}}, {}):
        assert support_matrix.passing_versions(test, other) == []
        assert "| 0.1.2 |" not in support_matrix.page(other)


def test_pairs_without_a_passed_case_are_listed() -> None:
    """Of the default layout every pair passed; a failed case proves none."""
    layouts = {"a": {}, "b": {axis: AXES[axis].default for axis in AXES} | {"precision": "bf16"}}
    result = {"cases": 2, "failed": {"b": "error"}, "layouts": layouts}
    missing = support_matrix.unrecorded_pairs({"0.1.2": {support_matrix.LAYOUTS: result}}, "0.1.2")

    assert ("ZeRO stage 1", "tensor parallel 1") not in missing
    assert ("ZeRO stage 1", "precision bf16") in missing
    result["failed"] = {}
    missing = support_matrix.unrecorded_pairs({"0.1.2": {support_matrix.LAYOUTS: result}}, "0.1.2")
    assert ("ZeRO stage 1", "precision bf16") not in missing


def test_page_of_other_packages_is_current() -> None:
    """`make test-versions` writes both."""
    assert bounds.OUTPUT.read_text(encoding="utf-8") == bounds.page(bounds.read_results())


def test_no_lower_bound_failed() -> None:
    """After a change of one: `make test-versions VERSIONS=lowest`."""
    sets = bounds.read_results().get(bounds.LOWEST, {"sets": {}})["sets"]
    assert {name: result["failed"] for name, result in sets.items() if result["failed"]} == {}


def test_environments_have_exact_versions() -> None:
    lowest = bounds.exact("lowest")

    assert lowest.keys() == {canonicalize_name(requirement.name) for requirement in ranges()}
    assert all(each.specifier.contains(lowest[canonicalize_name(each.name)]) for each in ranges())
    assert bounds.exact("newest") == {}
    assert "conversion" not in bounds.sets_of_tests("torch==2.1")
    assert bounds.sets_of_tests("lowest")["conversion"] == "tests/unit/conversion"
    assert {"engine", "commands"} <= bounds.sets_of_tests("torch==2.1").keys()
    assert bounds.sets_of_tests("ray==2.1").keys() == {"two nodes of Ray"}
    assert bounds.ALONE.keys() == {
        canonicalize_name(each.name) for extra in bounds.LEFT_OUT for each in ranges(extra)
    }
    names = ("lowest", "torch==2.1", "ray==2.1")
    paths = [path for name in names for path in bounds.sets_of_tests(name).values()]
    assert all((bounds.REPOSITORY / path).exists() for path in paths)


def test_reasons_are_those_of_packages_with_a_lower_bound() -> None:
    lowest = bounds.exact("lowest")
    assert [name for name in bounds.REASONS if canonicalize_name(name) not in lowest] == []


def test_recorded_errors_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    path = bounds.REPOSITORY / "tests" / "golden" / "a.bin"
    error = f"{tmp_path / 'a' / 'b.json'} differs from {path}"

    assert bounds.without_folders(error) == "a/b.json differs from tests/golden/a.bin"


@pytest.mark.parametrize(
    ("name", "sets", "versions"),
    [
        ("torch==2.1", {"commands": (4, {}), **TORCH_SETS}, {"torch": "2.1"}),
        ("torch==2.1", {"commands": (4, {}), "engine": (2, {})}, {}),
        ("torch==2.1", {**TORCH_SETS, "commands": (4, {}), "engine": (2, {"test_x": "a | b"})}, {}),
        ("torch==2.1", {**TORCH_SETS, "commands": (0, {})}, {}),
        ("torch==2.1", TORCH_SETS, {}),
        ("ray==2.2", {"two nodes of Ray": (2, {})}, {"ray": "2.2"}),
        ("ray==2.2", {"two nodes of Ray": (0, {})}, {}),
    ],
)
def test_version_of_a_package_is_claimed_only_if_everything_that_needs_it_passed(
    name: str, sets: dict[str, tuple[int, dict[str, str]]], versions: dict[str, str]
) -> None:
    results = {each: {"tests": tests, "failed": failed} for each, (tests, failed) in sets.items()}
    results["installation"] = {"tests": 1, "failed": {}}
    where = {"python": "3.11", "date": "2026-01-01", "machine": "CPU"}
    installed = {"torch": "2.1", "ray": "2.2"}
    runs = {name: {"sets": results, "versions": installed, **where}}

    for package in installed:
        wanted = {versions[package]} if package in versions else set()
        assert bounds.passing_versions(package, runs) == wanted
    text = bounds.page(runs)
    assert re.findall(r"\| ([\d.]+) \| \1 \|$", text, re.MULTILINE) == [*versions.values()]
    left_out = [each for each in bounds.sets_of_tests(name) if each not in sets]
    assert (f"Of `{name}` these sets did not run: {', '.join(left_out)}." in text) == bool(left_out)
    is_failed = any(failed for _, failed in sets.values())
    assert (r"| `test_x` | a \| b |" in text) == is_failed


def test_lint_uses_the_packages_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("ruff", "[ $1 = check ]"), ("python", "echo $0 $2; false")):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        program.chmod(0o755)

    result = bounds.lint(tmp_path / "bin" / "python", {"PATH": str(tmp_path / "bin")})

    assert result == {"tests": 3, "failed": {"ruff format": "", "mypy": "bin/python mypy"}}
