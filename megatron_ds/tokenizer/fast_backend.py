"""Fast encoding backends: libraries other than the reference, `tokenizers`, that have proved
equivalent.

A fast library is used only if it loads the tokenizer and gives the reference's ids for texts that
such libraries get wrong. It is imported only when requested. Must not know files or data.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_ds.config.checks import import_library
from megatron_ds.config.data_files import read_table
from megatron_ds.config.problems import Problem, UserError, option, user_error
from megatron_ds.tokenizer.base import (
    FlatIds,
    JsonTokenizer,
    Tokenizer,
    library_errors,
)
from megatron_ds.tokenizer.export.lost_text import LostCharacters

REFERENCE = "tokenizers"
FAST = ("gigatoken", "fastokens")
"""The fastest first."""
BACKENDS = ("auto", REFERENCE, *reversed(FAST))
RENEWED_CHARS = 1 << 28
"""Characters after which gigatoken starts anew: it forgets none of the words that it has seen."""
LONG_WORD = 70_000
"""Characters: exceeds a 16-bit counter."""
DISPLAYED_CHARS = 60
"""Characters of a text in messages."""

EDGES: list[str] = read_table(__file__, "edge_texts.toml")["texts"]


class BackendChoice(NamedTuple):
    """A tokenizer and the library that encodes for it."""

    tokenizer: Tokenizer
    library: str
    reason: Problem | None = None
    """Reason that the fast library is not used although it was allowed."""


class Encoder(Protocol):
    """Encodes texts by a fast library."""

    def __call__(self, texts: Sequence[str]) -> FlatIds: ...


class Fastokens:
    """Encodes by fastokens.

    Args:
        library: The module.
        vocabulary: The contents of a tokenizer.json.
    """

    def __init__(self, library: Any, vocabulary: str) -> None:
        self.model: Any = library.Tokenizer.from_json_str(vocabulary)

    def __call__(self, texts: Sequence[str]) -> FlatIds:
        ids, offsets = self.model.encode_batch_flat(list(texts))
        lengths = np.diff(np.frombuffer(offsets, "<u8")).astype(np.int64)
        return FlatIds(np.frombuffer(ids, "<u4"), lengths)


class Gigatoken:
    """Encodes by gigatoken, on the calling thread.

    Args:
        library: The module.
        vocabulary: The contents of a tokenizer.json.
    """

    def __init__(self, library: Any, vocabulary: str) -> None:
        self._load = library.Tokenizer.from_json
        self._vocabulary = vocabulary
        self._seen = 0
        self.model: Any = self._load(vocabulary).backend

    def __call__(self, texts: Sequence[str]) -> FlatIds:
        if self._seen > RENEWED_CHARS:
            self.model = self._load(self._vocabulary).backend
            self._seen = 0
        self._seen += sum(map(len, texts))
        rows = self.model.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(rows.offsets.data)
        ids = np.asarray(rows.content.data)[offsets[0] : offsets[-1]]
        return FlatIds(ids.astype("<u4", copy=False), np.diff(offsets).astype(np.int64))


ENCODERS: dict[str, Callable[[Any, str], Encoder]] = {
    "fastokens": Fastokens,
    "gigatoken": Gigatoken,
}


class FastTokenizer(Tokenizer):
    """A tokenizer that encodes with a fast library, and leaves all else to the reference."""

    def __init__(self, reference: Tokenizer, library: str) -> None:
        """
        Args:
            reference: The tokenizer.
            library: One of `FAST`.

        Raises:
            UserError: If the library is not installed, does not support the tokenizer, or gives
                other ids.
        """
        if not isinstance(reference, JsonTokenizer):
            name = reference.fingerprint.kind
            raise user_error("fast-backend-unsupported-tokenizer-type", library=library, kind=name)
        self._reference = reference
        self._library = library
        self.vocab_size = reference.vocab_size
        self.eod = reference.eod
        self.bos = reference.bos
        self.adds_bos = reference.adds_bos
        self.fingerprint = reference.fingerprint
        module = import_library(library, f"{option('tokenizer_backend')} {library}")
        with library_errors("fast-backend-rejects-tokenizer", library=library):
            self._encode_flat = ENCODERS[library](module, reference.tokenizer_json())
        with library_errors("fast-backend-fails", library=library):
            # Without the reference's help, which would hide a failure.
            difference = first_difference(
                lambda text: self._encode_flat([text]).ids.tolist(),
                reference.encode,
                equivalence_cases(reference.added_tokens()),
            )
        if difference is not None:
            raise user_error("fast-backend-ids-differ", library=library, difference=difference)

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

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)

    def lost_characters(self) -> LostCharacters | None:
        return self._reference.lost_characters()

    def __reduce__(self) -> tuple[type[FastTokenizer], tuple[Tokenizer, str]]:
        # The library's own object cannot be pickled.
        return FastTokenizer, (self._reference, self._library)


def select_backend(tokenizer: Tokenizer, backend: str) -> BackendChoice:
    """Chooses the library that encodes.

    Args:
        tokenizer: Reference tokenizer.
        backend: One of `BACKENDS`. "auto" takes the fastest library that is installed, supports
            the tokenizer and proves equivalent, otherwise the reference.

    Raises:
        UserError: If a library that is requested by name cannot be used.
    """
    native = REFERENCE if isinstance(tokenizer, JsonTokenizer) else tokenizer.fingerprint.kind
    if backend == REFERENCE or (backend == "auto" and native != REFERENCE):
        return BackendChoice(tokenizer, native)
    if backend != "auto":
        return BackendChoice(FastTokenizer(tokenizer, backend), backend)
    reason: Problem | None = None
    for library in FAST:
        try:
            return BackendChoice(FastTokenizer(tokenizer, library), library)
        except UserError as error:
            reason = error.problems[0]
    return BackendChoice(tokenizer, native, reason)


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
        text = f"{token} {token}{token}a{token} b {token}\n{token.upper()} {token[:-1]}"
        yield text
        yield unicodedata.normalize("NFD", text)  # a normalizer may compose the token


def first_difference(
    encode: Callable[[str], list[int]], reference: Callable[[str], list[int]], texts: Iterable[str]
) -> str | None:
    """The first text, shortened, that two encoders encode differently; None if all agree."""
    for text in texts:
        expected = reference(text)
        for _ in range(2):  # the second result may come from the library's cache
            if encode(text) != expected:
                return repr(text[:DISPLAYED_CHARS] + "..." * (len(text) > DISPLAYED_CHARS))
    return None
