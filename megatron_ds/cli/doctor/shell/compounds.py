"""Commands of a shell that contain commands: conditions, loops and groups; and arithmetic."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from typing import Protocol

from megatron_ds.cli.doctor.shell.conditions import Condition, Conditions
from megatron_ds.cli.doctor.shell.launches import Result
from megatron_ds.cli.doctor.shell.marks import FIELD, LOST, OPENED, glob_of, unquoted, without_unset
from megatron_ds.cli.doctor.shell.simple_commands import End, Leave
from megatron_ds.cli.doctor.shell.tokens import Tokens
from megatron_ds.cli.doctor.shell.variables import Variables
from megatron_ds.cli.doctor.shell.words import Words

CHANGE = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*]?)=(?!=)(.*))\s*", re.DOTALL)
"""An arithmetic command that changes a variable."""
GROUPS = {"{": "}", "(": ")"}
MOST_REPETITIONS = 1000


class Script(Protocol):
    """The script that the commands are in."""

    tokens: Tokens
    words: Words
    variables: Variables

    def take(self) -> str:
        """The next word, behind which the script continues."""

    def run(self, ends: Collection[str], live: bool = True) -> Result:
        """Runs the commands up to one of these words; skips them if they are not `live`."""

    def unread(self, text: str, taken: str = "", line: int | None = None) -> str:
        """Notes a construct that is not read."""


class CompoundCommands:
    """Runs compound commands.

    Args:
        script: The script that they are in.
        conditions: The conditions on which commands depend.
    """

    def __init__(self, script: Script, conditions: Conditions) -> None:
        self._script = script
        self._conditions = conditions

    def run(self, first: str, live: bool) -> Result | None:
        """Runs a condition, loop, group or arithmetic, or skips it; None for other commands.

        Args:
            first: Its first word, which was not taken.
            live: Whether it is executed.
        """
        if first == "if":
            return self._if(live)
        if first in GROUPS:
            return self._group(live)
        if first in ("while", "until"):
            return self._while(live)
        if first in ("for", "select"):
            return self._for(live)
        if first == "case":
            return self._case(live)
        if first.startswith("(("):
            self._script.take()
            return (self._change(first[2:-2]) if live else None), ""
        return None

    def _group(self, live: bool) -> Result:
        tokens = self._script.tokens
        first = self._script.take()
        conditions = len(self._conditions.stack)
        start = tokens.position
        self._conditions.subshells += first == "("
        try:
            result = self._script.run((GROUPS[first],), live)
        except End as end:
            if first == "{":
                raise
            del self._conditions.stack[conditions:]
            tokens.go(start)
            self._script.run((GROUPS[first],), False)
            result = end.status, LOST
        finally:
            self._conditions.subshells -= first == "("
        self._script.take()
        return result

    def _if(self, live: bool) -> Result:
        tokens = self._script.tokens
        result: Result = True, ""
        is_of_files = False
        while (word := self._script.take()) in ("if", "elif", "else"):
            line = tokens.line
            start = tokens.position
            status = True if word == "else" else self._script.run(("then",), live)[0]
            is_of_files |= live and self._conditions.last.asks_for_files
            written = word + tokens.rest_of_line(start).removesuffix("; then")
            if live and status is None:
                self._script.unread(written, "read as false", line)
            taken = live and bool(status)
            self._conditions.stack.append(Condition(written, is_of_files))
            body = self._script.run(("elif", "else", "fi"), taken)
            self._conditions.stack.pop()
            result, live = (body, False) if taken else (result, live)
        return result

    def _while(self, live: bool) -> Result:
        tokens = self._script.tokens
        line = tokens.line
        start = tokens.position
        written = tokens.rest_of_line(start)
        output = ""
        word = self._script.take()
        start = tokens.position
        for _ in range(MOST_REPETITIONS):
            tokens.go(start)
            state = self._script.variables.state()
            status = self._script.run(("do",), live)[0]
            self._script.take()
            goes_on = live and status is (word == "while")
            if live and status is None:
                self._script.unread(written, "not read", line)
            leave, text = self._body(goes_on)
            output += text
            if not goes_on or (leave is not None and not leave.repeats):
                break
            if state == self._script.variables.state():
                self._script.unread(written, "read once, because it repeats without a change", line)
                break
        else:
            self._script.unread(written, f"read {MOST_REPETITIONS} times", line)
        return True, output

    def _for(self, live: bool) -> Result:
        tokens = self._script.tokens
        line = tokens.line
        written = tokens.rest_of_line(tokens.position)
        is_known = self._script.take() == "for"
        output = ""
        name = self._script.take()
        values = list(self._script.variables.arguments[1:])
        is_known &= not name.startswith("((")
        if tokens.peek() == "in":
            self._script.take()
            values = []
            while (word := self._script.take()) not in (";", "\n", ""):
                expanded = self._script.words.expand(word) if live else ""
                is_known &= re.search(r"[*?\[{]", expanded) is None
                values += [*map(unquoted, re.findall(f"[^ \t\n{FIELD}]+", expanded))]
        while tokens.peek() in (";", "\n"):
            self._script.take()
        self._script.take()
        start = tokens.position
        is_known = is_known and not any(map(OPENED.search, values))
        if live and not is_known:
            self._script.unread(written, "not read", line)
        if not live or not is_known or not values:
            self._body(False)
            return None, LOST * (not is_known)
        for value in values:
            tokens.go(start)
            self._script.variables.values[name] = [value]
            leave, text = self._body(True)
            output += text
            if leave is not None and not leave.repeats:
                break
        return True, output

    def _body(self, live: bool) -> tuple[Leave | None, str]:
        """Runs the commands of a loop once; returns what has ended it, and the output."""
        tokens = self._script.tokens
        start = tokens.position
        leave = None
        output = ""
        conditions = len(self._conditions.stack)
        self._conditions.loops += 1
        try:
            output = self._script.run(("done",), live)[1]
        except Leave as left:
            del self._conditions.stack[conditions:]
            tokens.go(start)
            self._script.run(("done",), False)
            leave = left
        finally:
            self._conditions.loops -= 1
        self._script.take()
        if leave is not None and leave.loops > 1:
            raise Leave(leave.loops - 1, repeats=leave.repeats)
        return leave, output

    def _case(self, live: bool) -> Result:
        tokens = self._script.tokens
        line = tokens.line
        written = tokens.rest_of_line(tokens.position)
        self._script.take()
        value = without_unset(self._script.words.text(self._script.take())) if live else ""
        if live and OPENED.search(value):
            self._script.unread(written, "no pattern is read as its value", line)
            live = False
        while tokens.peek() in ("in", "\n"):
            self._script.take()
        result: Result = True, ""
        self._conditions.stack.append(Condition(written))
        while (word := tokens.peek()) not in ("esac", ""):
            patterns = list[str]()
            while word not in (")", ""):
                word = self._script.take()
                patterns += [word] * (word not in ("(", "|", ")", "\n"))
            globs = (
                [glob_of(self._script.words.expand(pattern)) for pattern in patterns]
                if live
                else []
            )
            taken = any(fnmatch.fnmatchcase(value, glob) for glob in globs)
            body = self._script.run((";;", ";&", ";;&", "esac"), taken)
            result = body if taken else result
            if tokens.peek() != "esac":
                live = live and (not taken or tokens.peek() == ";;&")
                self._script.take()
            while tokens.peek() == "\n":
                self._script.take()
        self._conditions.stack.pop()
        self._script.take()
        return result

    def _change(self, expression: str) -> bool | None:
        """Runs an arithmetic command; returns whether its value is other than 0."""
        change = CHANGE.fullmatch(expression)
        if change is not None:
            name, one, operator, operand = change.groups()
            expression = f"{name}{one[0]}1" if one else operand
            if operator:
                expression = f"{name}{operator}({operand})"
        value = self._script.words.integer(expression)
        if value is None:
            self._script.unread(f"(({expression}))")
            return None
        if change is not None:
            self._script.variables.values[change[1]] = [str(value)]
        return value != 0
