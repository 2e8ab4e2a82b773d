"""Fast encoding backend: uses a library other than the reference, `tokenizers`, once it has proved
equivalent.

A fast library is used only if it loads the tokenizer and gives the reference's ids for texts that
such libraries get wrong. It is imported only when requested. Must not know files or data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_ds.config.problems import Problem, UserError, option, user_error
from megatron_ds.tokenizer.base import (
    FlatIds,
    JsonTokenizer,
    Tokenizer,
    import_library,
    library_errors,
)

REFERENCE = "tokenizers"
FAST = "fastokens"
BACKENDS = ("auto", REFERENCE, FAST)
LONG_WORD = 70_000
"""Characters: exceeds a 16-bit counter."""
DISPLAYED_CHARS = 60
"""Characters of a text in messages."""

EDGES = (
    " ",
    " a  b   c ",
    "\n\n a \n b  \n",
    "a\r\nb\r\n\r\n\rc",
    "\t\ta\x0bb\x0cc \x1c\x1d\x1e\x1f a\x85b",
    "\u00a0a\u00a0\u00a0b\u3000c \u3000d\u2028e\u2029 \u1680\u2009\u202f",
    "I'm I'M he'll HE'LL 've 'VE 're 'RE 'd 'D 's 'S 't 'T don''t ' s \u2019s 'sS 'lll 's",
    "0 12 123 1234 12345678901234567890 1a2b3c 3.14 1,000 1e-5",
    "\u0663\u0664 \u096a\u096b \u00bd\u00b2\u2167 \u2460x",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308a",
    "\U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd! \U0001f600",
    "e\u0301 \u00e9 a\u0300\u0316 \u0301\u0301b",
    "\u1112\u1161\u11ab \ud55c \u0e01\u0e33 \u0915\u094d\u0937",
    "\ufb01 \u212b \u017f's \u0130i \u01c5 \u02b0 \u03a3\u03c3\u03c2",
    "\u4e2d\u6587\u5b57\u7b26\uff0c\u3002\u65e5\u672c\u8a9e\u306e a\u4e2d1 \U00020000\U0002a6d6",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u200f\u202ea\u202c",
    "\ufeffa\ufffd\ufffe\uffff \ue000\U0010ffff\U000e0001",
    "\0",
    "a\0b \0\0 \x01\x02\x7f\x80\x9f",
    "\u200b\u200d\u00ad\u2060a\u200bb",
    "!!!...???---=== \u2014\u201c\u201d\u2026 ({[<>]}) a_b-c/d\\e",
    "http://a.b/c?d=e&f#g x = y\n\tz();\n",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|> <|endoftext|><|endoftext|><|endoftext",
    "<s></s><unk><pad>[UNK] <0x0A> \u0120\u010a\u00c4 \u2581a",
    "ZZyzx qwrtpsdfgh XxXxXx iPhone McDonald ALLCAPS camelCase",
)
"""Spaces, line ends, contractions, digits, joined emoji, combining marks, scripts, control
characters, punctuation runs, and text that resembles the tokenizers' own notation."""


class BackendChoice(NamedTuple):
    """A tokenizer and the library that encodes for it."""

    tokenizer: Tokenizer
    library: str
    reason: Problem | None = None
    """Why the fast library is not used although it was allowed."""


class FastTokenizer(Tokenizer):
    """A tokenizer that encodes with fastokens, and leaves all else to the reference."""

    def __init__(self, reference: Tokenizer) -> None:
        """
        Raises:
            UserError: If fastokens is not installed, does not support the tokenizer, or gives other
                ids.
        """
        if not isinstance(reference, JsonTokenizer):
            kind = reference.fingerprint.kind
            raise user_error("fast-backend-unsupported-tokenizer-type", kind=kind)
        self._reference = reference
        self.vocab_size, self.eod = reference.vocab_size, reference.eod
        self.bos, self.adds_bos = reference.bos, reference.adds_bos
        self.fingerprint = reference.fingerprint
        library = import_library(FAST, f"{option('tokenizer_backend')} {FAST}")
        with library_errors("fast-backend-rejects-tokenizer"):
            self._model: Any = library.Tokenizer.from_json_str(reference.tokenizer_json())
        with library_errors("fast-backend-fails"):
            # Without the reference's help, which would hide a failure.
            difference = first_difference(
                lambda text: self._encode_flat([text]).ids.tolist(),
                reference.encode,
                equivalence_cases(reference.added_tokens()),
            )
        if difference is not None:
            raise user_error("fast-backend-ids-differ", difference=difference)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids, lengths = self.encode_flat(texts)
        ends = np.cumsum(lengths).tolist()
        return [ids[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        try:
            return self._encode_flat(texts)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # a panic of Rust code is not a subclass of Exception
            return self._reference.encode_flat(texts)

    def _encode_flat(self, texts: Sequence[str]) -> FlatIds:
        ids, offsets = self._model.encode_batch_flat(list(texts))
        lengths = np.diff(np.frombuffer(offsets, "<u8")).astype(np.int64)
        return FlatIds(np.frombuffer(ids, "<u4"), lengths)

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)

    def __reduce__(self) -> tuple[type[FastTokenizer], tuple[Tokenizer]]:
        return FastTokenizer, (self._reference,)  # the library's own object cannot be pickled


def select_backend(tokenizer: Tokenizer, backend: str) -> BackendChoice:
    """Chooses the library that encodes.

    Args:
        tokenizer: Reference tokenizer.
        backend: One of `BACKENDS`. "auto" takes the fast library if it is installed, supports the
            tokenizer and proves equivalent, otherwise the reference.

    Raises:
        UserError: If a library that is requested by name cannot be used.
    """
    own = REFERENCE if isinstance(tokenizer, JsonTokenizer) else tokenizer.fingerprint.kind
    if backend == REFERENCE or (backend == "auto" and own != REFERENCE):
        return BackendChoice(tokenizer, own)
    try:
        return BackendChoice(FastTokenizer(tokenizer), FAST)
    except UserError as error:
        if backend == FAST:
            raise
        return BackendChoice(tokenizer, own, error.problems[0])


def equivalence_cases(added_tokens: Iterable[str] = ()) -> Iterator[str]:
    """Texts on which encoders differ from each other."""
    yield ""
    yield from EDGES
    yield " ".join(EDGES)
    yield "".join(EDGES)
    yield "a" * LONG_WORD
    yield from (word * 1000 for word in ("\u00e9", " ", "ab", "-", "7", "\n", "\u4e2d"))
    codes = [*range(0x80, 0x3100, 5), *range(0x3100, 0xD800, 61), *range(0xE000, 0x1FC00, 61)]
    yield "".join(f"a{char}b {char}{char} 1{char}" for char in map(chr, codes))
    for token in added_tokens:
        yield f"{token} {token}{token}a{token} b {token}\n{token.upper()} {token[:-1]}"


def first_difference(
    encode: Callable[[str], list[int]], reference: Callable[[str], list[int]], texts: Iterable[str]
) -> str | None:
    """The first text, shortened, for which two encoders give different ids; None if all agree."""
    for text in texts:
        expected = reference(text)
        for _ in range(2):  # the second result may come from the library's cache
            if encode(text) != expected:
                return repr(text[:DISPLAYED_CHARS] + "..." * (len(text) > DISPLAYED_CHARS))
    return None
