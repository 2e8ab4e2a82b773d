"""Which tokens end lines, for texts that end with their line. Knows tokenizers, no model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.tokenizer import Tokenizer


class NewlineTokens:
    """The tokens of a vocabulary that hold line ends or colons. Reads the whole vocabulary once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = [_text(tokenizer, number) for number in range(tokenizer.vocab_size)]
        numbered = list(enumerate(texts))
        self.with_eol = frozenset(number for number, text in numbered if "\n" in text)
        self.with_double_eol = frozenset(number for number, text in numbered if "\n\n" in text)
        self.before_eol = frozenset(number for number, text in numbered if text.endswith("\n"))
        self.colons = frozenset(number for number, text in numbered if text.endswith(":"))
        self.from_eol = tuple(number for number, text in numbered if text.startswith("\n"))


class NewlineStopRules:
    """Ends texts at line ends, and keeps lines from ending after a colon. Honours `Rules`."""

    def __init__(
        self,
        tokens: NewlineTokens,
        *,
        stop_on_eol: bool,
        stop_on_double_eol: bool,
        no_eol_after_colon: bool,
    ) -> None:
        self._tokens = tokens
        self._stop_on_eol = stop_on_eol
        self._stop_on_double_eol = stop_on_double_eol
        self._no_eol_after_colon = no_eol_after_colon

    def ends(self, previous: int, new: int) -> bool:
        tokens = self._tokens
        if self._stop_on_double_eol:
            meet = previous in tokens.before_eol and new in tokens.from_eol
            return meet or new in tokens.with_double_eol
        return self._stop_on_eol and new in tokens.with_eol

    def forbidden(self, previous: int) -> Sequence[int]:
        if self._no_eol_after_colon and previous in self._tokens.colons:
            return self._tokens.from_eol
        return ()


def _text(tokenizer: Tokenizer, number: int) -> str:
    """A vocabulary may have holes."""
    try:
        return tokenizer.decode([number])
    except (ValueError, KeyError, IndexError):
        return ""
