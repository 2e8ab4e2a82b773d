"""BERT's splitting of words, as Python's Unicode tables have it, in the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from tokenizers import normalizers

from megatron_ds.tokenizer.export.library import assigned_chars, char_class, replace

PRIVATE = 0xF0000
"""First of the private characters that represent characters while others are lower-cased."""
SIGMA = "\u03a3"
"""The capital letter."""
FINAL_SIGMA = "\u03c2"
"""The lower-case letter at the end of a word."""


def words_normalizer(
    clean: Callable[[str], str],
    split: Callable[[str], str],
    *,
    lower_case: bool,
    alphabet: Collection[str],
) -> Any:
    """A normalizer after which words are separated by spaces.

    Args:
        clean: The first replacement of a character: nothing, spaces, or itself within spaces.
        split: The same, after lower-casing and decomposition.
        lower_case: Lower the case and decompose in between.
        alphabet: Characters of the vocabulary. A word with another one is unknown in any case.
    """
    steps = [*_replacements(clean)]
    if lower_case:
        steps += [*_lower_case(alphabet), normalizers.NFD()]
    return normalizers.Sequence([*steps, *_replacements(split)])


def _replacements(function: Callable[[str], str]) -> Iterator[Any]:
    """Normalizers with the effect of a function on each character."""
    removed = list[str]()
    spaces = list[str]()
    isolated = list[str]()
    for char in assigned_chars():
        if (new := function(char)) == char:
            continue
        if char in new:
            isolated.append(char)
        else:
            (spaces if new else removed).append(char)
    if removed:
        yield replace(char_class(removed), "")
    if spaces:
        yield replace(char_class(spaces), " ")
    if isolated:
        around = char_class(isolated)
        # The library's other normalizers panic after an insertion at the start.
        yield replace(f"(?!\\A)(?={around})|(?<={around})", " ")


def _lower_case(alphabet: Collection[str]) -> Iterator[Any]:
    """Lower case of Python: with the Greek final sigma, and of its version of Unicode."""
    chars = [*assigned_chars()]
    is_cased = {char: f"{char}{SIGMA}".lower()[-1] == FINAL_SIGMA for char in chars}
    cased = char_class(char for char in chars if is_cased[char])
    ignored = char_class(
        char
        for char in chars
        if not is_cased[char] and f"A{char}{SIGMA}".lower()[-1] == FINAL_SIGMA
    )
    yield replace(rf"{cased}{ignored}*\K{SIGMA}(?!{ignored}*{cased})", FINAL_SIGMA)
    library = normalizers.Lowercase()
    lower = {char: char.lower() for char in chars if char in alphabet or char.lower() in alphabet}
    lower = {char: new for char, new in lower.items() if library.normalize_str(char) != new}
    private = {char: chr(PRIVATE + at) for at, char in enumerate(lower)}
    yield from (normalizers.Replace(char, private[char]) for char in lower)
    yield library
    yield from (normalizers.Replace(private[char], lower[char]) for char in lower)
