#!/usr/bin/env python
"""Write docs/reference/errors.md: the code, the option fields and the message of every problem."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config.problems import catalogue, default_flag, plural

REPOSITORY = Path(__file__).resolve().parents[1]
OUTPUT = REPOSITORY / "docs" / "reference" / "errors.md"
HEADER = """# Errors and warnings

Every message of `pretrain_gpt.py` and of the tools ends with a code in brackets. This page lists
all of them; `python tools/make_messages.py` writes it from `megatron_ds/config/messages.toml`.

| code | flags | message |
|---|---|---|
"""
CREATORS: dict[str, set[str]] = {"Problem": set(), "user_error": set(), "library_errors": {"why"}}
"""Functions that create a problem, with the values that they add."""
RULE_VALUES = frozenset({"combination", "closest"})
"""Values that a `Rule` of megatron_ds/config/support_matrix.py adds to its problem itself."""


@dataclass(frozen=True)
class Use:
    """A call `Problem(code, *fields, **values)` or `user_error(...)` in the source."""

    code: str
    names: frozenset[str]
    """Names of the values."""
    has_fields: bool
    location: str


def uses() -> Iterator[Use]:
    """All problems that the package and the tools create."""
    for folder in ("megatron_ds", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
                if not isinstance(node, ast.Call):
                    continue
                function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                is_rule = function == "Rule"
                if not is_rule and function not in CREATORS:
                    continue
                if isinstance(node.args[0], ast.Constant):
                    keywords = {str(keyword.arg) for keyword in node.keywords}
                    names = RULE_VALUES if is_rule else keywords | CREATORS[function]
                    location = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                    code, has_fields = str(node.args[0].value), len(node.args) > 1 and not is_rule
                    if code:
                        yield Use(code, frozenset(names), has_fields, location)


def placeholders(text: str) -> frozenset[str]:
    """Names of the values that a message needs."""
    parts = [part for part in string.Formatter().parse(text) if part[1]]
    nested = [placeholders(spec or "") for _, _, spec, _ in parts]
    return frozenset(str(name) for _, name, _, _ in parts if name != "option").union(*nested)


def readable(text: str) -> str:
    """A message for the table: placeholders by name, references to fields as flags."""
    parts = []
    for literal, name, spec, _ in string.Formatter().parse(text):
        parts.append(literal)
        if name == "option":
            parts.append(default_flag(spec or ""))
        elif name == "settings":
            parts.append(f"{default_flag(spec or '')} {{{spec}}}")
        elif name:
            _, space, noun = (spec or "").partition(" ")
            parts.append(f"{{{name}}}{space}{plural(noun) if noun else ''}")
    return "".join(parts).replace("|", "\\|").replace("\n", "<br>")


def page() -> str:
    """The content of the file."""
    rows = (
        f"| `{code}` | {' '.join(f'`{default_flag(name)}`' for name in entry.get('fields', ()))} "
        f"| {readable(entry['text'])} |\n"
        for code, entry in sorted(catalogue().items())
    )
    return HEADER + "".join(rows)


def main() -> None:
    OUTPUT.write_text(page(), encoding="utf-8")
    print(f"wrote {OUTPUT.relative_to(REPOSITORY)}: {len(catalogue())} codes")


if __name__ == "__main__":
    main()
