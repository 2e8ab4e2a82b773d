"""Tokens of the library `tokenizers` as llama.cpp lists them, and names of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ds.config.problems import Problem
from megatron_ds.tokenizer.gguf.keys import CONTROL, NORMAL, UNUSED, USER_DEFINED, unused


@dataclass
class Vocabulary:
    """Keys of a tokenizer."""

    keys: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """Reasons why llama.cpp would give other ids."""
    warnings: list[Problem] = field(default_factory=list)


def tokens_of(library: Any) -> Iterator[str]:
    """The tokens by id; ids without one get a name."""
    vocab = library.get_vocab(with_added_tokens=True)
    by_id = {index: token for token, index in vocab.items()}
    for index in range(max(by_id) + 1):
        yield by_id.get(index, unused(index))


def types_of(library: Any) -> Iterator[int]:
    """The types of the tokens by id."""
    added = library.get_added_tokens_decoder()
    ids = {*library.get_vocab(with_added_tokens=True).values()}
    for index in range(max(ids) + 1):
        if index in added:
            yield CONTROL if added[index].special else USER_DEFINED
        else:
            yield NORMAL if index in ids else UNUSED


def merges_of(model: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """The pairs that a BPE of a tokenizer.json merges."""
    for pair in model["merges"]:
        yield pair.split(" ") if isinstance(pair, str) else pair
