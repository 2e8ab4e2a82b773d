"""The tokenizer protocol, and helpers of its implementations.

Must not know a kind of tokenizer.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megatron_ds.config.checks import json_remedy
from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

LARGEST_ID = (1 << 31) - 1
"""Ids are stored as int32 at most."""


class Tokenizer(Protocol):
    """Converts text to ids and back. Implementations can be pickled, for worker processes."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest id plus one."""

    @property
    def eod(self) -> int:
        """End-of-document id."""

    @property
    def fingerprint(self) -> TokenizerFingerprint:
        """Everything that determines the ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Adds no special token, except Llama2Tokenizer's <s>.

        Raises:
            UserError: If the tokenizer cannot encode the text.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them, but faster."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Special tokens appear as their text unless the kind documents otherwise."""


class FlatIds(NamedTuple):
    """Concatenated ids of many texts, and the number of ids of each text."""

    ids: npt.NDArray[np.generic]
    lengths: npt.NDArray[np.int64]


@runtime_checkable
class FlatTokenizer(Protocol):
    """A tokenizer that creates arrays without a Python object per id."""

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """The ids of `encode_batch`."""


def encode_flat(tokenizer: Tokenizer, texts: Sequence[str]) -> FlatIds:
    """Ids of texts as one array.

    Raises:
        UserError: If the tokenizer cannot encode a text.
    """
    if isinstance(tokenizer, FlatTokenizer):
        return tokenizer.encode_flat(texts)
    encoded = tokenizer.encode_batch(texts)
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    ids = itertools.chain.from_iterable(encoded)
    return FlatIds(np.fromiter(ids, np.int32, int(lengths.sum())), lengths)


def count_ids(vocab: Mapping[str, int], field: str, path: str | Path) -> int:
    """Number of ids of a vocabulary: its largest id plus one.

    Args:
        vocab: Tokens and their ids, not yet validated.
        field: Option field that names the file.
        path: The file.

    Raises:
        UserError: If the vocabulary is empty or has an invalid id.
    """
    if not vocab:
        raise user_error("vocabulary-empty", field, path=path)
    for token, number in vocab.items():
        if type(number) is not int:
            raise user_error("token-id-not-integer", field, path=path, token=token, number=number)
        if not 0 <= number < LARGEST_ID:
            last = LARGEST_ID - 1
            raise user_error(
                "token-id-out-of-range", field, path=path, number=number, token=token, largest=last
            )
    return max(vocab.values()) + 1


def read_bytes(path: str | Path, field: str) -> bytes:
    """Content of a tokenizer's file.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        why = error.strerror
        raise user_error("tokenizer-file-unreadable", field, path=path, strerror=why) from error


def read_lines(path: str | Path, field: str) -> list[str]:
    """Lines of a UTF-8 file of a tokenizer, with Unix or Windows line ends.

    Raises:
        UserError: If it cannot be read or is not UTF-8.
    """
    try:
        text = read_bytes(path, field).decode("utf-8")
    except UnicodeDecodeError as error:
        raise user_error("tokenizer-file-not-utf8", field, path=path, error=error) from error
    # Not splitlines(): tokens may contain Unicode's other line separators.
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def read_json(path: str | Path, field: str) -> dict[str, Any]:
    """The JSON object in a tokenizer's file.

    Raises:
        UserError: If the file cannot be read or holds anything else.
    """
    content = read_bytes(path, field)
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        text = f"{error}{json_remedy(error)}"
        raise user_error("tokenizer-file-not-json", field, path=path, error=text) from None
    if not isinstance(parsed, dict):
        kind = type(parsed).__name__
        raise user_error("tokenizer-file-not-json-object", field, path=path, kind=kind)
    return parsed


def import_library(name: str, needed_by: str) -> Any:
    """Imports an optional library.

    Args:
        name: Library.
        needed_by: Option that needs it, for the message.

    Raises:
        UserError: If it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise user_error("library-missing", needed_by=needed_by, name=name, error=error) from None


@contextmanager
def library_errors(code: str, **values: Any) -> Iterator[None]:
    """Converts everything that a tokenizer library raises into a `UserError`.

    Args:
        code: Kind of the problem.
        values: Values of its message, apart from `why`, the library's message.

    Raises:
        UserError: For any exception that does not end the process.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust code is not a subclass of Exception
        raise user_error(code, why=str(error) or type(error).__name__, **values) from error
