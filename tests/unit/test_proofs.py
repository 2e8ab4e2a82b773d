"""The record of the proofs has all tests that `make test` leaves out, and its page is current."""

from __future__ import annotations

import ast

from tests.proofs import run
from tests.proofs.marked import Marked, marked_in, marked_tests
from tests.reports import Case

SOURCE = """
FEW = [1]
ALL = [*FEW, pytest.param(2, marks=pytest.mark.proof)]
def cases(): return ALL
@pytest.mark.parametrize("n", FEW)
def test_few(n): pass
@pytest.mark.parametrize("n", cases())
def test_some(n): pass
@pytest.mark.parametrize("n", with_proofs(FEW, FEW))
def test_more(n): pass
@pytest.mark.proof
def test_none(): pass
"""


def test_marks_are_found_in_the_source() -> None:
    assert dict(marked_in(ast.parse(SOURCE))) == {
        "test_some": Marked("proof", False),
        "test_more": Marked("proof", False),
        "test_none": Marked("proof", True),
    }
    of_file = dict(marked_in(ast.parse(f"pytestmark = pytest.mark.interop\n{SOURCE}")))
    assert of_file["test_few"] == Marked("interop", True)


def test_record_has_the_marked_tests() -> None:
    """`make proofs` writes it; `python tests/proofs/run.py --names` names new ones as not run."""
    record = run.read_record()
    ran = {name for section in record["sections"].values() for name in section["tests"]}

    assert record["sections"].keys() <= run.SECTIONS.keys()
    assert len(record["sections"]) > 0
    assert {*ran, *record["not run"]} == marked_tests().keys()
    assert run.OUTPUT.read_text(encoding="utf-8") == run.page(record)


def test_a_section_counts_its_cases_and_those_of_marked_tests() -> None:
    (marked, *_) = marked_tests()
    cases = [
        Case(marked, "test_x[1]", 1.0, False, None, {"proof": "1"}),
        Case(marked, "test_x[2]", 1.0, False, "ValueError", {"proof": "1"}),
        Case("tests/unit/test_docs.py::test_y", "test_y", 1.0, True, None, {}),
    ]

    assert run.summary(cases) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": {f"{marked} test_x[2]": "ValueError"},
        "tests": {marked: {"passed": 1, "failed": 1, "skipped": 0}},
    }
