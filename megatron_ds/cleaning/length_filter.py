"""The stage `length`: drops short documents, by characters, words and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.cleaning.stages import Document, Dropped
from megatron_ds.tokenizer import Tokenizer

CHARS_PER_TOKEN = 64
"""Characters that are tokenized per required token; a token has far fewer."""


@dataclass(frozen=True)
class LengthFilter:
    """Drops texts with fewer characters, words or tokens.

    Attributes:
        min_chars: Minimum characters, not counting surrounding whitespace.
        min_words: Minimum words, separated by whitespace.
        min_tokens: Minimum tokens.
        tokenizer: Counts tokens; None if `min_tokens` is 0.
    """

    min_chars: int
    min_words: int = 0
    min_tokens: int = 0
    tokenizer: Tokenizer | None = None

    @property
    def name(self) -> str:
        return "length"

    def __call__(self, document: Document) -> Dropped | None:
        text = document.text.strip()
        if not text:
            return Dropped("empty")
        if len(text) < self.min_chars:
            return Dropped(f"fewer than {self.min_chars} characters")
        if self.min_words and len(text.split(None, self.min_words)) < self.min_words:
            return Dropped(f"fewer than {self.min_words} words")
        if self.tokenizer is not None:
            tokens = self.tokenizer.encode(text[: self.min_tokens * CHARS_PER_TOKEN])
            if len(tokens) < self.min_tokens:
                return Dropped(f"fewer than {self.min_tokens} tokens")
        return None
