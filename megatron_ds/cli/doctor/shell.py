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
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import regex  # type: ignore[import-untyped]

from megatron_ds.config.data_files import read_table

UNKNOWN, QUOTED = 0xF0000, 0x100000
"""Private planes of Unicode, whose characters mean nothing to a shell: for what is known only when
the script runs, as it is written, and for quoted text."""
FIELD, EMPTY, LOST = "\U000f0000", "\U000f0001", "\U000f0002"
"""Between the elements of a list, in place of a quoted text that is empty, and of an output."""
OPENED = re.compile("[\U000f0003-\U000fffff]+")
REDIRECTION = re.compile(r"\d*[<>](?!\()|&>")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
FUNCTION = re.compile(r"(?:function\s+[\w-]+(?:\s*\(\s*\))?|[\w-]+\s*\(\s*\))\s*")
NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])", re.ASCII)
BRACES = re.compile(r"(?as)\$\{(\w+|[@*#])(?:\[([@*]|\d+)\])?(?:(:?[-=+])(.*))?\}")
ARITHMETIC = re.compile(r"(?!.*(?:\*\*|<<))[\d\s+*/%()<>=!-]+", re.DOTALL)
GROUPS = {"{": "}", "(": ")"}
LOOPS = {"case": "esac", **dict.fromkeys(("for", "while", "until", "select"), "done")}
JOINTS = ("\n", ";", ";;", "&", "&&", "||", "|", "|&", ")")
TABLE = read_table(__file__)
WORDS = {name: tuple(words.split()) for name, words in TABLE["words"].items()}
TOKEN, *PIECES = [regex.compile(TABLE["syntax"]["parts"] + part) for part in TABLE["syntax"]["of"]]
SCRIPTS = WORDS["scripts"]
DEPTH = 20
"""Scripts within each other that are read."""
INVERSE: dict[bool | None, bool] = {True: False, False: True}
Result = tuple[bool | None, str]
"""Status and output of a command; None and LOST if they are known only when the script runs."""


