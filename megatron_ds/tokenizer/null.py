"""Tokenizer for data that is already numeric: text is ids separated by whitespace."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.config.problems import Problem, UserError, option
from megatron_ds.tokenizer.base import LARGEST_ID
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

MAX_DIGITS = 1000
"""Leading zeros included; Python refuses to parse numbers of several thousand digits."""


class NullTokenizer:
    """Encodes `"5 7 11"` as [5, 7, 11]. The end-of-document id is the given `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        """
        Args:
            vocab_size: Number of ids, not counting the end-of-document id.

        Raises:
            UserError: If the ids do not fit into int32.
        """
        if not 0 < vocab_size <= LARGEST_ID:
            raise UserError(
                Problem(
                    "vocab-size-out-of-range",
                    f"{option('vocab_size')} {vocab_size}: must be between 1 and {LARGEST_ID}",
                    "vocab_size",
                )
            )
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.fingerprint = TokenizerFingerprint("NullTokenizer", {}, self.vocab_size, self.eod)

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            # int() also accepts 1_000, +1 and the digits of every script.
            if not word.isdigit() or not word.isascii():
                raise UserError(
                    Problem(
                        "text-not-token-ids",
                        f"NullTokenizer reads ids separated by whitespace, not {word[:40]!r}",
                    )
                )
            if len(word) > MAX_DIGITS or int(word) >= self.eod:
                raise UserError(
                    Problem(
                        "text-id-out-of-range",
                        f"NullTokenizer: id {word[:40]} is not in 0 ... {self.eod - 1} "
                        f"({option('vocab_size')})",
                        "vocab_size",
                    )
                )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)
