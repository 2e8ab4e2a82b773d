"""The stage `language`: keeps documents of the chosen languages, using py3langid.

py3langid (a fork of Lui and Baldwin's langid.py, 2012) includes its model, needs no network, and is
deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ds.cleaning.stages import Document, Dropped, missing_package
from megatron_ds.config.problems import Problem, UserError

SAMPLE = 500
"""Characters sampled from the start, the middle and the end of a long text."""


class LanguageFilter:
    """Drops documents of other languages, and those of uncertain language.

    Args:
        codes: ISO 639 codes of the languages to keep.
        min_score: Minimum probability of the language, 0 to 1.

    Raises:
        UserError: If py3langid is not installed.
    """

    name = "language"

    def __init__(self, codes: Sequence[str], min_score: float) -> None:
        self._codes = frozenset(codes)
        self._min_score = min_score
        self._identifier = _identifier()

    def problems(self) -> Iterator[Problem]:
        """Unknown language codes."""
        known = self._identifier.labels
        for code in sorted(self._codes - set(known)):
            yield Problem("language-not-supported", code_=code, known=" ".join(sorted(known)))

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
        raise UserError(missing_package("language", "py3langid")) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
