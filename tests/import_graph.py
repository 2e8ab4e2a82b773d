"""Import graph of the package, read from the source without importing it.

Owns the reader of import statements and the diagram of docs/development/architecture.md.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "megatron_ds"
OUTPUT = REPOSITORY / "docs" / "development" / "architecture.md"
BEGIN = "<!-- begin: generated import diagram -->\n"
END = "<!-- end -->\n"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's tree."""
    return list(ast.walk(tree(path)))


def module_of(path: Path) -> str:
    """Dotted name: `megatron_ds.data.token_files.indexed_dataset`."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path, *, at_runtime: bool = False) -> tuple[str, ...]:
    """Every module imported anywhere in a file, absolute; `from a import b` gives a and a.b.

    Args:
        path: A file of the repository.
        at_runtime: Leave out imports for the type checker only.
    """
    return tuple(_imports(path, at_runtime))


def _imports(path: Path, at_runtime: bool) -> Iterator[str]:
    for node in _nodes(tree(path)) if at_runtime else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                inside = module_of(path).split(".")
                if path.name != "__init__.py":
                    inside = inside[:-1]
                above = inside[: len(inside) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def folder_imports() -> dict[str, set[str]]:
    """The folders and top-level modules that each folder or top-level module imports."""
    graph: dict[str, set[str]] = {}
    for path in sources():
        if path != PACKAGE / "__init__.py":
            folder = module_of(path).split(".")[1]
            inside = {name for name in imports(path) if name.startswith("megatron_ds.")}
            graph.setdefault(folder, set()).update(name.split(".")[1] for name in inside)
    return {folder: targets - {folder} for folder, targets in graph.items()}


def diagram() -> str:
    """Mermaid text of the folders' imports, without arrows that other arrows imply."""
    graph = folder_imports()

    def reachable(folder: str) -> set[str]:
        return graph[folder].union(*(reachable(target) for target in graph[folder]))

    lines = ["```mermaid", "graph TD"]
    for folder in sorted(graph):
        implied = set[str]().union(*(reachable(target) for target in graph[folder]))
        lines += [f"    {folder} --> {target}" for target in sorted(graph[folder] - implied)]
    return "\n".join([*lines, "```", ""])


def page() -> str:
    """docs/development/architecture.md with the current diagram."""
    head, _, rest = OUTPUT.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}{diagram()}{END}{rest.partition(END)[2]}"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Statements below a node that run, and what else may contain one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _nodes(child)