@dataclass
class Reading:
    """Actions of a script.

    Attributes:
        started: The programs with their arguments and places, in order.
        files: By path, the text that is written to a file; None if it is not known.
        unread: Constructs that were not read, with their places, and how they are taken.
        unset: Variables that nothing sets, with the place of their first use.
    """

    started: list[tuple[list[str], str]] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    unset: dict[str, str] = field(default_factory=dict)

    def content(self, path: str, beside: str) -> str | None:
        """The text of a file that the script has written, or that exists.

        Args:
            path: The file.
            beside: A file in whose folder it may be.
        """
        for file in (Path(path), Path(beside).parent / path):
            if path not in self.files and file.is_file():
                return file.read_text("utf-8", errors="replace")
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
        self._text, self._pos, self._first, self._line, self._depth = "", 0, 1, 1, 0
        self._values = {name: [value] for name, value in variables.items()}
        self._path, self._positional = path, _numbered([path, *arguments])
        self._launcher: list[str] = []

    def read(self, text: str, line: int = 1) -> Result:
        """Read a script, or a command that is an argument of a shell."""
        outside = self._text, self._pos, self._first, self._line
        self._text, self._pos, self._first = text.replace("\r\n", "\n"), 0, line
        self._depth += 1
        result: Result = None, LOST
        with suppress(_End, RecursionError):
            if self._depth < DEPTH:
                result = self._run(())
        self._depth -= 1
        self._text, self._pos, self._first, self._line = outside
        return result

    def _peek(self) -> str:
        """The word or operator behind blanks and comments, "" at the end; sets its line."""
        match = TOKEN.match(self._text, self._pos)
        self._pos = match.start("token")
        self._line = self._first + self._text.count("\n", 0, self._pos)
        return str(match["token"])

    def _take(self) -> str:
        word = self._peek()
        self._pos += len(word)
        return word

    def _run(self, ends: Collection[str], live: bool = True) -> Result:
        """Runs the commands up to one of these words; skips them if they are not `live`."""
        result: Result = True, ""
        joint, is_skipped = "", False
        while (word := self._peek()) and word not in ends:
            if word in JOINTS or word in ("do", "then"):
                self._take()
                if word != "\n" or joint not in ("&&", "||", "|", "|&"):
                    joint = word
                continue
            is_piped = joint in ("|", "|&")
            if not is_piped:  # what is not executed is taken to succeed
                is_skipped = joint in ("&&", "||") and (joint == "||") is (result[0] is not False)
            status, output = self._command(live and not is_skipped, LOST * is_piped)
            if live and not is_skipped:
                result = status, result[1] + LOST * is_piped + output
            joint = ""
        return result

    def _command(self, live: bool, text: str) -> Result:
        """Runs a command with a text as its input."""
        first, line, targets = self._peek(), self._line, list[str]()
        written = self._text[self._pos :].partition("\n")[0]
        function = FUNCTION.match(self._text, self._pos)
        result: Result | None = None
        if first == "!":
            self._take()
            status, output = self._command(live, text)
            return INVERSE.get(status), output
        if first == "if":
            result = self._if(live)
        elif first in GROUPS:
            self._take()
            result = self._run((GROUPS[first],), live)
            self._take()
        elif function or first in LOOPS or first.startswith("(("):
            if live:
                self._unread(written)
            self._pos = function.end() if function else self._pos + len(first)
            if function:
                self._command(False, "")
            elif first in LOOPS:
                self._run((LOOPS[first],), False)
                self._take()
            result = None, LOST
        fields, last = list[str](), ""
        while (word := self._peek()) and (word not in JOINTS or (first == "[[" and last != "]]")):
            last = self._take()
            if first == "[[":
                fields += [self._text_of(word)] * live
            elif REDIRECTION.match(word):
                target = self._take()
                if word.endswith(("<<", "<<-")):
                    text = self._document(target, r"\t*" if word[-1] == "-" else "")
                elif word[-1] == "<":
                    text = LOST
                elif live and ">" in word and "&" not in word and word[0] != "2":
                    targets.append(self._text_of(target))
            elif ASSIGNMENT.match(word) and (not fields or fields[0] in WORDS["declarations"]):
                self._assign(word, live)
            elif live:
                fields += self._fields(word)
        if not live:
            return None, LOST
        self._line = line
        status, output = result or self._simple(fields, text, line)
        for path in targets:
            self.reading.files[path] = None if LOST in output else output
            if LOST in output and path.endswith(".json"):
                self._unread(written, f"the content of {path} is not known")
        return status, "" if targets else output

    def _if(self, live: bool) -> Result:
        result: Result = True, ""
        while (word := self._take()) in ("if", "elif", "else"):
            line, written = self._line, self._text[self._pos :].partition("\n")[0]
            status = True if word == "else" else self._run(("then",), live)[0]
            if live and status is None:
                self._line = line
                self._unread(f"{word}{written.removesuffix('; then')}", "read as false")
            taken = live and bool(status)
            body = self._run(("elif", "else", "fi"), taken)
            result, live = (body, False) if taken else (result, live)
        return result

    def _document(self, mark: str, indent: str) -> str:
        """Takes the text of a here-document out of the script, whose lines keep their numbers."""
        start = self._text.find("\n", self._pos) + 1 or len(self._text)
        name = re.escape(re.sub(r"[\"'\\]", "", mark))
        end = re.compile(rf"^{indent}{name}$|\Z", re.MULTILINE).search(self._text, start)
        assert end is not None
        body = self._text[start : end.start()]
        lines = "\n" * body.count("\n")
        self._text = f"{self._text[:start]}{lines}{self._text[end.end() :]}"
        body = re.sub(f"(?m)^{indent}", "", body)
        if re.search(r"[\"'\\]", mark):
            return body
        return _unquoted(self._expand(body.replace('\\"', '\\\\"'), quoted=True))

    def _simple(self, fields: list[str], text: str, line: int) -> Result:
        while fields and (fields[0] in WORDS["prefixes"] or ASSIGNMENT.match(fields[0])):
            fields.pop(0)
        if not fields or fields[0] in WORDS["declarations"]:
            return True, ""
        name, *arguments = fields
        if name in ("exit", "return"):
            raise _End
        if name in ("test", "[", "[["):
            return _is_true(arguments[: -1 if name[0] == "[" else None], self.reading.files), ""
        if name == "eval":
            return self.read(" ".join(arguments), line)
        if name in WORDS["not_read"]:
            self._unread(" ".join(fields))
            return True, ""
        if name in PROGRAMS:
            return True, PROGRAMS[name](arguments)
        if name == "cat":
            texts = [self.reading.content(argument, self._path) or LOST for argument in arguments]
            return True, "".join(texts or [text])
        return self._start(fields, line)

    def _start(self, fields: list[str], line: int) -> Result:
        """Reads what a shell behind launchers executes, or notes the program."""
        for index, name in enumerate(fields):
            if name.endswith(".py"):
                break
            is_shell = os.path.basename(name) in WORDS["shells"][: None if index == 0 else -2]
            rest = fields[index + is_shell :]
            options = [i for i, word in enumerate(rest[:3], 1) if re.fullmatch("-[a-z]*c", word)]
            outside = self._path, self._positional, self._launcher
            if is_shell and options:
                self._launcher = [*self._launcher, *fields[:index]]
                text = "".join(rest[options[0] :][:1])
            elif rest and (is_shell or name.endswith(SCRIPTS)):
                script = self.reading.content(rest[0], self._path)
                if script is None:
                    self._unread(" ".join(fields[index:]), "the file is not there")
                    return None, LOST
                text, line = script, 1
                self._path, self._positional = rest[0], _numbered(rest)
            else:
                continue
            result = self.read(text, line)
            self._path, self._positional, self._launcher = outside
            return result
        self.reading.started.append(([*self._launcher, *fields], f"{self._path}:{line}"))
        return None, LOST

    def _unread(self, text: str, taken: str = "") -> str:
        """Notes a construct, and returns a placeholder for its value."""
        written = f"{self._path}:{self._line}: {unmarked(text).strip()}"
        self.reading.unread.append(f"{written}: {taken}" if taken else written)
        return _moved(text, 0, UNKNOWN)

    def _fields(self, word: str) -> list[str]:
        return [*map(_unquoted, re.findall(f"[^ \t\n{FIELD}]+", self._expand(word)))]

    def _text_of(self, word: str) -> str:
        return _unquoted(self._expand(word))

    def _assign(self, word: str, live: bool) -> None:
        """Sets a variable, or a list whose elements follow its name."""
        name, adds, written = ASSIGNMENT.split(word, maxsplit=1)[1:]
        old = self._values.get(name, []) if adds else []
        if written or not self._text.startswith("(", self._pos):
            value = ["".join(old[:1]) + self._text_of(written), *old[1:]] if live else []
        else:
            self._take()
            value = old
            while (word := self._take()) not in (")", ""):
                value = [*value, *self._fields(word)] if live else value
        if live:
            self._values[name] = value

    def _expand(self, raw: str, *, quoted: bool = False) -> str:
        """Replaces what a word, or what is between double quotes, refers to."""
        result, line = "", self._line
        for match in PIECES[quoted].finditer(raw):
            written, one = match[0], match[0][0]
            self._line = line + raw.count("\n", 0, match.start()) if one in '"$`' else line
            if one == "\\":
                keeps = quoted and written[1:] not in ("$", "`", '"', "\\", "\n")
                value = _moved("\\" * keeps + written[1:].replace("\n", ""), 0, QUOTED)
            elif one == "'" and not quoted:
                value = _moved(written[1:-1], 0, QUOTED) or EMPTY
            elif one == '"' and not quoted:
                value = self._expand(written[1:-1], quoted=True) or EMPTY * ("@" not in written)
            else:
                value = self._reference(written) if one in "$`" else written
                value = _moved(value, 0, QUOTED) if quoted else value.replace(EMPTY, "")
            result += value
        self._line = line
        return result

    def _reference(self, written: str) -> str:
        """The value of what begins with `$` or a backtick."""
        if written.startswith("$((") and written.endswith("))"):
            return self._arithmetic(written)
        if written.startswith(("$(", "`")):
            inner = written[2:-1] if written[0] == "$" else written[1:-1].replace("\\`", "`")
            output = self.read(inner, self._line)[1]
            return self._unread(written) if LOST in output else output.rstrip("\n")
        match = BRACES.fullmatch(written if written[1:2] == "{" else f"${{{written[1:]}}}")
        if match is None:
            return written if written == "$" else self._unread(written)
        name, index, modifier, word = match.groups()
        values = {**self._positional, **self._values}.get(name)
        how, value = name if name in "@*" else index or "0", None
        if values is not None and how.isdigit():
            value = "".join(values[int(how) :][:1])
        elif values is not None:
            value = {"*": " ", "@": FIELD}[how].join(item or EMPTY for item in values)
        if modifier is None:
            if value is None:
                self.reading.unset.setdefault(name, f"{self._path}:{self._line}")
                return _moved(f"${name}", 0, UNKNOWN)
            return value
        if (value is None or (modifier[0] == ":" and not value)) is (modifier[-1] == "+"):
            return value or ""
        default = self._expand(word)
        if modifier[-1] == "=":
            self._values[name] = [_unquoted(default)]
        return default

    def _arithmetic(self, written: str) -> str:
        text = self._text_of(written[3:-2])
        for _ in range(DEPTH):  # variables of variables
            text = re.sub(r"[A-Za-z_]\w*", lambda name: self._reference(f"${name[0]}"), text)
        if ARITHMETIC.fullmatch(text):
            with suppress(SyntaxError, TypeError, ArithmeticError):
                # Nothing but digits and operators.
                return str(int(eval(text.replace("/", "//"), {"__builtins__": {}})))
        return self._unread(written)


