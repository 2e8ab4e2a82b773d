"""Stop rules for newlines, and the tokens that contain them. Must not know models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ds.tokenizer import Tokenizer


class NewlineTokens:
    """Tokens with newlines or colons. Decodes the full vocabulary once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        numbered = list(enumerate(token_texts(tokenizer)))
        self.with_eol = frozenset(token for token, text in numbered if "\n" in text)
        self.with_double_eol = frozenset(token for token, text in numbered if "\n\n" in text)
        self.ending_with_eol = frozenset(token for token, text in numbered if text.endswith("\n"))
        self.colons = frozenset(token for token, text in numbered if text.endswith(":"))
        self.starting_with_eol = tuple(token for token, text in numbered if text.startswith("\n"))


@dataclass(frozen=True)
class StopRules:
    """Ends texts at newlines, and forbids newlines after a colon."""

    tokens: NewlineTokens
    stop_on_eol: bool
    stop_on_double_eol: bool
    no_eol_after_colon: bool

    def ends(self, previous: int, new: int) -> bool:
        """Whether a text ends with this new token."""
        tokens = self.tokens
        if self.stop_on_double_eol:
            is_pair = previous in tokens.ending_with_eol and new in tokens.starting_with_eol
            return is_pair or new in tokens.with_double_eol
        return self.stop_on_eol and new in tokens.with_eol

    def forbidden(self, previous: int) -> Sequence[int]:
        """Tokens that must not follow this one."""
        if self.no_eol_after_colon and previous in self.tokens.colons:
            return self.tokens.starting_with_eol
        return ()


@dataclass(frozen=True)
class StopStrings:
    """Ends texts after strings."""

    decode: Callable[[Sequence[int]], str]
    stops: tuple[str, ...]

    def __call__(self, new_ids: Sequence[int]) -> bool:
        """Whether the last of these tokens completes a stop string."""
        # A character has up to four tokens, of bytes.
        longest = 4 * max(map(len, self.stops)) + 4
        text = self.decode(new_ids[-longest:])
        return any(stop in text for stop in self.stops)


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each id; empty for the gaps that a vocabulary may have."""

    def text(token: int) -> str:
        try:
            return tokenizer.decode([token])
        except (ValueError, KeyError, IndexError):
            return ""

    return [text(token) for token in range(tokenizer.vocab_size)]
