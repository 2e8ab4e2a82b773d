"""Bytes of the text of each token, by which losses of different tokenizers can be compared."""

from __future__ import annotations

from typing import Any

SPACE = "\u2581"
"""SentencePiece's sign for a space."""
BYTE_LENGTH = len("<0x00>")


def piece_bytes(piece: str) -> int:
    """Bytes in UTF-8 of the text of one of SentencePiece's pieces, which may be as <0x0A>."""
    is_byte = len(piece) == BYTE_LENGTH and piece.startswith("<0x") and piece.endswith(">")
    return 1 if is_byte else len(piece.replace(SPACE, " ").encode())


def library_token_bytes(library: Any, size: int) -> list[int] | None:
    """Computes `Tokenizer.token_bytes` for a tokenizer of the library `tokenizers` with `size`
    ids."""
    decoder = library.decoder
    state = "" if decoder is None else decoder.__getstate__().decode()
    sizes = [0] * size
    is_byte_level = '"ByteLevel"' in state  # a character stands for a byte
    if not is_byte_level and SPACE not in state:
        return None
    for piece, index in library.get_vocab(with_added_tokens=False).items():
        sizes[index] = len(piece) if is_byte_level else piece_bytes(piece)
    for index, token in library.get_added_tokens_decoder().items():
        sizes[index] = 0 if token.special else len(token.content.encode())
    return sizes