def unmarked(text: str) -> str:
    """A text in which what has no value stays as it is written."""
    return _moved(text, UNKNOWN, 0)


def _is_true(items: list[str], written: Collection[str]) -> bool | None:
    """The value of a condition, None if it is not known; the script has `written` some files."""
    for word, decisive in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if word in items[1:]:
            index = items.index(word, 1)
            sides = (_is_true(items[:index], written), _is_true(items[index + 1 :], written))
            return decisive if decisive in sides else None if None in sides else not decisive
    if items[:1] == ["!"]:
        return INVERSE.get(_is_true(items[1:], written))
    # A variable that is not set is empty.
    items = [OPENED.sub(lambda m: NAME.sub("", unmarked(m[0])) and m[0], item) for item in items]
    if any(map(OPENED.search, items)):
        return None
    match items:
        case [value] | ["-n", value]:
            return bool(value)
        case ["-z", value]:
            return not value
        case ["-e" | "-f" | "-d" | "-s" | "-r", path]:
            return path in written or Path(path).exists()
        case [left, "=" | "==" | "!=" as sign, right]:
            return fnmatch.fnmatchcase(left, right) is (sign != "!=")
        case [left, sign, right] if sign in WORDS["numeric"]:
            with suppress(ValueError):
                return bool(getattr(operator, sign[1:])(int(left or 0), int(right or 0)))
    return None


