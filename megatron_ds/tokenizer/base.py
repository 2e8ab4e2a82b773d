"""What the rest of the house asks of a tokenizer."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

LARGEST_ID = (1 << 31) - 1
"""Ids are stored as int32 at most."""


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

    @property
    def identity(self) -> TokenizerFingerprint:
        """What is kept beside the data."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. No end token is added, and no begin token but by Llama2Tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, the same as `encode` gives, faster."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens appear as their text, except those of the kinds that say
        otherwise."""


class FlatIds(NamedTuple):
    """The ids of many texts, back to back, and how many each text has."""

    ids: npt.NDArray[np.generic]
    lengths: npt.NDArray[np.int64]


@runtime_checkable
class FlatTokenizer(Protocol):
    """A tokenizer that makes arrays without a Python number for each id."""

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """The ids that `encode_batch` gives."""


def encode_flat(tokenizer: Tokenizer, texts: Sequence[str]) -> FlatIds:
    """The ids of texts as one array. Raises ValueError where the tokenizer refuses a text."""
    if isinstance(tokenizer, FlatTokenizer):
        return tokenizer.encode_flat(texts)
    encoded = tokenizer.encode_batch(texts)
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    ids = itertools.chain.from_iterable(encoded)
    return FlatIds(np.fromiter(ids, np.int32, int(lengths.sum())), lengths)


def checked_size(vocab: Mapping[str, int], source: str) -> int:
    """The number of ids of a vocabulary: one more than the largest.

    source: flag and file, for errors. Raises ValueError for an empty vocabulary and for what is no
    id.
    """
    if not vocab:
        raise ValueError(f"{source}: its vocabulary is empty")
    for token, number in vocab.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{source}: the id of {token!r} is {number!r}, no whole number")
        if not 0 <= number < LARGEST_ID:
            raise ValueError(
                f"{source}: the id {number} of {token!r} is outside 0 ... {LARGEST_ID - 1}"
            )
    return max(vocab.values()) + 1


def read_json(path: str | os.PathLike[str], flag: str) -> object:
    """The content of a JSON file. Raises ValueError with the flag and file, whatever is wrong."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{flag} {path}: not JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{flag} {path}: is nested too deeply") from None


def library(name: str, needed_by: str) -> Any:
    """A library that not every installation has. Raises ValueError if it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{needed_by} needs the library {name}, which cannot be imported ({error}): "
            f"pip install {name}"
        ) from None


@contextmanager
def library_errors(source: str) -> Iterator[None]:
    """Puts `source`, flag and file, before whatever a tokenizer library raises about a file.

    Those libraries raise exceptions of every kind; a panic of their Rust code is none of Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{source}: {str(error) or type(error).__name__}") from error


def fingerprint_of(kind: str, parts: Iterable[bytes]) -> str:
    """Hash of a kind of tokenizer and of the contents that define it."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"{kind}-{digest.hexdigest()[:32]}"
