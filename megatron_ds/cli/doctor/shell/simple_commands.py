"""Commands of a shell that start no program, or a program whose output is known."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Protocol

from megatron_ds.cli.doctor.shell import launches
from megatron_ds.cli.doctor.shell.conditions import Condition, Conditions, asks_for_files, is_true
from megatron_ds.cli.doctor.shell.launches import Launches, Result
from megatron_ds.cli.doctor.shell.marks import LOST, unmarked
from megatron_ds.cli.doctor.shell.tokens import WORDS

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[[^\]=]+\])?)(\+?)=", re.ASCII)


class End(Exception):
    """The script, or with `is_return` the function or file, ends with this status."""

    def __init__(self, status: bool | None, *, is_return: bool) -> None:
        self.status = status
        self.is_return = is_return


class Leave(Exception):
    """So many loops end; with `repeats` the last one continues with its next repetition."""

    def __init__(self, loops: int, *, repeats: bool) -> None:
        self.loops = loops
        self.repeats = repeats


class Script(launches.Script, Protocol):
    """The script that the commands are in."""

    @property
    def line(self) -> int:
        """The line that is read."""

    def is_at_end(self) -> bool:
        """Whether nothing of the script is left."""

    def call(self, fields: list[str], text: str) -> Result | None:
        """Runs a function of the script; None if the script defines no function of this name."""

    def spend(self, characters: int = 0, steps: int = 0) -> None:
        """Takes from what may be read."""


class SimpleCommands:
    """Runs simple commands.

    Args:
        script: The script that they are in.
        conditions: The conditions on which they depend.
    """

    def __init__(self, script: Script, conditions: Conditions) -> None:
        self._script = script
        self._conditions = conditions
        self._launches = Launches(script)

    def run(self, fields: list[str], text: str, text_line: int) -> Result:
        """Runs a simple command."""
        line = self._script.line
        while fields and (fields[0] in WORDS["prefixes"] or ASSIGNMENT.match(fields[0])):
            is_query = fields[:1] == ["command"] and fields[1:2] in (["-v"], ["-V"])
            fields.pop(0)
            if is_query:
                return None, LOST
        if not fields or fields[0] in WORDS["declarations"]:
            return True, ""
        name, *arguments = fields
        if name in ("exit", "return", "break", "continue"):
            return self._leave(name, arguments)
        if name in ("test", "[", "[["):
            items = arguments[: -1 if name[0] == "[" else None]
            asks = asks_for_files(items) or self._conditions.last.asks_for_files
            self._conditions.last = Condition(" ".join(fields), asks)
            return is_true(items, self._script.reading.files), ""
        called = self._script.call(fields, text)
        if called is not None:
            return called
        if name in ("shift", "set", "unset", "getopts"):
            return self._set(name, arguments), ""
        if name == "eval":
            return self._script.read(" ".join(arguments), line, is_same_shell=True)
        if name == "read" and text and LOST not in text:
            return self._assign_input(arguments, text), ""
        if name in WORDS["not_read"]:
            self._script.unread(" ".join(fields))
            return None, ""
        if name in PROGRAMS:
            return name != "false", PROGRAMS[name](arguments)
        if name in ("cat", "tee"):
            return True, self._copied(name, arguments, text)
        if name.startswith("-"):
            reason = (
                "no program: the line above ends its command, by a comment or a blank behind \\"
            )
            self._script.unread(" ".join(fields), reason)
            return None, LOST
        return self._launches.start(fields, text, line, text_line)

    def _leave(self, name: str, arguments: list[str]) -> Result:
        """Ends the script, a function or loops; not if that depends on files."""
        count = "".join(arguments[:1])
        if name in ("break", "continue"):
            if not self._conditions.loops:
                return True, ""
            loops = int(count) if re.fullmatch("[1-9]", count) else 1
            raise Leave(min(loops, self._conditions.loops), repeats=name == "continue")
        status = int(count) == 0 if re.fullmatch(r"\d{1,3}", count) else None if count else True
        written = " ".join([name, *arguments])
        if name == "return":
            raise End(status, is_return=True)
        conditions = [condition for condition in self._conditions.stack if condition.text]
        because = f" ({unmarked(conditions[-1].text.strip())})" if conditions else ""
        if any(condition.asks_for_files for condition in conditions):
            self._script.unread(
                written, f"read as not reached, because it depends on files{because}"
            )
            self._conditions.is_left = True
            return status, ""
        if not self._conditions.subshells and not self._script.is_at_end():
            self._script.unread(f"{written}{because}", "reading ended here")
        raise End(status, is_return=False)

    def _set(self, name: str, arguments: list[str]) -> bool | None:
        """Runs what changes variables or arguments; returns whether it succeeds."""
        if name == "shift":
            return self._script.variables.shift(arguments[0] if arguments else "1")
        if name == "unset":
            for argument in arguments:
                self._script.variables.values.pop(argument, None)
        elif name == "getopts" and len(arguments) > 1:
            words = arguments[2:] or list(self._script.variables.arguments[1:])
            return self._script.variables.next_option(arguments[0], arguments[1], words)
        elif name == "set" and "--" in arguments:
            rest = arguments[arguments.index("--") + 1 :]
            self._script.variables.arguments = (self._script.variables.arguments[0], *rest)
        return True

    def _assign_input(self, arguments: list[str], text: str) -> bool | None:
        """Runs `read` with known input: a line, or all of it with `-d ''`; returns whether it
        succeeds, which it does not at the end of the input."""
        options = list[str]()
        names = list[str]()
        position = 0
        while position < len(arguments):
            word = arguments[position]
            takes_value = word.startswith("-") and word[-1:] in tuple("adinNptu")
            (options if word.startswith("-") else names).append(word)
            position += 1 + takes_value
        letters = {letter for option in options for letter in option[1:]}
        if not letters <= {"r", "d", "s"} or not all(name.isidentifier() for name in names):
            self._script.unread(" ".join(["read", *arguments]))
            return None
        content = text if "d" in letters else text.partition("\n")[0]
        names = names or ["REPLY"]
        values = content.strip().split(maxsplit=len(names) - 1)
        if len(names) == 1:
            values = [content.strip()]
        for name, value in zip(names, [*values, *[""] * len(names)], strict=False):
            self._script.variables.values[name] = [value]
        return "d" not in letters

    def _copied(self, name: str, arguments: list[str], text: str) -> str:
        """The output of `cat` or `tee`, which also writes files."""
        paths = [argument for argument in arguments if not argument.startswith("-")]
        if name == "tee":
            for path in paths:
                if LOST not in text or path.endswith(".json"):
                    self._script.reading.files[path] = None if LOST in text else text
            return text
        texts = [
            self._script.reading.content(path, self._script.path) or LOST for path in paths
        ] or [text]
        self._script.spend(characters=sum(map(len, texts)))
        return "".join(texts)


def _silent(_: list[str]) -> str:
    return ""


def _absolute(paths: list[str]) -> str:
    return os.path.abspath("".join(paths[-1:]))


def _base_name(words: list[str]) -> str:
    return os.path.basename("".join(words[:1])).removesuffix("".join(words[1:2]))


def _folder_name(paths: list[str]) -> str:
    return os.path.dirname("".join(paths[:1])) or "."


def _echo(words: list[str]) -> str:
    return re.sub(r"(-[neE]+ )*", "", " ".join(words), count=1) + "\n"


def _working_folder(_: list[str]) -> str:
    return "."


PROGRAMS: dict[str, Callable[[list[str]], str]] = {
    **dict.fromkeys((*WORDS["silent"], "false"), _silent),
    **dict.fromkeys(("readlink", "realpath"), _absolute),
    "basename": _base_name,
    "dirname": _folder_name,
    "echo": _echo,
    "pwd": _working_folder,
}
"""Programs whose output follows from their arguments."""
