"""Expansion of a shell's words: quotes, variables, arithmetic and outputs of commands."""

from __future__ import annotations

import re
from typing import Protocol

from megatron_ds.cli.doctor.shell.expansion import BRACES, DEFAULTS, arithmetic, changed, sliced
from megatron_ds.cli.doctor.shell.marks import EMPTY, FIELD, LOST, QUOTED, UNKNOWN, moved, unquoted
from megatron_ds.cli.doctor.shell.tokens import PIECES
from megatron_ds.cli.doctor.shell.variables import Variables

CHARACTERS_OF_PART = 50
"""Characters that each part of a word costs in addition to its length, in the limit on what is
read."""
DEPTH = 20
"""Variables of variables that arithmetic follows."""


class Script(Protocol):
    """The script that words are in."""

    variables: Variables

    def output_of(self, text: str) -> str:
        """The output of commands."""

    def unread(self, text: str, taken: str = "") -> str:
        """Notes a construct, and returns a placeholder for its value."""

    def note_unset(self, name: str) -> None:
        """Notes a variable that nothing sets."""

    def spend(self, characters: int = 0, steps: int = 0) -> None:
        """Takes from what may be read."""


class Words:
    """Expands words of a script.

    Args:
        script: The script, to which what is not read is reported.

    Attributes:
        lines: Lines of the word before the part that is expanded.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.lines = 0

    def fields(self, word: str) -> list[str]:
        """The arguments that a word becomes."""
        return [*map(unquoted, re.findall(f"[^ \t\n{FIELD}]+", self.expand(word)))]

    def text(self, word: str) -> str:
        """The one text that a word becomes where a shell does not split it."""
        return unquoted(self.expand(word))

    def expand(self, raw: str, *, quoted: bool = False) -> str:
        """Replaces what a word, or what is between double quotes, refers to."""
        parts = list[str]()
        lines = self.lines
        for match in PIECES[quoted].finditer(raw):
            written = match[0]
            one = match[0][0]
            if one in '"$`':
                self.lines = lines + raw.count("\n", 0, match.start())
            if one == "\\":
                keeps = quoted and written[1:] not in ("$", "`", '"', "\\", "\n")
                value = moved("\\" * keeps + written[1:].replace("\n", ""), 0, QUOTED)
            elif one == "'" and not quoted:
                value = moved(written[1:-1], 0, QUOTED) or EMPTY
            elif one == '"' and not quoted:
                value = self.expand(written[1:-1], quoted=True) or EMPTY * ("@" not in written)
            else:
                value = self._reference(written) if one in "$`" else written
                value = moved(value, 0, QUOTED) if quoted else value.replace(EMPTY, "")
            self.lines = lines
            self._script.spend(characters=len(value) + CHARACTERS_OF_PART)
            parts.append(value)
        return "".join(parts)

    def integer(self, expression: str) -> int | None:
        """The value of an arithmetic expression; None if it is not known."""
        text = self.text(expression)
        for _ in range(DEPTH):  # variables of variables
            self._script.spend(characters=len(text))
            following = re.sub(r"[A-Za-z_]\w*", lambda name: self._reference(f"${name[0]}"), text)
            if following == text:
                break
            text = following
        return arithmetic(text)

    def _reference(self, written: str) -> str:
        """The value of what begins with `$` or a backtick."""
        if written.startswith("$((") and written.endswith("))"):
            integer = self.integer(written[3:-2])
            return self._script.unread(written) if integer is None else str(integer)
        if written.startswith(("$(", "`")):
            inner = written[2:-1] if written[0] == "$" else written[1:-1].replace("\\`", "`")
            output = self._script.output_of(inner)
            return self._script.unread(written) if LOST in output else output.rstrip("\n")
        match = BRACES.fullmatch(written if written[1:2] == "{" else f"${{{written[1:]}}}")
        if match is None:
            return written if written == "$" else self._script.unread(written)
        prefix, name, index, operator, word = match.groups()
        if index is not None and index not in ("@", "*"):
            index = self.text(index)
            if not index.isdigit() or self._script.variables.get(f"{name}[]") is not None:
                name = f"{name}[{index}]"
                index = None
                if operator is None and self._script.variables.get(name) is None:
                    return self._script.unread(written)
        values = self._script.variables.get(name)
        if prefix:
            value = self._of_prefix(prefix, name, index, operator, values)
        elif operator is None or operator[-1] in DEFAULTS:
            return self._with_default(name, _joined(values, name, index), operator, word)
        else:
            value = self._changed(name, index, operator, word, values)
        return self._script.unread(written) if value is None else value

    def _of_prefix(
        self, prefix: str, name: str, index: str | None, operator: str, values: list[str] | None
    ) -> str | None:
        """The value of `${#NAME}` or `${!NAME}`, None if it is not known."""
        if prefix == "!" and operator is None and index in ("@", "*") and values is not None:
            keys = self._script.variables.get(f"{name}[]")
            return FIELD.join(map(str, range(len(values))) if keys is None else keys)
        if operator is not None or values is None:
            return "0" if values is None and prefix == "#" and operator is None else None
        if prefix == "#":
            is_list = index in ("@", "*") or name in ("@", "*")
            if is_list:
                return str(len(values))
            value = "".join(values[int(index or 0) :][:1])
            return None if any(ord(c) >= UNKNOWN for c in value) else str(len(value))
        target = "".join(values[:1])
        if index or not re.fullmatch(r"[A-Za-z_]\w*|\d{1,4}", target, re.ASCII):
            return None
        return self._with_default(target, _joined(self._script.variables.get(target), target, ""))

    def _with_default(
        self, name: str, value: str | None, operator: str | None = None, word: str = ""
    ) -> str:
        """Value of a variable, or the replacement that the operator of the expansion selects."""
        if operator is None:
            if value is None:
                self._script.note_unset(name)
                return moved(f"${name}", 0, UNKNOWN)
            return value
        if (value is None or (operator[0] == ":" and not value)) is (operator[-1] == "+"):
            return value or ""
        if operator[-1] == "?":
            return self._script.unread(f"${{{name}{operator}{word}}}", "it has no value")
        default = self.expand(word)
        if operator[-1] == "=":
            self._script.variables.values[name] = [unquoted(default)]
        return default

    def _changed(
        self, name: str, index: str | None, operator: str, word: str, values: list[str] | None
    ) -> str | None:
        """The value of `${NAME#word}` and the like, None if it is not known."""
        if values is None:
            self._script.note_unset(name)
            return None
        expanded = self.expand(word)
        is_list = name in ("@", "*") or index in ("@", "*")
        if operator == ":":
            whole = ["", *values] if name in ("@", "*") else values
            start = unquoted(expanded)
            part = sliced(whole if is_list else "".join(values[int(index or 0) :][:1]), start)
            return None if part is None else (FIELD if is_list else "").join(part)
        elements = values if is_list else values[int(index or 0) :][:1]
        results = []
        for element in elements:
            self._script.spend(characters=len(element))
            results.append(changed(element, operator, expanded))
        known = [result for result in results if result is not None]
        return FIELD.join(known) if len(known) == len(results) else None


def _joined(values: list[str] | None, name: str, index: str | None) -> str | None:
    """The value of a variable, of an element, or of all with marks between them."""
    how = name if name in ("@", "*") else index or "0"
    if values is None or not how.isdigit():
        mark = {"*": " ", "@": FIELD}.get(how, "")
        return None if values is None else mark.join(item or EMPTY for item in values)
    return "".join(values[int(how) :][:1]) if values or index else None
