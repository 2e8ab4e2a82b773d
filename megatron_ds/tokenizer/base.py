"""What the rest of the house asks of a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Implementations can be pickled: preprocessing hands them to workers."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: one more than the largest."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. No begin or end token is added."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, the same as `encode` gives, faster."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens appear as their text."""


def fingerprint_of(kind: str, parts: Iterable[bytes]) -> str:
    """Hash of a kind of tokenizer and of the contents that define it."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"{kind}-{digest.hexdigest()[:32]}"
