"""Words and operators of a script, and their lines."""

from __future__ import annotations

import bisect
import copy
import re

import regex  # type: ignore[import-untyped]

from megatron_ds.config.data_files import read_table

TABLE = read_table(__file__)
WORDS = {name: tuple(words.split()) for name, words in TABLE["words"].items()}
"""Names of programs by what the shell, or its reader, does with them."""
TOKEN, *PIECES = [regex.compile(TABLE["syntax"]["parts"] + part) for part in TABLE["syntax"]["of"]]
"""A word or operator behind blanks and comments; a part of a word, and of a quoted text."""


class Tokens:
    """A position in a script, which goes forward word by word.

    Args:
        text: The script.
        first: Number of its first line.

    Attributes:
        text: The script.
        position: Where the next word is looked for.
        line: Line of the last word.
    """

    def __init__(self, text: str, first: int = 1) -> None:
        self.text = text.replace("\r\n", "\n")
        self.position = 0
        self.line = first
        self._first = first
        self._breaks = [match.start() for match in re.finditer("\n", self.text)]
        self._documents: tuple[int, int] | None = None
        """The end of the line that here-documents follow, and their end."""

    def peek(self) -> str:
        """The word or operator behind blanks and comments, "" at the end."""
        match = TOKEN.match(self.text, self.position)
        self.position = match.start("token")
        self.line = self._line_at(self.position)
        return str(match["token"])

    def take(self) -> str:
        """The same, and goes behind it; here-documents of a line are behind its end."""
        word = self.peek()
        if word == "\n" and self._documents and self._documents[0] == self.position:
            self.position = self._documents[1]
        else:
            self.position += len(word)
        return word

    def at(self, position: int) -> Tokens:
        """Another position in the same script."""
        result = copy.copy(self)
        result.go(position)
        return result

    def go(self, position: int) -> None:
        self.position = position
        self._documents = None

    def rest_of_line(self, position: int) -> str:
        """Text from a position to the end of its line."""
        end = self.text.find("\n", position)
        return self.text[position : len(self.text) if end < 0 else end]

    def document(self, mark: str, indent: str) -> tuple[str, int]:
        """The here-document that ends with a mark, and the line of its text.

        Args:
            mark: The mark as it is written.
            indent: Expression for what is removed from the start of each line.
        """
        newline = self.text.find("\n", self.position)
        newline = len(self.text) if newline < 0 else newline
        is_first = self._documents is None or self._documents[0] != newline
        start = min(newline + 1, len(self.text)) if is_first else self._end_of_documents()
        name = re.escape(re.sub(r"[\"'\\]", "", mark))
        end = re.compile(rf"^{indent}{name}$|\Z", re.MULTILINE).search(self.text, start)
        assert end is not None
        self._documents = newline, min(end.end() + 1, len(self.text))
        body = re.sub(f"(?m)^{indent}", "", self.text[start : end.start()])
        return body, self._line_at(start)

    def _end_of_documents(self) -> int:
        assert self._documents is not None
        return self._documents[1]

    def _line_at(self, position: int) -> int:
        return self._first + bisect.bisect_left(self._breaks, position)
