"""The stage `language`: keeps documents of the wanted languages, by py3langid.

py3langid (a fork of Lui and Baldwin's langid.py, 2012) brings its model, needs no network, and
gives the same answer for the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ds.cleaning.stages import MISSING_EXTRA, Document, Dropped

SAMPLE = 500
"""Of a long text so many characters are looked at: at its beginning, in its middle, at its end."""


class LanguageFilter:
    """Drops what is of another language, and what is not surely of a wanted one.

    codes: ISO 639 codes. min_score: the model's probability of the language, 0 to 1. Raises
    ValueError where py3langid is missing.
    """

    name = "language"

    def __init__(self, codes: Sequence[str], min_score: float) -> None:
        self._codes = frozenset(codes)
        self._min_score = min_score
        self._identifier = _identifier()

    def problems(self) -> Iterator[str]:
        """Codes that the model does not know."""
        known = self._identifier.labels
        for code in sorted(self._codes - set(known)):
            yield f"--languages {code}: is not known; known are {' '.join(sorted(known))}"

    def __call__(self, document: Document) -> Dropped | None:
        sample = _sample(document.text)
        if not any(map(str.isalpha, sample)):
            return Dropped("no letters")
        language, score = self._identifier.classify(sample)
        if language not in self._codes:
            return Dropped(f"language {language}")
        return Dropped("uncertain language") if score < self._min_score else None


def _sample(text: str) -> str:
    if len(text) <= 3 * SAMPLE:
        return text
    middle = (len(text) - SAMPLE) // 2
    return text[:SAMPLE] + text[middle : middle + SAMPLE] + text[-SAMPLE:]


def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ValueError(f"--stages language: needs py3langid: {MISSING_EXTRA}") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