def _numbered(arguments: list[str]) -> dict[str, list[str]]:
    """The arguments of a script, and what else has no name."""
    numbered = {str(index): [argument] for index, argument in enumerate(arguments)}
    numbered |= dict.fromkeys("@*", arguments[1:]) | {key: ["0"] for key in "?$!-"}
    return numbered | {"#": [str(len(arguments) - 1)]}


def _unquoted(text: str) -> str:
    return _moved(text.replace(EMPTY, "").replace(FIELD, " "), QUOTED, 0)


def _moved(text: str, start: int, end: int) -> str:
    """A text with the characters of one plane of Unicode moved to another one."""
    return "".join(chr(ord(c) - start + end) if 0 <= ord(c) - start < 2**16 else c for c in text)


PROGRAMS: dict[str, Callable[[list[str]], str]] = {
    **dict.fromkeys(WORDS["silent"], lambda _: ""),
    **dict.fromkeys(("readlink", "realpath"), lambda paths: os.path.abspath(paths[-1])),
    "basename": lambda paths: os.path.basename(paths[0]),
    "dirname": lambda paths: os.path.dirname(paths[0]) or ".",
    "echo": lambda words: re.sub(r"(-[neE]+ )*", "", " ".join(words), count=1) + "\n",
    "pwd": lambda _: ".",
}
"""Programs whose output follows from their arguments."""
