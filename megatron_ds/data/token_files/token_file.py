"""Interface of token files for readers, independent of the kind of file.

`kinds.py` opens a file. Knows no tokenizers, samples or torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.remote.token_cache import TokenCache

Tokens = npt.NDArray[np.generic]
IntArray = npt.NDArray[np.integer]

BLOCK_TOKENS = 4096
"""Tokens of a block that `TokenFile.probe` reads."""


class TokenArray(Protocol):
    """All tokens of a file: a read-only array, or an object that reads like one."""

    @property
    def size(self) -> int:
        """Number of tokens."""

    def __getitem__(self, key: Any, /) -> Any:
        """The tokens of a slice with step 1, as an array; or the token of an integer."""


class TokenFile(Protocol):
    """The token ids of documents, each of which consists of one or more sequences.

    A sequence is a range of consecutive tokens, and sequences follow each other without gaps.
    Arrays are contiguous, and readers change nothing. The file is pickled for loader processes,
    which should open it again instead of copying it. All properties may be attributes.
    """

    @property
    def prefix(self) -> str:
        """The path or URL that the flags name."""

    @property
    def file_names(self) -> str:
        """Names of its files in messages, such as ".bin and .idx"."""

    @property
    def tokens_path(self) -> str:
        """The file that holds the tokens, for messages."""

    @property
    def tokenizer_path(self) -> str:
        """The file on this machine that records the tokenizer; it may be missing."""

    @property
    def cache(self) -> TokenCache | None:
        """Cache through which tokens are downloaded; None if all of them are on this machine."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of its files."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Integer type of a token."""

    @property
    def lengths(self) -> IntArray:
        """[n], tokens of each sequence."""

    @property
    def pointers(self) -> IntArray:
        """[n], bytes of the tokens before each sequence."""

    @property
    def document_index(self) -> IntArray:
        """[d + 1], first sequence of each document, and n."""

    @property
    def tokens(self) -> TokenArray:
        """All tokens."""

    @property
    def loss_spans(self) -> IntArray | None:
        """[m, 2], first and end of each range of tokens with loss, in order and without overlap;
        None if all tokens have a loss."""

    @property
    def version(self) -> str:
        """Identifier of the content in an object store; empty for local files."""

    def __len__(self) -> int:
        """Number of sequences."""

    def get(self, index: int) -> Tokens:
        """Tokens of a sequence, read-only."""

    def probe(self, blocks: int) -> Tokens:
        """All tokens of a small file; otherwise about `blocks` evenly spread blocks of them."""

    def warm_up(self) -> None:
        """Reads all tokens once, so that later reads are fast, as far as the caches have room."""


def probed_slices(size: int, blocks: int) -> list[slice]:
    """The tokens that `TokenFile.probe` reads: all if they are few, or evenly spread blocks.

    Args:
        size: Tokens of the file.
        blocks: Number of blocks of BLOCK_TOKENS.
    """
    if size <= blocks * BLOCK_TOKENS:
        return [slice(0, size)]
    starts = np.linspace(0, size - BLOCK_TOKENS, blocks, dtype=np.int64).tolist()
    return [slice(start, start + BLOCK_TOKENS) for start in starts]


def probe(tokens: TokenArray, blocks: int) -> Tokens:
    """Implements `TokenFile.probe` where reading a slice reads nothing else."""
    return np.concatenate([tokens[part] for part in probed_slices(tokens.size, blocks)])
