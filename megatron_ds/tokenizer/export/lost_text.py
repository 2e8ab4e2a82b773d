"""Characters that a tokenizer drops: it has neither a token for them nor an unknown token."""

from __future__ import annotations

import json
from typing import Any

from megatron_ds.tokenizer.export.tiktoken_ranks import byte_text

AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
"""Keys of texts that a BPE adds to characters inside or at the end of words."""


class LostCharacters:
    """The characters of texts that a tokenizer of the library `tokenizers` drops.

    Characters that its normalizer or pre-tokenizer removes are not counted.
    """

    def __init__(self, library: Any) -> None:
        state = json.loads(library.to_str())
        model = state["model"]
        self._library = library
        self._vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
        has_unknown = model.get("unk_token") in self._vocab or model.get("unk_id") is not None
        self._is_byte_level = '"ByteLevel"' in json.dumps(
            [state["pre_tokenizer"], state["normalizer"]]
        )
        self._has_fallback = bool(model.get("byte_fallback"))
        self._affixes = [model.get(key) or "" for key in AFFIXES]
        self._is_lost: dict[str, bool] = {}
        self.is_possible = not (has_unknown or self._has_all_bytes())
        """Whether a text may lose characters."""

    def count(self, text: str) -> int:
        """Number of characters of a text that the tokenizer drops."""
        return sum(text.count(char) for char in set(text) if self._is_lost_char(char))

    def _is_lost_char(self, char: str) -> bool:
        if char not in self._is_lost:
            self._is_lost[char] = char not in self._vocab and self._lacks(char)
        return self._is_lost[char]

    def _lacks(self, char: str) -> bool:
        normalizer = self._library.normalizer
        words = self._library.pre_tokenizer
        text = char if normalizer is None else normalizer.normalize_str(char)
        pieces = [text] if words is None else [word for word, _ in words.pre_tokenize_str(text)]
        return not all(map(self._has, "".join(pieces)))

    def _has(self, char: str) -> bool:
        prefix, suffix = self._affixes
        names = (char, f"{prefix}{char}", f"{char}{suffix}", f"{prefix}{char}{suffix}")
        if any(name in self._vocab for name in names):
            return True
        return self._has_fallback and all(map(self._has_byte, char.encode("utf-8", "ignore")))

    def _has_byte(self, byte: int) -> bool:
        return f"<0x{byte:02X}>" in self._vocab

    def _has_all_bytes(self) -> bool:
        if self._is_byte_level:
            return all(byte_text(bytes([byte])) in self._vocab for byte in range(256))
        return self._has_fallback and all(map(self._has_byte, range(256)))
