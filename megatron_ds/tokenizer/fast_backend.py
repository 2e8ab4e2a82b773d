"""Libraries that encode faster than the reference, `tokenizers`, and the proof that they may.

A fast library is taken only for tokenizers that it accepts and only after it gave the reference's
ids for texts that such libraries get wrong. Nothing of it is imported before it is asked for. Must
not know files or data.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from megatron_ds.tokenizer.base import FlatIds, Tokenizer, encode_flat, library_errors
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

REFERENCE = "tokenizers"
FAST = "fastokens"
BACKENDS = ("auto", REFERENCE, FAST)
NEEDS = "pip install 'megatron_ds[preprocess]'"
LONG_WORD = 70_000
"""Letters: more than a number of two bytes can count."""
SHOWN = 60
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
"""Spaces, ends of lines, contractions, digits, joined emoji, combining marks, scripts, controls,
runs of signs, and what looks like the tokenizers' own notation."""


@runtime_checkable
class HasTokenizerJson(Protocol):
    """A tokenizer that a tokenizer.json says all about."""

    def tokenizer_json(self) -> str:
        """The content of such a file."""

    def added_tokens(self) -> Sequence[str]:
        """Texts that are tokens wherever they stand."""


class BackendChoice(NamedTuple):
    """A tokenizer and the library that encodes for it. reason: why it is not the fast one, where
    that was wanted."""

    tokenizer: Tokenizer
    library: str
    reason: str | None = None


class FastTokenizer:
    """A tokenizer whose texts are encoded by fastokens; all else is the reference's.

    Raises ValueError, in words, where fastokens does not take the tokenizer or has other ids, and
    ImportError where it is not there.
    """

    def __init__(self, reference: Tokenizer) -> None:
        if not isinstance(reference, HasTokenizerJson):
            raise ValueError(f"it does not serve {reference.identity.kind}")
        self._reference = reference
        library = importlib.import_module(FAST)
        with library_errors("it does not take the tokenizer"):
            self._model: Any = library.Tokenizer.from_json_str(reference.tokenizer_json())
        with library_errors("it fails"):
            cases = equivalence_cases(reference.added_tokens())
            difference = first_difference(self._encode_without_fallback, reference.encode, cases)
        if difference is not None:
            raise ValueError(f"it has other ids than {REFERENCE} for {difference}")

    @property
    def vocab_size(self) -> int:
        return self._reference.vocab_size

    @property
    def eod(self) -> int:
        return self._reference.eod

    @property
    def fingerprint(self) -> str:
        return self._reference.fingerprint

    @property
    def identity(self) -> TokenizerFingerprint:
        return self._reference.identity

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_flat([text]).ids.tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids, lengths = self.encode_flat(texts)
        ends = np.cumsum(lengths).tolist()
        return [ids[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        try:
            return self._flat(texts)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # a panic of its Rust code is no Exception
            return encode_flat(self._reference, texts)

    def _flat(self, texts: Sequence[str]) -> FlatIds:
        ids, offsets = self._model.encode_batch_flat(list(texts))
        lengths = np.diff(np.frombuffer(offsets, "<u8")).astype(np.int64)
        return FlatIds(np.frombuffer(ids, "<u4"), lengths)

    def _encode_without_fallback(self, text: str) -> list[int]:
        """Without the reference's help, which would prove nothing."""
        ids: list[int] = self._flat([text]).ids.tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)

    def __reduce__(self) -> tuple[type[FastTokenizer], tuple[Tokenizer]]:
        return FastTokenizer, (self._reference,)  # the library's own object cannot be pickled


def select_backend(tokenizer: Tokenizer, backend: str) -> BackendChoice:
    """The tokenizer with the library that `backend`, one of BACKENDS, names.

    auto: the fast one where it is there, takes the tokenizer and proves right, else the reference,
    and why. Raises ValueError if a library that is asked for by name cannot be had.
    """
    own = REFERENCE if isinstance(tokenizer, HasTokenizerJson) else tokenizer.identity.kind
    if backend == REFERENCE or (backend == "auto" and own != REFERENCE):
        return BackendChoice(tokenizer, own)
    try:
        return BackendChoice(FastTokenizer(tokenizer), FAST)
    except ImportError as error:
        reason = f"{FAST} cannot be imported ({error}): {NEEDS}"
    except ValueError as error:
        reason = f"{FAST} cannot be used: {error}"
    if backend != "auto":
        raise ValueError(f"--tokenizer-backend {backend}: {reason}")
    return BackendChoice(tokenizer, own, reason)


def equivalence_cases(added_tokens: Iterable[str] = ()) -> Iterator[str]:
    """Texts on which encoders differ from each other."""
    yield ""
    yield from EDGES
    yield " ".join(EDGES)
    yield "".join(EDGES)
    yield "a" * LONG_WORD
    yield from (word * 1000 for word in ("\u00e9", " ", "ab", "-", "7", "\n", "\u4e2d"))
    some = [*range(0x80, 0x3100, 5), *range(0x3100, 0xD800, 61), *range(0xE000, 0x1FC00, 61)]
    yield "".join(f"a{char}b {char}{char} 1{char}" for char in map(chr, some))
    for token in added_tokens:
        yield f"{token} {token}{token}a{token} b {token}\n{token.upper()} {token[:-1]}"


def first_difference(
    encode: Callable[[str], list[int]],
    reference: Callable[[str], list[int]],
    texts: Iterable[str],
) -> str | None:
    """The first text that two encoders do not give the same ids, shortened; None if all agree.

    Each is encoded twice: libraries keep what they have seen.
    """
    for text in texts:
        expected = reference(text)
        for _ in range(2):
            if encode(text) != expected:
                return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
    return None
