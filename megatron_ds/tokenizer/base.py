"""The base of all tokenizers, and helpers of its implementations.

Must not know a kind of tokenizer.
"""

from __future__ import annotations

import codecs
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ds.config.checks import json_remedy
from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hash_files
from megatron_ds.tokenizer.token_bytes import library_token_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megatron_ds.tokenizer.export.library import ExportedTokenizer
    from megatron_ds.tokenizer.export.lost_text import LostCharacters

LARGEST_ID = (1 << 31) - 1
"""Ids are stored as int32 at most."""


class FlatIds(NamedTuple):
    """Concatenated ids of many texts, and the number of ids of each text."""

    ids: npt.NDArray[np.generic]
    lengths: npt.NDArray[np.int64]


class Tokenizer(ABC):
    """Converts text to ids and back. Implementations can be pickled, for worker processes."""

    vocab_size: int
    """Number of ids: the largest id plus one."""
    eod: int
    """End-of-document id."""
    further_ends: frozenset[int] = frozenset()
    """Other ids than `eod` at which the model ends texts."""
    bos: int | None = None
    """Begin-of-document id; None without one."""
    adds_bos: bool = False
    """Whether, by the tokenizer's own settings, texts begin with `bos`, which `encode` omits."""
    fingerprint: TokenizerFingerprint
    """Everything that determines the ids."""
    folder: Path | None = None
    """Folder of a Hugging Face tokenizer, or file of llama.cpp, which may have a chat template."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Adds no special token, except Llama2Tokenizer's <s>.

        Raises:
            UserError: If the tokenizer cannot encode the text.
        """
        return self.encode_batch([text])[0]

    @property
    def ends(self) -> frozenset[int]:
        """The ids at which texts end."""
        return self.further_ends | {self.eod}

    @property
    def prefix(self) -> int:
        """The id before a text without other context: of the begin, or of the last end."""
        return self.eod if self.bos is None else self.bos

    def begin(self, ids: list[int]) -> list[int]:
        """The ids of a text, after `bos` if texts begin with it."""
        return [self.prefix, *ids] if self.adds_bos and ids[:1] != [self.bos] else ids

    def without_bos(self, ids: list[int]) -> list[int]:
        """The ids of a text without what `begin` adds."""
        return ids[self.adds_bos and ids[:1] == [self.bos] :]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them, but faster."""

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """The ids of `encode_batch` as one array."""
        import numpy as np

        encoded = self.encode_batch(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ids = itertools.chain.from_iterable(encoded)
        return FlatIds(np.fromiter(ids, np.int32, int(lengths.sum())), lengths)

    def token_id(self, token: str) -> int | None:
        """Id of a token, which may be special; None if there is no such token."""
        return None

    def token_bytes(self) -> list[int] | None:
        """Bytes in UTF-8 of the text of each id, 0 for special tokens.

        None if the ids do not have all of the text.
        """
        return None

    def lost_characters(self) -> LostCharacters | None:
        """Counts the characters that the tokenizer drops; None if it drops none."""
        if (library := self.library()) is None:
            return None
        from megatron_ds.tokenizer.export.lost_text import LostCharacters

        lost = LostCharacters(library)
        return lost if lost.is_possible else None

    def library(self) -> Any:
        """The tokenizer of `tokenizers` that gives the ids of a Hugging Face tokenizer, and the
        characters of each; None without one."""
        return None

    def exported(self) -> ExportedTokenizer:
        """The tokenizer in the form of a tokenizer.json, without tokens around texts.

        Raises:
            UserError: If the library `tokenizers` has no tokenizer with these ids.
        """
        raise user_error("tokenizer-not-exportable", kind=self.fingerprint.kind)

    def _fingerprint_of(
        self,
        name: str,
        files: Iterable[str | Path],
        settings: Mapping[str, str | int] | None = None,
        content: str = "",
    ) -> TokenizerFingerprint:
        """The fingerprint by these files, once the other attributes are set."""
        ids = self.vocab_size, self.eod
        return TokenizerFingerprint(name, hash_files(files), *ids, settings or {}, content)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Special tokens appear as their text unless the kind documents otherwise."""


class JsonTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`, which a tokenizer.json describes completely."""

    _tokenizer: Any

    def tokenizer_json(self) -> str:
        """Content of such a file."""
        return str(self._tokenizer.to_str())

    @abstractmethod
    def added_tokens(self) -> Sequence[str]:
        """Texts that are tokens wherever they occur."""

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        index: int | None = self._tokenizer.token_to_id(token)
        return index

    def token_bytes(self) -> list[int] | None:
        return library_token_bytes(self._tokenizer, self.vocab_size)


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
    for token, index in vocab.items():
        if type(index) is not int:
            raise user_error("token-id-not-integer", field, path=path, token=token, number=index)
        if not 0 <= index < LARGEST_ID:
            last = LARGEST_ID - 1
            raise user_error(
                "token-id-out-of-range", field, path=path, number=index, token=token, largest=last
            )
    return max(vocab.values()) + 1


def read_bytes(path: str | Path, field: str) -> bytes:
    """Content of a tokenizer's file, without a byte order mark.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        return Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
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
        name = type(parsed).__name__
        raise user_error("tokenizer-file-not-json-object", field, path=path, kind=name)
    return parsed


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
