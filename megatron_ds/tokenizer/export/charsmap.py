"""SentencePiece's normalization rules as normalizers of the library `tokenizers`.

The rules replace, from left to right, the longest known sequence of characters. The library's
`Precompiled` reads the same table, but looks up characters one by one, or up to 5 bytes of a
character with its combining marks, of which it keeps only the shortest known beginning. So
sequences are composed before and after it, by Unicode's NFC, which composes the same sequences.
"""

from __future__ import annotations

import functools
import itertools
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import normalizers

from megatron_ds.tokenizer.export.library import assigned_chars, char_class, replace

MAX_REPLACED = 400
"""Sequences that are replaced one by one; the published rules have 220,000."""
BARRIER = "\U0005fffe"
"""Character that no text has, between characters that must not be composed."""
SEPARATOR = "\U0005ffff"
"""Character that no text has, between characters that must not be composed."""
PRIVATE = 0xF0000
"""First of the private characters that represent sequences."""


def charsmap_normalizers(charsmap: bytes, kept: Iterable[str]) -> list[Any]:
    """Normalizers with the effect of SentencePiece's rules.

    Args:
        charsmap: `precompiled_charsmap` of the model's `normalizer_spec`.
        kept: Texts that the rules leave as they are: the model's user-defined symbols.
    """
    if not charsmap:
        return []
    table = normalizers.Precompiled(charsmap)
    sequences, steps = _steps(charsmap)
    replaced = {text: text for text in kept if table.normalize_str(text) != text}
    replaced = {**sequences, **replaced}
    longest = sorted(replaced, key=lambda text: (-len(text), text))
    private = {text: chr(PRIVATE + at) for at, text in enumerate(longest)}
    before = [normalizers.Replace(text, private[text]) for text in longest]
    return [
        *before,
        *steps,
        *(normalizers.Replace(private[text], replaced[text]) for text in longest),
    ]


@functools.lru_cache(maxsize=4)  # the published tables take a second, and most models have one
def _steps(charsmap: bytes) -> tuple[Mapping[str, str], Sequence[Any]]:
    """The sequences that are replaced one by one, and normalizers with the remaining rules."""
    rules = read_rules(charsmap)
    table = normalizers.Precompiled(charsmap)
    sequences = {key: value for key, value in rules.items() if len(key) > 1}
    if len(sequences) <= MAX_REPLACED:
        return sequences, [table]
    return {}, _composed(table, {key: rules[key] for key in rules if len(key) == 1})


def read_rules(charsmap: bytes) -> dict[str, str]:
    """The rules of a table: its size, a double array of Darts-clone, and the replacements."""
    (size,) = struct.unpack_from("<I", charsmap)
    units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
    texts = charsmap[4 + size :]
    children = defaultdict(list)
    for at, unit in enumerate(units):
        if 0 < (label := unit & 0x800000FF) < 256:
            children[at ^ label].append(at)
    rules = {}
    pending = [(0, b"")]
    while pending:
        at, key = pending.pop()
        unit = units[at]
        base = at ^ ((unit >> 10) << ((unit & (1 << 9)) >> 6))
        if unit >> 8 & 1:
            start = units[base] & 0x7FFFFFFF
            rules[key] = texts[start : texts.index(b"\0", start)]
        pending += [(child, key + bytes([units[child] & 0xFF])) for child in children[base]]
    return {key.decode("utf-8", "replace"): value.decode() for key, value in rules.items()}


def _composed(table: Any, single: Mapping[str, str]) -> list[Any]:
    """Steps that compose sequences, too.

    Args:
        table: The library's normalizer of the rules.
        single: The rules of one character.
    """
    marks = char_class(itertools.chain.from_iterable(_marks().values()))
    return [
        *(replace(pattern, BARRIER) for pattern in _barriers(marks, single)),
        normalizers.NFC(),
        replace(f"(?={marks})(?<={char_class(single)})", SEPARATOR),
        table,
        normalizers.Replace(SEPARATOR, ""),
        normalizers.NFC(),
        normalizers.Replace(BARRIER, ""),
    ]


def _barriers(marks: str, single: Mapping[str, str]) -> Iterator[str]:
    """Places between combining marks across which the rules compose nothing, unlike NFC."""
    bases, pairs = _compositions()
    variants = defaultdict(list)
    for char, replacement in single.items():
        variants[replacement].append(char)

    def starts(chars: Iterable[str]) -> str:
        return char_class(text for char in chars for text in (char, *variants[char]))

    composed = [f"(?<!{starts(bases[mark])}{starts(mark)})" for mark in bases]
    composed += [
        f"(?<!{starts(chars)}{starts(first)}{starts(second)})"
        for (first, second), chars in pairs.items()
    ]
    yield f"(?={marks})(?<={marks}){''.join(composed)}"
    # NFC sorts marks by class.
    for combining, same in _marks().items():
        lower = [mark for mark in same if mark in bases]
        higher = [mark for mark in bases if unicodedata.combining(mark) > combining]
        if lower and higher:
            yield f"(?={char_class(lower)})(?<={char_class(higher)})"


@functools.cache
def _marks() -> Mapping[int, list[str]]:
    """Combining marks by their canonical class."""
    marks = defaultdict(list)
    for char in assigned_chars():
        if combining := unicodedata.combining(char):
            marks[combining].append(char)
    return marks


@functools.cache
def _compositions() -> tuple[Mapping[str, list[str]], Mapping[tuple[str, str], list[str]]]:
    """Characters that compose with a mark, and with two marks."""
    bases = defaultdict(list)
    pairs = defaultdict(list)
    for char in assigned_chars():
        parts = unicodedata.decomposition(char).split()
        is_canonical = len(parts) == 2 and parts[0][0] != "<"
        if is_canonical and unicodedata.normalize("NFC", char) == char:
            base, mark = (chr(int(code, 16)) for code in parts)
            if unicodedata.combining(mark):
                bases[mark].append(base)
                full = unicodedata.normalize("NFD", base)
                if len(full) == 2:
                    pairs[full[1], mark].append(full[0])
    return bases, pairs
