"""The stages `fix`, `length` and `language`, which judge each text by itself.

`fix` repairs broken Unicode, using ftfy. `language` uses py3langid (a fork of Lui and Baldwin's
langid.py, 2012), which includes its model, needs no network, and is deterministic.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from megatron_ds.cleaning.stages import Document, Dropped, Replaced
from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import Problem, counted, option, raise_if_any
from megatron_ds.tokenizer import Tokenizer

SUSPICIOUS = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")
"""Characters that ftfy may change: `&`, control characters, and everything beyond ASCII."""
CHARS_PER_TOKEN = 64
"""Characters that are tokenized per required token; a token has far fewer."""
SAMPLE = 500
"""Characters sampled from the start, the middle and the end of a long text."""


class FixUnicode:
    """Repairs mojibake, HTML entities, ligatures, widths, quotes and line ends; the result is NFC.

    Equal to `ftfy.fix_text` with its defaults.

    Raises:
        UserError: If ftfy is not installed.
    """

    def __init__(self) -> None:
        ftfy = import_library("ftfy", f"{option('stages')} fix", "stages")
        self._fix_text = ftfy.fix_text
        self._config = ftfy.TextFixerConfig(explain=False)
        self.settings = {"version of ftfy": version("ftfy")}

    def __call__(self, document: Document) -> Replaced | None:
        text = document.text
        if SUSPICIOUS.search(text) is None:
            return None
        # ftfy is slow and works line by line: only the lines that it may change are passed to it.
        # Lines end at \n alone, unlike in splitlines().
        config = self._config
        lines = list(io.StringIO(text, newline="\n"))
        for index, line in enumerate(lines):
            if "<" in line:  # ftfy takes the rest for HTML and keeps its entities
                config = config._replace(unescape_html=False)
            if SUSPICIOUS.search(line) is not None:
                lines[index] = self._fix_text(line, config)
        fixed = "".join(lines)
        return None if fixed == text else Replaced(fixed)


class LengthFilter:
    """Drops texts with fewer characters, words or tokens.

    Args:
        min_chars: Minimum characters, not counting surrounding whitespace.
        min_words: Minimum words, separated by whitespace.
        min_tokens: Minimum tokens.
        tokenizer: Counts tokens; None if `min_tokens` is 0.
    """

    def __init__(
        self,
        min_chars: int,
        min_words: int = 0,
        min_tokens: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._minima = min_chars, min_words, min_tokens
        self._tokenizer = tokenizer
        self.settings = {
            "min_chars": min_chars,
            "min_words": min_words,
            "min_tokens": min_tokens,
            "tokenizer": None if tokenizer is None else tokenizer.fingerprint.digest,
        }

    def __call__(self, document: Document) -> Dropped | None:
        min_chars, min_words, min_tokens = self._minima
        text = document.text.strip()
        if not text:
            return Dropped("empty")
        if len(text) < min_chars:
            return Dropped(f"fewer than {min_chars} characters")
        if min_words and len(text.split(None, min_words)) < min_words:
            return Dropped(f"fewer than {counted(min_words, 'word')}")
        if self._tokenizer is not None:
            tokens = self._tokenizer.encode(text[: min_tokens * CHARS_PER_TOKEN])
            if len(tokens) < min_tokens:
                return Dropped(f"fewer than {counted(min_tokens, 'token')}")
        return None


class LanguageFilter:
    """Drops documents of other languages or of an uncertain one.

    Args:
        codes: ISO 639 codes of the languages to keep.
        min_score: Minimum probability of the language, 0 to 1.

    Raises:
        UserError: If py3langid is not installed, or for unknown languages.
    """

    def __init__(self, codes: Sequence[str], min_score: float) -> None:
        self._codes = frozenset(codes)
        self._min_score = min_score
        self._identifier = _identifier()
        self.settings = {
            "languages": sorted(codes),
            "min_language_score": min_score,
            "version of py3langid": version("py3langid"),
        }
        known = sorted(self._identifier.labels)
        raise_if_any(
            Problem("language-not-supported", code_=code, known=" ".join(known))
            for code in sorted(self._codes.difference(known))
        )

    def __call__(self, document: Document) -> Dropped | None:
        sample = document.text
        if len(sample) > 3 * SAMPLE:
            middle = (len(sample) - SAMPLE) // 2
            sample = sample[:SAMPLE] + sample[middle : middle + SAMPLE] + sample[-SAMPLE:]
        if not any(map(str.isalpha, sample)):
            return Dropped("no letters")
        language, score = self._identifier.classify(sample)
        if language not in self._codes:
            return Dropped(f"language {language}")
        return Dropped("uncertain language") if score < self._min_score else None


def _identifier() -> Any:
    langid = import_library("py3langid", f"{option('stages')} language", "stages").langid
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
