"""The page of verified claims, from the docstrings of the tests.

A paragraph `Claim (SECTION): TEXT` in a test's docstring states what the test verifies, in that of
its file what all tests of the file do. Tests with the same claim share a row of the page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.import_graph import REPOSITORY, tree
from tests.proofs.marked import Marked, marked_tests
from tests.tables import tables

TABLES = tables(__file__, tuple)

SECTIONS = TABLES["sections"]
"""Headings of the page by section, in its order."""

TARGETS = ("cluster", "commands")
"""Folders of tests with a target of their own."""
OUTPUT = REPOSITORY / "docs" / "development" / "verified.md"
INTRODUCTION = """\
# Verified claims

For people who doubt a claim about the package, or change what it is about: the tests behind each.
`python -m tests.pages` writes it from the paragraphs `Claim (SECTION): TEXT` in their docstrings.

Each claim is verified by the tests in the second column. The third one shows which command runs at
least one of them: `test` (`make test`), or only `proofs` (`make proofs`, which runs all tests in
all their cases), `interop` (`make test-interop`, which downloads `megatron-core`), `cluster`
(`make test-cluster`, on two nodes) or `commands` (`make test-commands`, in a fresh clone).
[proofs.md](proofs.md) is the record of the last complete run.
"""


def claims_in(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Section and text of each claim of a file, and the names of its tests.

    Raises:
        KeyError: If there is no such section.
    """
    source = path.read_text(encoding="utf-8")
    if "Claim (" not in source:
        return
    module = tree(path)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    names = [node.name for node in functions if node.name.startswith("test")]
    for node in (module, *functions):
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            if claim := re.fullmatch(r"Claim \((.*?)\):(.+)", paragraph, re.DOTALL):
                tests = names if node is module else [name for name in names if name == node.name]
                assert tests, f"{path}: a claim without a test"
                if claim[1] not in SECTIONS:
                    raise KeyError(f"{path}: there is no section {claim[1]}")
                yield claim[1], " ".join(claim[2].split()), tests


def tier(tests: list[str], marked: Mapping[str, Marked]) -> str:
    """The command that runs all cases, or some, of at least one of these tests."""
    found = set()
    for test in tests:
        mark = marked.get(test)
        folder = test.split("/")[1]
        plain = folder if folder in TARGETS else "test"
        found.add(mark.marker if mark is not None and mark.is_complete else plain)
    first = next((each for each in ("test", *TARGETS) if each in found), "")
    return first or ("proofs" if len(found) > 1 or "proof" in found else found.pop())


def page() -> str:
    rows: dict[str, dict[str, list[str]]] = {section: {} for section in SECTIONS}
    names: dict[str, list[str]] = {}
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        file = path.relative_to(REPOSITORY).as_posix()
        for section, text, tests in claims_in(path):
            whole = [f"{file}::{test}" for test in tests]
            rows[section].setdefault(text, []).extend(whole)
            shown = whole if len(whole) == 1 else [file]
            names.setdefault(text, []).extend(shown)
    marked = marked_tests()
    parts = [INTRODUCTION]
    for section, claims in rows.items():
        parts.append(f"\n## {SECTIONS[section]}\n\n| claim | test | tier |\n|---|---|---|\n")
        for text, tests in claims.items():
            cell = ", ".join(f"`{name}`" for name in names[text])
            parts.append(f"| {text} | {cell} | {tier(tests, marked)} |\n")
    return "".join(parts)
