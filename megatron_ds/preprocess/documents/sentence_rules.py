"""Rules for sentence ends, used on request where nltk has no model of the language.

Made for English and for the full stops of Chinese and Japanese; abbreviations of other languages
are not known. Pure functions of the text, in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_ds.config.data_files import read_table

VERSION = 1
"""Increased when any text is split differently; recorded next to the data."""

SPACED = ".!?…؟۔।॥‼⁇⁈⁉"
"""End a sentence if whitespace or the end of the text follows."""
WIDE = "。｡！？"
"""Always end a sentence."""
CLOSERS = "\"'”’»)]}」』）】》〉〕］"
"""Belong to the sentence that they follow."""
OPENERS = "\"'“‘«‹([{¿¡「『（【《〈〔［*_-–—"
"""May precede the first word of a sentence."""


WORDS = {name: frozenset(words.split()) for name, words in read_table(__file__).items()}
"""Words by what they imply for a full stop, see sentence_rules.toml."""

# Character classes in sequence, without nested repetition, keep matching linear. A blank line
# ends a sentence too, since headlines have no full stop.
CANDIDATE = re.compile(
    rf"[{re.escape(SPACED + WIDE)}][{re.escape(SPACED + WIDE + CLOSERS)}]*|\n[^\S\n]*(?=\n)"
)
SPACE = re.compile(r"\s*")
OPENING = re.compile(rf"[{re.escape(OPENERS)}]*")
NEXT_WORD = re.compile(r"[^\W\d_]*")
WINDOW = 24
"""Characters before a full stop that are examined."""


def spans(text: str) -> Iterator[tuple[int, int, int]]:
    """(start, end, start of the next sentence) of each sentence.

    Sentences cover all characters but whitespace.
    """
    start = _after_space(text, 0)
    for candidate in CANDIDATE.finditer(text):
        blank_line = candidate[0][0] == "\n"
        end = candidate.start() if blank_line else candidate.end()
        if end <= start:
            continue
        if blank_line or _ends(text, start, candidate.start(), end):
            following = _after_space(text, end)
            yield start, len(text[start:end].rstrip()) + start, following
            start = following
    if start < len(text):
        yield start, len(text.rstrip()), len(text)


def _after_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    assert match is not None
    return match.end()


def _ends(text: str, start: int, mark: int, end: int) -> bool:
    """Whether the punctuation text[mark:end] ends the sentence that starts at `start`."""
    marks = text[mark:end]
    if any(one in WIDE for one in marks):
        return True
    if not text[end : end + 1].isspace():
        return False
    opening = OPENING.match(text, _after_space(text, end))
    assert opening is not None
    following = text[opening.end() : opening.end() + 1]
    if following.islower():
        return marks[0] not in ".…" and not any(one in CLOSERS for one in marks)
    if marks != ".":
        return True
    word = _word_before(text, start, mark)
    if not word:
        return True
    if len(word) == 1 or word.isdigit():
        if _begins_line(text, start, mark - len(word)):
            return False  # "1." or "a." before an item of a list
        if word.isalpha():
            return word == "I"  # otherwise an initial
    lower = word.lower()
    if lower in WORDS["never_last"]:
        return False
    if lower in WORDS["numbered"]:
        return not following.isdigit()
    if "." in word.strip(".") or lower in WORDS["maybe_last"]:
        after = NEXT_WORD.match(text, opening.end())
        return after is not None and after[0].lower() in WORDS["starters"]
    return True


def _word_before(text: str, start: int, mark: int) -> str:
    """Letters, digits and inner dots directly before `mark`, from `start` on."""
    at = mark
    while at > max(start, mark - WINDOW) and (text[at - 1].isalnum() or text[at - 1] == "."):
        at -= 1
    return text[at:mark]


def _begins_line(text: str, start: int, word: int) -> bool:
    before = text[max(start, word - WINDOW) : word].rstrip(" \t")
    return before.endswith("\n") or (not before and word - start < WINDOW)
