"""The tokenizer of data that is already numbers: text is ids separated by blanks."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.tokenizer.base import LARGEST_ID, fingerprint_of
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

LONGEST_ID = 1000
"""Characters, for ids with zeros in front; Python refuses to read numbers of some thousands."""


class NullTokenizer:
    """`"5 7 11"` is [5, 7, 11]. The end-of-document id is `vocab_size` as given, and comes on top.

    Raises ValueError for a text that is not numbers of the vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        if not 0 < vocab_size <= LARGEST_ID:
            raise ValueError(f"--vocab-size {vocab_size}: must be 1 to {LARGEST_ID}")
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.fingerprint = fingerprint_of("NullTokenizer", [str(vocab_size).encode()])
        self.identity = TokenizerFingerprint("NullTokenizer", {}, self.vocab_size, self.eod)

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            # int() takes more: 1_000, +1 and the digits of every script.
            if not word.isdigit() or not word.isascii():
                raise ValueError(f"NullTokenizer reads ids separated by blanks, not {word[:40]!r}")
            if len(word) > LONGEST_ID or int(word) >= self.eod:
                raise ValueError(
                    f"NullTokenizer: id {word[:40]} is outside 0 ... {self.eod - 1} (--vocab-size)"
                )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)
