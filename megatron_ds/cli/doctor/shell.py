"""Reads shell scripts without executing them: the programs that they start, and their arguments.

Owns the part of the shell's language that launch scripts are written in: variables, arrays,
quotes, defaults, arithmetic, `if`, `eval`, `bash -c`, other scripts, and text that goes to files.
What else a script contains is named with its line, and what depends on it stays as it is written.
"""

from __future__ import annotations

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ds.cli.doctor.shell_syntax import (
    ASSIGNMENT,
    BLOCKS,
    OPEN,
    REDIRECTION,
    Token,
    after,
    parse,
    split,
)

SPLIT, QUOTED = "\x1f", "\x1e"
"""Marks between fields, and of quoted text, which is a field even if it is empty."""
OPENED = re.compile(f"{OPEN}(.*?){OPEN}", flags=re.DOTALL)
NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])", flags=re.ASCII)
BRACES = re.compile(r"(?as)(\w+|[@*#?])(?:\[([@*]|\d+)\])?(?:(:?[-=+])(.*))?")
LIST = re.compile(r"\$(?:@|\{(?:\w+\[)?@\]?\})")
ARITHMETIC = re.compile(r"(?!.*(?:\*\*|<<))[\d\s+*/%()<>=!-]+", flags=re.DOTALL)
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
PREFIXES = ("command", "env", "exec", "nohup", "time")
SHELLS = ("bash", "sh", "zsh", "source", ".")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
DEPTH = 20
"""Scripts within each other that are read."""
Result = tuple[bool | None, str | None]
"""Status and output of a command; None if it is known only when the script runs."""
NUMERIC = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
"""Comparisons of `test` that the module operator has by the same names."""


@dataclass
class Reading:
    """What a script does.

    Attributes:
        started: The programs with their arguments and places, in order.
        files: By path, the text that is written to a file; None if it is not known.
        unread: By place and text, how a construct that was not read is taken.
        unset: Variables that nothing sets, with the place of their first use.
    """

    started: list[tuple[list[str], str]] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    unread: dict[tuple[str, str], str] = field(default_factory=dict)
    unset: dict[str, str] = field(default_factory=dict)

    def content(self, path: str, beside: str) -> str | None:
        """The text of a file that the script has written, or that exists.

        Args:
            path: The file.
            beside: A file in whose folder it may be.
        """
        for place in (Path(path), Path(beside).parent / path):
            if path not in self.files and place.is_file():
                return place.read_text("utf-8", errors="replace")
        return self.files.get(path)


class _End(Exception):
    """The script ends."""


