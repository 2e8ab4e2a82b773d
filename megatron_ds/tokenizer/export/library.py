"""A tokenizer in the form of the library `tokenizers`, and regular expressions of that library."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import normalizers, processors

ASSIGNED = (range(0xD800), range(0xE000, 0x33480), range(0xE0000, 0xE1000))
"""Codes of all letters, marks, signs and controls of Unicode, apart from private ones."""


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer with the ids of a run."""

    library: Any
    """The tokenizer of `tokenizers`, without a post-processor."""
    special: Mapping[str, str]
    """Special tokens by name, such as `eos_token`."""
    keeps_special_text: bool = False
    """Whether the text of a special token inside a document is encoded as ordinary text."""
    scores: Sequence[float] = ()
    """Scores of the tokens by id, of a Unigram model."""
    sentencepiece: Any = None
    """The protocol buffer of the SentencePiece model that it was made from."""

    def to_json(self, begin: str | None) -> str:
        """Content of the tokenizer.json.

        Args:
            begin: Token before each text; None for none.
        """
        library = tokenizers.Tokenizer.from_str(self.library.to_str())
        library.post_processor = template(library, begin)
        return str(library.to_str(pretty=True)) + "\n"


def template(library: Any, begin: str | None) -> Any:
    """The post-processor that puts a token before each text; None puts nothing."""
    if begin is None:
        return processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    return processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin}:1 $B:1",
        special_tokens=[(begin, library.token_to_id(begin))],
    )


def read_back(content: str, *, keeps_special_text: bool) -> Any:
    """The library's tokenizer of a tokenizer.json, set as `transformers` sets it."""
    library = tokenizers.Tokenizer.from_str(content)
    library.no_padding()
    library.no_truncation()
    library.encode_special_tokens = keeps_special_text
    return library


def prefix_space(content: str) -> bool | None:
    """`add_prefix_space` of a tokenizer.json; None if its pre-tokenizer has no such setting.

    PreTrainedTokenizerFast of transformers 4 replaces it by the one of tokenizer_config.json.
    """
    value = (json.loads(content)["pre_tokenizer"] or {}).get("add_prefix_space")
    return None if value is None else bool(value)


def special_tokens(texts: Iterable[str]) -> list[tokenizers.AddedToken]:
    """Special tokens that are recognized in the text as it is written."""
    return [tokenizers.AddedToken(text, special=True, normalized=False) for text in texts]


def replace(pattern: str, content: str) -> Any:
    """A normalizer that replaces the matches of a regular expression."""
    return normalizers.Replace(tokenizers.Regex(pattern), content)


def char_class(chars: Iterable[str]) -> str:
    """A character class of a regular expression, such as `[\\x{61}-\\x{7a}]`."""
    codes = sorted(set(map(ord, chars)))
    starts = [code for at, code in enumerate(codes) if not at or codes[at - 1] != code - 1]
    ends = [code for at, code in enumerate(codes) if codes[at + 1 : at + 2] != [code + 1]]
    ranges = (f"\\x{{{start:x}}}-\\x{{{end:x}}}" for start, end in zip(starts, ends, strict=True))
    return f"[{''.join(ranges)}]"


def assigned_chars() -> Iterator[str]:
    """All characters that Unicode defines, and some that it does not."""
    return map(chr, itertools.chain.from_iterable(ASSIGNED))


def literal(text: str) -> str:
    """A regular expression that matches exactly a text."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)
