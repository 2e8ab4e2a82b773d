"""Where sentences end, by a few rules: what is used where nltk has no model of the language.

Made for English and for the full stops of Chinese and Japanese; of other languages it knows no
abbreviations. Pure text in, text out; the time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

VERSION = 1
"""Raised when a text begins to be cut otherwise; kept beside the data."""

SPACED = ".!?…؟۔।॥‼⁇⁈⁉"
"""End a sentence where a space or the end of the text follows."""
WIDE = "。｡！？"
"""End a sentence whatever follows."""
CLOSERS = "\"'”’»)]}」』）】》〉〕］"
"""Belong to the sentence before them if they follow its end."""
OPENERS = "\"'“‘«‹([{¿¡「『（【《〈〔［*_-–—"
"""May stand before the first word of a sentence."""


def _words(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


NEVER_LAST = _words(
    "mr mrs ms mx dr prof st mt rev hon gov sen rep gen col lt sgt capt cmdr maj adm messrs vs cf "
    "e.g i.e viz ca approx resp"
)
"""Something always follows these in their sentence."""
NUMBERED = _words(
    "no nos nr fig figs p pp pg vol vols ch chap sec sect eq eqs art par ref refs jan feb mar apr "
    "jun jul aug sep sept oct nov dec"
)
"""The dot belongs to these where a number follows."""
MAYBE_LAST = _words(
    "etc al inc ltd co corp llc bros jr sr esq dept univ assn ave blvd rd ed eds est"
)
"""May end a sentence; they do so here if the next word is one that often begins one."""
STARTERS = _words(
    "a after all also although an and as at because before but by during each even finally first "
    "for from having he her here his how however i if in instead is it its last later many "
    "meanwhile more moreover most my nevertheless no not now of on once one only or other our "
    "perhaps she since so some soon still such that the their then there therefore these they this "
    "those though thus to today under until we what when where whether which while who why with "
    "yet you your"
)
"""Words that often begin a sentence."""

# One class of characters after another, so that no text makes it slow; a blank line ends a
# sentence, too: headlines have no full stop.
CANDIDATE = re.compile(
    rf"[{re.escape(SPACED + WIDE)}][{re.escape(SPACED + WIDE + CLOSERS)}]*|\n[^\S\n]*(?=\n)"
)
SPACE = re.compile(r"\s*")
OPENING = re.compile(rf"[{re.escape(OPENERS)}]*")
NEXT_WORD = re.compile(r"[^\W\d_]*")
WINDOW = 24
"""Characters before a full stop that are looked at."""


def spans(text: str) -> Iterator[tuple[int, int, int]]:
    """(begin, end, begin of the next) of each sentence: between the last two is only space.

    The sentences begin at the first character that is no space and hold all that are none.
    """
    start = _after_space(text, 0)
    for found in CANDIDATE.finditer(text):
        blank_line = found[0][0] == "\n"
        end = found.start() if blank_line else found.end()
        if end <= start:
            continue
        if blank_line or _ends(text, start, found.start(), end):
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
    """Whether the marks text[mark:end] end the sentence that begins at `start`."""
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
    if lower in NEVER_LAST:
        return False
    if lower in NUMBERED:
        return not following.isdigit()
    if "." in word.strip(".") or lower in MAYBE_LAST:
        after = NEXT_WORD.match(text, opening.end())
        return after is not None and after[0].lower() in STARTERS
    return True


def _word_before(text: str, start: int, mark: int) -> str:
    """Letters, digits and inner dots right before `mark`, not beyond `start`."""
    at = mark
    while at > max(start, mark - WINDOW) and (text[at - 1].isalnum() or text[at - 1] == "."):
        at -= 1
    return text[at:mark]


def _begins_line(text: str, start: int, word: int) -> bool:
    before = text[max(start, word - WINDOW) : word].rstrip(" \t")
    return before.endswith("\n") or (not before and word - start < WINDOW)