class Shell:
    """Reads a script in the order in which a shell would execute it.

    Args:
        path: Name of the script.
        variables: Values of variables of the environment.
        arguments: Arguments of the script.
    """

    def __init__(self, path: str, variables: dict[str, str], arguments: Sequence[str] = ()) -> None:
        self.reading = Reading()
        self._path, self._line, self._depth = path, 0, 0
        self._values = {name: [value] for name, value in variables.items()}
        self._arguments = [path, *arguments]
        self._launcher: list[str] = []

    def read(self, text: str, line: int = 1) -> Result:
        """Read a script, or a command that is an argument of a shell."""
        self._depth += 1
        result: Result = None, None
        with suppress(_End):
            if self._depth < DEPTH:
                result = self._run(parse(text, line))
        self._depth -= 1
        return result

    def _run(self, commands: Sequence[Token]) -> Result:
        status: bool | None = True
        output: str | None = ""
        is_skipped = False
        for command, behind in split(commands, ("\n", ";", "&", "&&", "||")):
            if command and not is_skipped:
                status, written = self._pipeline(command)
                output = None if output is None or written is None else output + written
            # What is not executed is taken to succeed.
            is_skipped = behind in ("&&", "||") and (behind == "||") is (status is not False)
        return status, output

    def _pipeline(self, command: Sequence[Token]) -> Result:
        is_negated = command[0].text == "!"
        parts = [part for part, _ in split(command[is_negated:], ("|", "|&")) if part]
        status: bool | None = None
        output: str | None = None
        for part in parts:
            self._line = part[0].line
            status, output = self._command(part)
        output = output if len(parts) == 1 else None
        return (not status if is_negated and status is not None else status), output

    def _command(self, command: Sequence[Token]) -> Result:
        first, block = command[0].text, command[0].elements or ()
        if first == "if":
            return self._if(block)
        if first == "[[":
            return self._test([self._text_of(each) for each in block]), ""
        is_function = len(command) > 1 and command[-1].text == "{"
        if is_function or first.startswith("((") or (first in BLOCKS and first not in "{("):
            self._unread(
                f"{_shown(command[:-1])}) {{" if is_function else f"{first} {_shown(block)}"
            )
            return None, None
        words, targets, text, items = list[Token](), list[str](), "", iter(command)
        for item in items:
            if item.is_word or not REDIRECTION.match(item.text):
                words.append(item)
                continue
            target = self._text_of(next(items, item))
            if "<<" in item.text:
                text = target
            elif ">" in item.text and "&" not in item.text and item.text[0] != "2":
                targets.append(target)
        status, output = self._run(block) if first in BLOCKS else self._simple(words, text)
        self.reading.files |= dict.fromkeys(targets, output)
        for path in targets:
            if output is None and path.endswith(".json"):
                self._unread(_shown(command), f"the content of {path} is not known")
        return status, "" if targets else output

    def _if(self, items: Sequence[Token]) -> Result:
        for branch, _ in split(items, ("elif", "else")):
            condition, *body = (part for part, _ in split(branch, ("then",)))
            if not body:
                return self._run(condition)
            line, status = self._line, self._run(condition)[0]
            if status is None:
                self._line = line
                self._unread(f"if {_shown(condition)}", "read as false")
            if status:
                return self._run(body[0])
        return True, ""

    def _simple(self, words: list[Token], text: str) -> Result:
        """Runs a command with a text as its input."""
        if words and words[0].text in DECLARATIONS:
            words = [each for each in words if ASSIGNMENT.match(each.text)]
        while words and ASSIGNMENT.match(words[0].text):
            self._assign(words.pop(0))
        line = self._line
        fields = [each for word in words for each in self._fields(word)]
        while fields and (fields[0] in PREFIXES or ASSIGNMENT.match(fields[0])):
            fields.pop(0)
        if not fields:
            return True, ""
        name, *arguments = fields
        if name in ("exit", "return"):
            raise _End
        if name in ("test", "["):
            return self._test(arguments[: -1 if name == "[" else None]), ""
        if name == "eval":
            return self.read(" ".join(arguments), line)
        if name in ("getopts", "let", "mapfile", "read", "readarray", "shift", "unset"):
            self._unread(" ".join(fields))
            return True, ""
        if name in PROGRAMS:
            return True, PROGRAMS[name](arguments)
        if name == "cat":
            texts = [self.reading.content(each, self._path) for each in arguments] or [text]
            return True, None if None in texts else "".join(map(str, texts))
        return self._start(fields, line)

    def _start(self, fields: list[str], line: int) -> Result:
        """Reads what a shell behind launchers executes, or notes the program."""
        for place, name in enumerate(fields):
            is_shell = os.path.basename(name) in SHELLS
            following = fields[place + is_shell :]
            options = [each for each in following[:3] if re.fullmatch(r"-[a-z]*c", each)]
            outside = self._path, self._arguments, self._launcher
            if is_shell and options:
                self._launcher = [*self._launcher, *fields[:place]]
                text = "".join(following[following.index(options[0]) + 1 :][:1])
            elif following and (is_shell or name.endswith(SCRIPTS)):
                script = self.reading.content(following[0], self._path)
                if script is None:
                    self._unread(" ".join(fields[place:]), "the file is not there")
                    return None, None
                text, line = script, 1
                self._path, self._arguments = following[0], following
            elif name.endswith(".py"):
                break
            else:
                continue
            result = self.read(text, line)
            self._path, self._arguments, self._launcher = outside
            return result
        self.reading.started.append(([*self._launcher, *fields], f"{self._path}:{line}"))
        return None, None

    def _unread(self, text: str, taken: str = "") -> str:
        """Notes a construct, and returns what stands for its value."""
        self.reading.unread[f"{self._path}:{self._line}", unmarked(text)] = taken
        return f"{OPEN}{text}{OPEN}"

    def _test(self, items: list[str]) -> bool | None:
        """The value of a condition; None if it is not known."""
        for word, decisive in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if word in items[1:]:
                place = items.index(word, 1)
                sides = self._test(items[:place]), self._test(items[place + 1 :])
                return decisive if decisive in sides else None if None in sides else not decisive
        if items[:1] == ["!"]:
            inner = self._test(items[1:])
            return None if inner is None else not inner
        # A variable that is not set is empty.
        items = [OPENED.sub(lambda m: "" if NAME.fullmatch(m[1]) else m[0], each) for each in items]
        if any(OPEN in each for each in items):
            return None
        if len(items) == 1 or items[:1] in (["-n"], ["-z"]):
            return bool(items[-1]) is (items[0] != "-z" or len(items) == 1)
        if len(items) == 2 and items[0] in ("-e", "-f", "-d", "-s", "-r"):
            return items[1] in self.reading.files or Path(items[1]).exists()
        if len(items) == 3 and items[1] in ("=", "==", "!="):
            return fnmatch.fnmatchcase(items[0], items[2]) is (items[1] != "!=")
        if len(items) == 3 and items[1] in NUMERIC:
            with suppress(ValueError):
                compare = getattr(operator, items[1][1:])
                return bool(compare(int(items[0] or 0), int(items[2] or 0)))
        return None

    def _fields(self, word: Token) -> list[str]:
        text = self._expand(word.text, word.line, splits=True)
        return [each.replace(QUOTED, "") for each in text.split(SPLIT) if each]

    def _text_of(self, word: Token) -> str:
        return self._expand(word.text, word.line).replace(QUOTED, "").replace(SPLIT, " ")

    def _assign(self, word: Token) -> None:
        found = ASSIGNMENT.match(word.text)
        assert found is not None
        name, adds = found.groups()
        old = self._values.get(name, []) if adds else []
        if word.elements is None:
            value = self._text_of(word._replace(text=word.text[found.end() :]))
            self._values[name] = ["".join(old[:1]) + value, *old[1:]]
        else:
            listed = [each for element in word.elements for each in self._fields(element)]
            self._values[name] = [*old, *listed]

    def _expand(self, raw: str, line: int, *, quoted: bool = False, splits: bool = False) -> str:
        """Replaces what a word refers to.

        Args:
            raw: The word as it is written, or what is between double quotes.
            line: Its line.
            quoted: Whether it is between double quotes.
            splits: Whether values outside of quotes are split into fields.
        """
        result, pos = "", 0
        while pos < len(raw):
            one, end = raw[pos], after(raw, pos, '"' if quoted else "")
            inner = raw[pos + 1 : end - 1]
            if one == OPEN:
                result += raw[pos:end]
            elif one == "\\":
                escaped = raw[pos + 1 : end]
                keeps = quoted and escaped not in ("$", "`", '"', "\\", "\n")
                result += "\\" * keeps + escaped.replace("\n", "")
            elif one == "'" and not quoted:
                result += QUOTED + inner
            elif one == '"' and not quoted:
                text = self._expand(inner, line + raw.count("\n", 0, pos), quoted=True)
                result += text if LIST.fullmatch(inner) else QUOTED + text
            elif one in "$`":
                self._line = line + raw.count("\n", 0, pos)
                value, end = self._reference(raw, pos, end)
                marked = re.split(f"({OPEN}.*?{OPEN})", value, flags=re.DOTALL)
                if splits and not quoted:
                    marked[::2] = [re.sub(r"\s+", SPLIT, each) for each in marked[::2]]
                result += "".join(marked)
            else:
                result += one
            pos = end
        return result

    def _reference(self, raw: str, pos: int, end: int) -> tuple[str, int]:
        """The value of what begins with `$` or a backtick, and the position behind it."""
        written, line = raw[pos:end], self._line
        if written.startswith("$((") and written.endswith("))"):
            return self._arithmetic(written), end
        if written.startswith(("$(", "`")):
            inner = written[2:-1] if written[0] == "$" else written[1:-1].replace("\\`", "`")
            output = self.read(inner, line)[1]
            self._line = line
            return self._unread(written) if output is None else output.rstrip("\n"), end
        if written.startswith("${"):
            found = BRACES.fullmatch(written[2:-1])
            return (self._unread(written) if found is None else self._braces(*found.groups())), end
        name = NAME.match(raw, pos)
        return (self._variable(name[1]), name.end()) if name else (raw[pos], pos + 1)

    def _lookup(self, name: str, index: str | None = None) -> str | None:
        """The value of a variable or an argument; None if nothing sets it."""
        special = {str(place): [each] for place, each in enumerate(self._arguments)}
        special |= dict.fromkeys("@*", self._arguments[1:]) | {key: ["0"] for key in "?$!-"}
        value = {**special, "#": [str(len(self._arguments) - 1)], **self._values}.get(name)
        if value is None:
            return None
        how = name if name in "@*" else index or "0"
        if how == "@":  # fields of their own between quotes
            return SPLIT.join(QUOTED + each for each in value)
        return " ".join(value) if how == "*" else "".join(value[int(how) :][:1])

    def _variable(self, name: str, index: str | None = None) -> str:
        """The value of a variable or an argument, or what stands for it."""
        value = self._lookup(name, index)
        if value is None:
            self.reading.unset.setdefault(name, f"{self._path}:{self._line}")
            return f"{OPEN}${name}{OPEN}"
        return value

    def _braces(self, name: str, index: str | None, kind: str | None, word: str | None) -> str:
        """The value of `${...}`."""
        if kind is None:
            return self._variable(name, index)
        found = self._lookup(name, index)
        is_absent = found is None or (kind[0] == ":" and not found)
        if is_absent is (kind[-1] == "+"):
            return found or ""
        default = self._expand(word or "", self._line)
        if kind[-1] == "=":
            self._values[name] = [default.replace(QUOTED, "")]
        return default

    def _arithmetic(self, written: str) -> str:
        text = self._expand(written[3:-2], self._line).replace(QUOTED, "")
        for _ in range(DEPTH * (OPEN not in text)):  # variables of variables
            text = re.sub(r"(?<![\w$])[A-Za-z_]\w*", lambda name: self._variable(name[0]), text)
        if ARITHMETIC.fullmatch(text):
            with suppress(SyntaxError, TypeError, ArithmeticError):
                # Nothing but digits and operators.
                return str(int(eval(text.replace("/", "//"), {"__builtins__": {}})))
        return self._unread(written)


def unmarked(text: str) -> str:
    """A text in which what has no value stays as it is written."""
    return OPENED.sub(r"\1", text)


def _shown(items: Sequence[Token]) -> str:
    """The first line of a command."""
    return " ".join(each.text for each in items).partition("\n")[0].strip(" ;")


SILENT = ": cd clear mkdir module set shopt sleep trap true ulimit wait"
PROGRAMS: dict[str, Callable[[list[str]], str | None]] = {
    **dict.fromkeys(SILENT.split(), lambda _: ""),
    **dict.fromkeys(("readlink", "realpath"), lambda paths: os.path.abspath(paths[-1])),
    "basename": lambda paths: os.path.basename(paths[0]),
    "dirname": lambda paths: os.path.dirname(paths[0]) or ".",
    "echo": lambda words: re.sub(r"(-[neE]+ )*", "", " ".join(words), count=1) + "\n",
    "pwd": lambda _: ".",
}
"""Programs whose output follows from their arguments."""
