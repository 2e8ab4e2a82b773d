"""Replaces a fragment of Python in a package by another one, wherever its function is defined.

Fragments are compared as syntax trees, so that formatting, comments and quotes do not matter.
`$NAME` is any expression, or any name of an attribute or argument, the same at each place. A body
of `...` is any statements.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "metavariable_"
IGNORED = ("ctx", "kind", "type_comment")

Variable = tuple[type, str]
"""What a metavariable may stand for, and its name."""
BODY: Variable = (list, "...")
Bindings = dict[Variable, Any]
"""What the metavariables stand for."""
Place = tuple[ast.AST, str, int, Bindings]
"""A node, its field, the first index in the field, and what the metavariables stand for there."""


class MisfitError(Exception):
    """The fragment is at no place, or at several."""


def replace(sources: Mapping[str, str], target: str, old: str, new: str) -> tuple[str, str]:
    """Replaces the only occurrence of `old` in the definitions of one name.

    Args:
        sources: Text of each module by its path.
        target: Qualified name of functions, classes or constants, such as "GradNorm.compute".
        old: An expression, or statements.
        new: The same.

    Returns:
        The path of the module that has the fragment, and its new text.

    Raises:
        MisfitError: There is not exactly one occurrence.
    """
    pattern, replacement = _parse(old, new)
    trees = {path: ast.parse(text) for path, text in sources.items() if _may_define(text, target)}
    definitions = [
        (path, node) for path, tree in trees.items() for node in _definitions(tree, target)
    ]
    if not definitions:
        raise MisfitError(f"there is no {target}")
    places = [(path, place) for path, node in definitions for place in _places(node, pattern)]
    if len(places) != 1:
        raise MisfitError(f"{target} has {len(places)} such places")
    path, (parent, field, start, bindings) = places[0]
    nodes = _fill(replacement, bindings)
    if isinstance(value := getattr(parent, field), list):
        value[start : start + len(pattern)] = nodes
    else:
        setattr(parent, field, nodes[0])
    return path, ast.unparse(ast.fix_missing_locations(trees[path]))


def _may_define(text: str, target: str) -> bool:
    """Whether a module has the names; to parse all modules for each fragment takes a minute."""
    return all(
        name in text and re.search(rf"\b(?:def|class) {name}\b|^ *{name} *[:=]", text, re.MULTILINE)
        for name in target.split(".")
    )


def _parse(*fragments: str) -> list[list[Any]]:
    """Returns one expression each, if all are expressions; otherwise their statements."""
    texts = [re.sub(r"\$(?=[A-Z])", PREFIX, textwrap.dedent(text)) for text in fragments]
    parsed: list[list[Any]] = [ast.parse(text).body for text in texts]
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in parsed):
        return [[body[0].value] for body in parsed]
    return parsed


def _definitions(node: ast.AST, target: str, prefix: str = "") -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = prefix + child.name
            case ast.Assign(targets=[ast.Name(id)]) | ast.AnnAssign(target=ast.Name(id)):
                name = prefix + id
            case _:
                name = ""
        if name == target:
            yield child
        else:
            yield from _definitions(child, target, f"{name}." if name else prefix)


def _places(definition: ast.AST, pattern: list[Any]) -> Iterator[Place]:
    for parent in ast.walk(definition):
        for field, value in ast.iter_fields(parent):
            nodes = value if isinstance(value, list) else [value]
            for start in range(len(nodes) - len(pattern) + 1):
                bindings: Bindings = {}
                if _fits(pattern, nodes[start : start + len(pattern)], bindings):
                    yield parent, field, start, bindings


def _fits(pattern: Any, node: Any, bindings: Bindings) -> bool:
    """Compares two trees, and adds what the metavariables of the first one stand for."""
    if (variable := _metavariable(pattern)) is not None and isinstance(node, variable[0]):
        return _fits(bindings.setdefault(variable, node), node, {})
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        if _is_any_body(pattern):
            first = bindings.setdefault(BODY, node)
            return first is node or _fits(first, node, {})
        return len(pattern) == len(node) and all(
            _fits(*pair, bindings) for pair in zip(pattern, node, strict=True)
        )
    if isinstance(pattern, ast.AST):
        fields = [field for field in pattern._fields if field not in IGNORED]
        return all(_fits(getattr(pattern, f), getattr(node, f), bindings) for f in fields)
    return bool(pattern == node)


def _fill(pattern: Any, bindings: Bindings) -> Any:
    """Returns the tree with what its metavariables stand for."""
    if (variable := _metavariable(pattern)) is not None:
        if variable not in bindings:
            raise MisfitError(f"only the new fragment has ${variable[1].removeprefix(PREFIX)}")
        return bindings[variable]
    if isinstance(pattern, list):
        return bindings[BODY] if _is_any_body(pattern) else [_fill(n, bindings) for n in pattern]
    if isinstance(pattern, ast.AST):
        fields = {name: _fill(value, bindings) for name, value in ast.iter_fields(pattern)}
        return type(pattern)(**fields)
    return pattern


def _metavariable(pattern: Any) -> Variable | None:
    text = pattern.id if isinstance(pattern, ast.Name) else pattern
    if not isinstance(text, str) or not text.startswith(PREFIX):
        return None
    return (ast.expr if isinstance(pattern, ast.Name) else str), text


def _is_any_body(pattern: list[Any]) -> bool:
    match pattern:
        case [ast.Expr(ast.Constant(value))]:
            return value is ...
    return False
