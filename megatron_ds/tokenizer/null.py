"""Tokenizer for data that is already numeric: text is ids separated by whitespace."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.base import LARGEST_ID, Tokenizer

MAX_DIGITS = 1000
"""Leading zeros included; Python refuses to parse numbers of several thousand digits."""


class NullTokenizer(Tokenizer):
    """Encodes `"5 7 11"` as [5, 7, 11]. The end-of-document id is the given `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        """
        Args:
            vocab_size: Number of ids, not counting the end-of-document id.

        Raises:
            UserError: If the ids do not fit into int32.
        """
        if not 0 < vocab_size <= LARGEST_ID:
            raise user_error("vocab-size-out-of-range", vocab_size=vocab_size, largest=LARGEST_ID)
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.fingerprint = self._fingerprint_of("NullTokenizer", ())

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            # int() also accepts 1_000, +1 and the digits of every script.
            if not word.isdigit() or not word.isascii():
                raise user_error("text-not-token-ids", word=word[:40])
            if len(word) > MAX_DIGITS or int(word) >= self.eod:
                raise user_error("text-id-out-of-range", word=word[:40], eod=self.eod - 1)
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token_id) for token_id in ids)
