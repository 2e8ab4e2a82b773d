"""Which tokenizer made a pair of token files: `PREFIX.tokenizer.json` beside it.

Owns that file's content, its reading and what to say where it does not fit. It is written with the
pair, by `indexed.py`; pairs of other programs have none. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_ds.data.indexed_dataset import TOKENIZER_SUFFIX
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

Description = Mapping[str, str | int | bool]
"""What is recorded of a sentence splitter."""

SENTENCES = "sentences"
"""The key that only pairs of sentences have. Training does not look at it."""


def read_made_by(prefix: str) -> TokenizerFingerprint | None:
    """The tokenizer of a pair; None if nothing says it. Raises ValueError, naming the file."""
    path = Path(prefix + TOKENIZER_SUFFIX)
    try:
        return TokenizerFingerprint.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: holds {error}") from error


def read_sentences(prefix: str) -> Description | None:
    """What cut a pair's documents into sentences; None for one sequence per document, and if
    nothing says it. Raises ValueError as `read_made_by` does."""
    if read_made_by(prefix) is None:
        return None
    found = json.loads(Path(prefix + TOKENIZER_SUFFIX).read_bytes()).get(SENTENCES)
    return found if isinstance(found, dict) else None


def content_of(identity: TokenizerFingerprint, sentences: Description | None) -> bytes:
    """What is written beside a pair. sentences: what cut its documents into sentences."""
    if sentences is None:
        return identity.to_json()
    found = json.loads(identity.to_json())
    return (
        json.dumps({**found, SENTENCES: sentences}, indent=2, ensure_ascii=False) + "\n"
    ).encode()


def tokenizer_mismatch(prefix: str, identity: TokenizerFingerprint) -> Iterator[str]:
    """What shows that a pair was made with another tokenizer."""
    try:
        found = read_made_by(prefix)
    except ValueError as error:
        yield str(error)
        return
    if found is not None and not found.same_as(identity):
        yield (
            f"{prefix}: was made with another tokenizer: {prefix}{TOKENIZER_SUFFIX} names "
            f"{found}, and this run has {identity}; give the data's tokenizer or make the data "
            "again (if both give the same ids, remove that file)"
        )


def made_by_of(prefixes: list[str]) -> bytes | None:
    """What to write beside a pair put together from these; None if one of them says nothing. What
    cut documents into sentences is told if it was the same for all.

    Raises ValueError, showing both, if two were made with different tokenizers.
    """
    found = {prefix: read_made_by(prefix) for prefix in prefixes}
    known = {prefix: identity for prefix, identity in found.items() if identity is not None}
    for prefix, identity in known.items():
        first, other = next(iter(known.items()))
        if not identity.same_as(other):
            raise ValueError(
                f"{prefix} was made with {identity} and {first} with {other}: different "
                "tokenizers' ids do not go together"
            )
    if len(known) < len(found):
        return None
    splitters = [read_sentences(prefix) for prefix in prefixes]
    same = all(splitter == splitters[0] for splitter in splitters)
    return content_of(next(iter(known.values())), splitters[0] if same else None)
