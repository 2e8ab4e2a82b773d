"""The tokenizer of data that is already numbers: text is ids separated by blanks."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.tokenizer.base import fingerprint_of


class NullTokenizer:
    """`"5 7 11"` is [5, 7, 11]. The end-of-document id is `vocab_size` as given, and comes on top.

    Raises ValueError for a text that is not numbers of the vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.fingerprint = fingerprint_of("NullTokenizer", [str(vocab_size).encode()])

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"NullTokenizer reads ids separated by blanks, not {text[:40]!r}"
            ) from None
        wrong = [number for number in ids if not 0 <= number < self.eod]
        if wrong:
            raise ValueError(f"NullTokenizer: id {wrong[0]} is outside 0 ... {self.eod - 1}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)
