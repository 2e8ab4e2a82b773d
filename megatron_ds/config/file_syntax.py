"""Recognizes a file of settings that is written in the syntax of another file.

Knows the beginnings of lines of TOML, YAML and Python; parses nothing.
"""

from __future__ import annotations

import re
from pathlib import PurePath

TABLE = re.compile(r"\[{1,2}\s*[\w.\"'-]+(?:\s+[\w.\"'-]+)*\s*\]{1,2}\s*(?:#.*)?")
ASSIGNMENT = re.compile(r"[\w.\"'-]+\s*(?::\s*\w+\s*)?=(?!=).*")
PYTHON = re.compile(r"(?:import|from|def|class)\s+\w.*")
BLOCK = re.compile(
    r"^[ \t]*[\w.\"'-]+[ \t]*:[ \t]*(?:\#.*)?\n"  # a key without a value in its line
    r"(?:[ \t]*(?:\#.*)?\n)*"
    r"(?:[ \t]+[^\s{\[\"'#]|[ \t]*-[ \t])",  # an indented key, or an item of a list
    re.MULTILINE,
)


def other_syntax(path: str, text: str) -> str:
    """The syntax of a text that is neither JSON nor flat YAML: "TOML", "Python", or ""."""
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if PurePath(path).suffix == ".py" or PYTHON.fullmatch(first):
        return "Python"
    is_toml = TABLE.fullmatch(first) or ASSIGNMENT.fullmatch(first)
    return "TOML" if is_toml and not first.startswith(("{", "- ")) else ""


def is_block_yaml(path: str, text: str) -> bool:
    """Whether a text without braces is YAML: it has an indented block, or the suffix."""
    content = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(?:#|//)", line))
    if content.lstrip("\ufeff \t\r\n").startswith("{"):
        return False
    has_suffix = PurePath(path).suffix in (".yaml", ".yml")
    return has_suffix or content.startswith("---") or BLOCK.search(f"{content}\n") is not None
