"""Tokens of tiktoken and their ranks as a tokenizer of the library `tokenizers`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def library_of(special: Sequence[str], ranks: Mapping[bytes, int], pattern: str) -> Any:
    """The library's tokenizer, with the special tokens as added tokens.

    tiktoken merges each two neighbours that form a token, the one of the lowest rank first. So each
    split of a token is a merge; a complete word that is a token needs none.

    Args:
        special: Special tokens, which have the first ids. No token may have their text.
        ranks: The ids of the other tokens.
        pattern: Regular expression of words.
    """
    texts = {token: byte_text(token) for token in ranks}
    vocab = {token: index for index, token in enumerate(special)}
    vocab |= {texts[token]: rank for token, rank in ranks.items()}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for at in range(len(token) - 1, 0, -1):
            left = token[:at]
            right = token[at:]
            if left in ranks and right in ranks:
                merges.append((texts[left], texts[right]))
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    return library


def byte_text(token: bytes) -> str:
    """The name of a token in a byte-level vocabulary."""
    letters = _byte_letters()
    return "".join(letters[byte] for byte in token)


@functools.cache
def _byte_letters() -> Sequence[str]:
    """The letter of each byte, as in GPT-2: a printable one is itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
