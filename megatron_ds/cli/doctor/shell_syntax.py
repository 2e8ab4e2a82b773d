"""Splits shell scripts into words, operators and blocks; knows nothing of their values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

OPERATOR = re.compile(
    r"\d*(?:<<<|<<-?|<&|>&|>>|>\||<|>)|&>>?|&&|\|\||;;|\|&|[|;&()\n]", flags=re.ASCII
)
REDIRECTION = re.compile(r"\d*[<>]|&>")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", flags=re.ASCII)
OPEN = "\x1d"
"""Mark around what has no value before the script runs."""
BLOCKS = {
    "{": "}", "(": ")", "[[": "]]", "if": "fi", "case": "esac",
    **dict.fromkeys(("for", "while", "until", "select"), "done"),
}  # fmt: skip
"""What begins a block, and what ends it."""
BEFORE_COMMANDS = ("then", "else", "elif", "do", "!")


class Token(NamedTuple):
    """A word as it is written, an operator, or a block, whose text is the word that begins it."""

    text: str
    line: int
    is_word: bool = True
    elements: tuple[Token, ...] | None = None
    """Of a block, or of an assignment to an array."""


def parse(text: str, line: int = 1) -> tuple[Token, ...]:
    """The tokens of a script; the text of a here-document is the word after `<<`.

    Args:
        text: The script.
        line: Number of its first line.
    """
    return _nested(_Lexer(text.replace("\r\n", "\n"), line).read(""))


def split(
    items: Sequence[Token], separators: Sequence[str]
) -> Iterator[tuple[Sequence[Token], str]]:
    """Parts with the separators behind them; "" is behind the last one."""
    start = 0
    for place, item in enumerate(items):
        if item.elements is None and item.text in separators:
            yield items[start:place], item.text
            start = place + 1
    yield items[start:], ""


def closing(text: str, pos: int, end: str) -> int:
    """The position behind what ends a quotation or an expansion."""
    while pos < len(text) and not text.startswith(end, pos):
        pos = after(text, pos, end[:1])
    return pos + len(end)


def after(text: str, pos: int, inside: str) -> int:
    """The position behind a character, an escaped one, a quotation or an expansion.

    Args:
        text: The script.
        pos: Where it begins.
        inside: What ends the quotation or expansion that it is in.
    """
    one = text[pos]
    if one == "\\":
        return pos + 2
    if one == OPEN or (one == "'" and inside != '"'):
        return text.find(one, pos + 1) + 1 or len(text)
    for start, end in (("$(", ")"), ("${", "}"), ('"', '"'), ("`", "`")):
        if text.startswith(start, pos) and inside != start:
            return closing(text, pos + len(start), end)
    return closing(text, pos + 1, ")") if one == "(" and inside == ")" else pos + 1


class _Lexer:
    def __init__(self, text: str, line: int) -> None:
        self._text, self._pos, self._first = text, 0, line
        self._documents: list[int] = []

    def read(self, end: str) -> Iterator[Token]:
        text, found = self._text, list[Token]()
        while self._pos < len(text):
            line = self._first + text.count("\n", 0, self._pos)
            operator = OPERATOR.match(text, self._pos)
            if text.startswith("\\\n", self._pos):
                self._pos += 2
            elif text[self._pos] in " \t":
                self._pos += 1
            elif text[self._pos] == "#":
                self._pos = text.find("\n", self._pos) % (len(text) + 1)
            elif end and text.startswith(end, self._pos):
                self._pos += len(end)
                break
            elif text.startswith("((", self._pos):
                stop = closing(text, self._pos + 2, "))")
                found.append(Token(text[self._pos : stop], line))
                self._pos = stop
            elif operator:
                self._pos = operator.end()
                found.append(Token(operator[0], line, is_word=False))
                if operator[0] == "\n":
                    self._read_documents(found)
            else:
                if found and re.fullmatch(r"\d*<<-?", found[-1].text):
                    self._documents.append(len(found))
                found.append(self._word(line))
        return iter(found)

    def _word(self, line: int) -> Token:
        text, start = self._text, self._pos
        while self._pos < len(text) and text[self._pos] not in " \t\n|;&()<>":
            self._pos = after(text, self._pos, "")
            word = text[start : self._pos]
            if text.startswith("(", self._pos) and ASSIGNMENT.fullmatch(word):
                self._pos += 1
                elements = tuple(each for each in self.read(")") if each.is_word)
                return Token(word, line, elements=elements)
        return Token(text[start : self._pos], line)

    def _read_documents(self, found: list[Token]) -> None:
        for place in self._documents:
            written = found[place].text
            indent = r"\t*" if found[place - 1].text.endswith("-") else ""
            name = re.escape(re.sub(r"[\"'\\]", "", written))
            end = re.compile(rf"^{indent}{name}$|\Z", re.MULTILINE).search(self._text, self._pos)
            assert end is not None
            body = re.sub(f"(?m)^{indent}", "", self._text[self._pos : end.start()])
            if re.search(r"[\"'\\]", written):
                body = shlex.quote(body)
            else:  # as between double quotes, where only these have another meaning
                body = '"' + re.sub(r'\\?"', lambda quote: f'{quote[0][:-1] * 2}\\"', body) + '"'
            found[place] = found[place]._replace(text=body)
            self._pos = end.end()
        self._documents.clear()


def _nested(items: Iterator[Token], end: str = "") -> tuple[Token, ...]:
    """Tokens with blocks, up to the end of the block that they are in."""
    found: list[Token] = []
    starts = True
    for item in items:
        if item.text == end and (starts or not item.is_word or end == "]]"):
            break
        is_block = item.text in BLOCKS and (starts if item.is_word else end != "esac")
        if is_block:
            item = Token(item.text, item.line, False, _nested(items, BLOCKS[item.text]))
        elif item.text == "\n" and found and found[-1].text == "(" and not found[-1].elements:
            continue  # between `name()` and its body
        found.append(item)
        if not item.is_word:
            starts = not REDIRECTION.match(item.text)
        else:
            names_function = len(found) > 1 and found[-2].text == "function"
            starts = item.text in BEFORE_COMMANDS or names_function
    return tuple(found)
