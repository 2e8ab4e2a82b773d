#!/usr/bin/env python
"""Write tests/golden/messages.txt: every message of the package with its code and its fields.

Read from the source: each call `Problem(code, text, *fields)` gives one entry.
"""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
OUTPUT = REPOSITORY / "tests" / "golden" / "messages.txt"


def template(node: ast.expr) -> str:
    """The text of an expression, with `{...}` for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return f"{{{ast.unparse(node)}}}"


def messages() -> dict[str, set[str]]:
    """Entries by code. More than one entry of a code is listed, too."""
    found: dict[str, set[str]] = {}
    for folder in ("megatron_ds", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
                if (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func).split(".")[-1] == "Problem"
                    and len(node.args) >= 2
                    and isinstance(node.args[0], ast.Constant)
                ):
                    code, text, *fields = map(template, node.args)
                    names = ", ".join(fields) or "-"
                    found.setdefault(code, set()).add(f"{code}\n  fields: {names}\n  {text}\n")
    return found


def catalogue() -> str:
    """The content of the file."""
    return "\n".join(
        entry for _, entries in sorted(messages().items()) for entry in sorted(entries)
    )


def main() -> None:
    OUTPUT.write_text(catalogue(), encoding="utf-8")
    print(f"wrote {OUTPUT.relative_to(REPOSITORY)}: {len(messages())} codes")


if __name__ == "__main__":
    main()
