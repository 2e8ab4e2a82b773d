"""Opens a token file of any kind.

A new kind is a module with a class that implements `TokenFile`, and an entry of KINDS. Blends,
usage reports, exclusion and evaluation then read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_ds.config.problems import Problem
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset, is_pair
from megatron_ds.data.token_files.missing_pair import missing_files
from megatron_ds.data.token_files.token_file import TokenFile


@dataclass(frozen=True)
class Kind:
    """A kind of token files.

    Attributes:
        is_at: Whether a path of this machine names a file of this kind.
        open: Opens the file of a path. Raises UserError if it is missing or damaged.
    """

    is_at: Callable[[str], bool]
    open: Callable[[str, TokenCache | None], TokenFile]


PAIR = Kind(is_pair, IndexedDataset)
"""Megatron's pair .bin and .idx, also by URL."""
KINDS: tuple[Kind, ...] = (PAIR,)
"""All kinds. A prefix at which no other kind is found is opened as a pair, whose error says what is
missing."""


def open_token_file(prefix: str, cache: TokenCache | None = None) -> TokenFile:
    """Opens a token file.

    Args:
        prefix: Path or URL.
        cache: Where the files of a URL are; None for the cache in the default folder.

    Raises:
        UserError: If it is missing, damaged or of no kind.
    """
    return _kind_of(prefix).open(prefix, cache)


def is_token_file(path: str) -> bool:
    """Whether a path of this machine names a token file."""
    return any(file_kind.is_at(path) for file_kind in KINDS)


def missing_problems(prefix: str, cache: TokenCache) -> Iterator[Problem]:
    """Problems of a prefix: its missing files, or the other kind of file that it names.

    Raises:
        UserError: If the store of a URL does not answer.
    """
    if _kind_of(prefix) is PAIR:
        yield from missing_files(prefix, cache)


def _kind_of(prefix: str) -> Kind:
    # The files of a pair are not looked for twice: there may be thousands on a slow file system.
    others = (file_kind for file_kind in KINDS if file_kind is not PAIR)
    return next((file_kind for file_kind in others if file_kind.is_at(prefix)), PAIR)
