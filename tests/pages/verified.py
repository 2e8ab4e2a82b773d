"""The page of verified claims, from the calls of `tests.claims.claim` in the tests' source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.claims import SECTIONS
from tests.import_graph import REPOSITORY
from tests.proofs.marked import Marked, marked_tests

OUTPUT = REPOSITORY / "docs" / "development" / "verified.md"
INTRODUCTION = """\
# Verified claims

This page names the tests behind each claim about the package. `python -m tests.pages` writes it
from the calls of `claim` at the tests.

Each claim is verified by the tests in the second column. The third one shows which command runs at
least one of them: `test` (`make test`), or only `proofs` (`make proofs`, which runs all tests in
all their cases), `interop` (`make test-interop`, which downloads `megatron-core`) or `cluster`
(`make test-cluster`, on two nodes).
[proofs.md](proofs.md) is the record of the last complete run.
"""


def claims_in(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Section and text of each claim of a file, and the names of its tests."""
    source = path.read_text(encoding="utf-8")
    if "import claim" not in source:
        return
    body = ast.parse(source).body
    names = [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]
    for node in body:
        if isinstance(node, ast.FunctionDef):
            calls, test = node.decorator_list, node.name
        elif isinstance(node, ast.Expr):
            calls, test = [node.value], ""
        else:
            continue
        for call in calls:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "claim":
                section, text = map(ast.literal_eval, call.args)
                assert not test or test in names, f"{path}: {test} is not a test"
                yield section, text, [test] if test else names


def tier(tests: list[str], marked: dict[str, Marked]) -> str:
    """The command that runs all cases, or some, of at least one of these tests."""
    found = set()
    for test in tests:
        mark, is_of_cluster = marked.get(test), test.startswith("tests/cluster/")
        plain = "cluster" if is_of_cluster else "test"
        found.add(mark.marker if mark is not None and mark.is_complete else plain)
    first = next((each for each in ("test", "cluster") if each in found), "")
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
    marked, parts = marked_tests(), [INTRODUCTION]
    for section, claims in rows.items():
        parts.append(f"\n## {SECTIONS[section]}\n\n| claim | test | tier |\n|---|---|---|\n")
        for text, tests in claims.items():
            cell = ", ".join(f"`{name}`" for name in names[text])
            parts.append(f"| {text} | {cell} | {tier(tests, marked)} |\n")
    return "".join(parts)
