"""Texts that show whether an exported tokenizer has the ids of the run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.tokenizer.base import Tokenizer, library_errors
from megatron_ds.tokenizer.export.library import ExportedTokenizer, read_back
from megatron_ds.tokenizer.fast_backend import EDGES

TOKENS_PER_TEXT = 40
DISPLAYED_CHARS = 60
"""Characters of a text in messages."""
DISPLAYED_IDS = 12
SAME_SCORE = 1e-4
"""Relative difference of two sums of scores that rounding explains."""
MARKS = ("\uff76\uff9e", "\u1112\u1161\u11ab", "e\u0302\u0323", "a\u0316\u0300", "\uff41\u0301")
"""Characters and combining marks that a normalizer may compose or not."""


class Difference(NamedTuple):
    """A text to which an exported tokenizer gives other ids."""

    text: str
    expected: list[int]
    exported: list[int]

    @property
    def values(self) -> dict[str, Any]:
        """Values of a message."""
        is_long = len(self.text) > DISPLAYED_CHARS
        at = next(
            (at for at, pair in enumerate(zip(*self[1:], strict=False)) if pair[0] != pair[1]),
            min(len(self.expected), len(self.exported)),
        )
        start = max(0, at - DISPLAYED_IDS // 2)
        expected, exported = (ids[start : start + DISPLAYED_IDS] for ids in self[1:])
        return {
            "text": self.text[:DISPLAYED_CHARS] + "..." * is_long,
            "position": at,
            "expected": expected,
            "exported": exported,
        }


def check_export(
    tokenizer: Tokenizer, exported: ExportedTokenizer, content: str, *, begins: bool
) -> list[Problem]:
    """Compares the ids of a run with the ones of an exported tokenizer.json.

    Args:
        tokenizer: The run's tokenizer.
        exported: The exported one.
        content: Content of its tokenizer.json.
        begins: Whether each text begins with the begin token.

    Returns:
        The warnings of `compare_export`.

    Raises:
        UserError: If ordinary text gives other ids; shows the first one.
    """
    difference, warnings = compare_export(tokenizer, exported, content, begins=begins)
    if difference is not None:
        raise user_error("exported-tokenizer-differs", **difference.values)
    return warnings


def compare_export(
    tokenizer: Tokenizer, exported: ExportedTokenizer, content: str, *, begins: bool
) -> tuple[Difference | None, list[Problem]]:
    """The first ordinary text with other ids, and warnings about texts in which names of special
    tokens, or sums of scores that are equal up to rounding, give other ids; see `check_export`."""
    library = read_back(content, keeps_special_text=exported.keeps_special_text)
    special = special_names(library)
    names = re.compile("|".join(map(re.escape, special))) if special else None
    pieces = _pieces(tokenizer)

    def has_name(text: str) -> bool:
        return names is not None and names.search(text) is not None

    texts = [text for text in (*_edges(), *pieces) if not has_name(text)]
    differences = list(_differences(tokenizer, library, texts, begins=begins))
    rounded = [one for one in differences if _same_score(exported.scores, one)]
    other = next((one for one in differences if one not in rounded), None)
    warnings = []
    if rounded:
        warnings.append(Problem("exported-tokenizer-rounds", **rounded[0].values))
    named = [text for text in (*_edges(), *pieces) if has_name(text)]
    for name in special:
        named += [name, f"a{name}b", f" {name} ", f"{name}\n{name}"]
    for one in _differences(tokenizer, library, named, begins=begins):
        if not _same_score(exported.scores, one):
            warnings.append(Problem("exported-tokenizer-special-text", **one.values))
            break
    return other, warnings


def first_difference(tokenizer: Tokenizer, other: Tokenizer) -> Difference | None:
    """The first ordinary text that two tokenizers encode to different ids; None if they agree on
    all texts."""
    texts = [*_edges(), *_pieces(tokenizer)]
    rows = zip(texts, tokenizer.encode_batch(texts), other.encode_batch(texts), strict=True)
    differences = (
        Difference(text, tokenizer.without_bos(ids), other.without_bos(other_ids))
        for text, ids, other_ids in rows
    )
    return next((one for one in differences if one.expected != one.exported), None)


def special_names(library: Any) -> list[str]:
    """Texts of the special tokens of a tokenizer of `tokenizers`."""
    return [token.content for token in library.get_added_tokens_decoder().values() if token.special]


def _differences(
    tokenizer: Tokenizer, library: Any, texts: Sequence[str], *, begins: bool
) -> Iterator[Difference]:
    # Llama2Tokenizer adds the token itself.
    added = [tokenizer.prefix] if begins and not tokenizer.encode("") else []
    with library_errors("exported-tokenizer-fails"):
        encodings = library.encode_batch(list(texts), add_special_tokens=True)
    for text, ids, encoding in zip(texts, tokenizer.encode_batch(texts), encodings, strict=True):
        expected = [*added, *ids]
        if encoding.ids != expected:
            yield Difference(text, expected, encoding.ids)


def _same_score(scores: Sequence[float], difference: Difference) -> bool:
    """Whether both segmentations of a Unigram model are equally likely, up to rounding."""
    if not scores:
        return False
    sums = [math.fsum(scores[index] for index in ids) for ids in difference[1:]]
    return math.isclose(*sums, rel_tol=SAME_SCORE)


def decoded_tokens(tokenizer: Tokenizer) -> list[str]:
    """Texts of the tokens that are complete characters."""
    tokens = [tokenizer.decode([index]) for index in range(tokenizer.vocab_size)]
    return [token for token in tokens if token and "\ufffd" not in token]


def _edges() -> Iterable[str]:
    lines = [line for text in EDGES for line in text.split("\n")]
    blanks = [f"{' ' * left}x{' ' * right}y" for left in range(4) for right in (1, 2, 7)]
    code = "def f(x: int) -> str:\n    return f'{x:>3}'  # 1\n\n\nif x == '__main__':\n\tf(10)\n"
    return ["", " ", "\n", *EDGES, *lines, *blanks, code, *MARKS, "\n" * 9, "-" * 77]


def _pieces(tokenizer: Tokenizer) -> list[str]:
    """Texts in which each token occurs, alone and next to others."""
    tokens = decoded_tokens(tokenizer)
    starts = range(0, len(tokens), TOKENS_PER_TEXT)
    rows = [tokens[start : start + TOKENS_PER_TEXT] for start in starts]
    return [*tokens, *("".join(row) for row in rows), *(" ".join(row) for row in rows)]
