"""The tests with cases that `make test` leaves out, found in their source.

Collecting them with pytest would import torch and DeepSpeed. Instead, a test is marked if its
decorators name `pytest.mark.proof` or `with_proofs` of `cases.py`, directly or by constants and
functions of its file, or if the file's `pytestmark` does. `make proofs` compares that with the
markers of the cases that ran.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.import_graph import tree

TESTS = Path(__file__).resolve().parents[1]
MARKERS = ("proof", "interop")
WITH_PROOFS = "with_proofs"
"""Name of the function that adds the marker `proof`."""


@dataclass(frozen=True)
class Marked:
    """A marked test.

    Attributes:
        marker: Of `MARKERS`.
        is_complete: Whether all cases are marked, so that `make test` runs none.
    """

    marker: str
    is_complete: bool


@functools.cache
def marked_tests() -> Mapping[str, Marked]:
    """All marked tests by name, such as `tests/dist/test_x.py::test_y`."""
    marked: dict[str, Marked] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if WITH_PROOFS in source or any(f"mark.{marker}" in source for marker in MARKERS):
            file = path.relative_to(TESTS.parent).as_posix()
            marked |= {f"{file}::{name}": mark for name, mark in marked_in(tree(path))}
    return marked


def marked_in(module: ast.Module) -> Iterator[tuple[str, Marked]]:
    """The marked tests of a file by function."""
    definitions: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {each.id: node for each in targets if isinstance(each, ast.Name)}
    of_file = definitions.pop("pytestmark", ast.Pass())
    for test in module.body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test"):
            for marker in MARKERS:
                is_complete = _mentions(of_file, marker, {}) or any(
                    isinstance(each, ast.Attribute) and each.attr == marker
                    for each in test.decorator_list
                )
                known = dict(definitions)
                if is_complete or any(_mentions(e, marker, known) for e in test.decorator_list):
                    yield test.name, Marked(marker, is_complete)


def _mentions(code: ast.AST, marker: str, definitions: dict[str, ast.AST]) -> bool:
    """Whether code names a marker, or what it uses of the definitions, which are removed."""
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and node.attr == marker:
            return True
        if isinstance(node, ast.Name) and (marker, node.id) == ("proof", WITH_PROOFS):
            return True
        used = definitions.pop(node.id, None) if isinstance(node, ast.Name) else None
        if used is not None and _mentions(used, marker, definitions):
            return True
    return False
