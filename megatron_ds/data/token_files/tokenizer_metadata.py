"""The file `PREFIX.tokenizer.json`, which records the tokenizer of a pair of token files.

Owns its content and its comparison with the tokenizer of a run. It is written with the pair, by
`indexed_writer.py`; pairs of other programs have none. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.data.token_files.indexed_dataset import TOKENIZER_SUFFIX
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

SplitterDescription = Mapping[str, str | int | bool]
"""Recorded settings of a sentence splitter."""

SENTENCES_KEY = "sentences"
"""Key of the sentence splitter, present if sequences are sentences. Training does not read it."""


def read_tokenizer(prefix: str, path: str | None = None) -> TokenizerFingerprint | None:
    """The tokenizer of a pair; None if it is not recorded.

    Args:
        prefix: Prefix of the pair.
        path: Where the file is, if not next to the pair.

    Raises:
        UserError: If the file is unreadable or damaged.
    """
    path = path or f"{prefix}{TOKENIZER_SUFFIX}"
    try:
        return TokenizerFingerprint.from_json(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise user_error("tokenizer-metadata-unreadable", path=path, error=error) from error
    except ValueError as error:
        raise user_error("tokenizer-metadata-damaged", path=path, error=error) from error


def read_sentence_splitter(prefix: str, path: str | None = None) -> SplitterDescription | None:
    """The sentence splitter of a pair; None if not recorded, or for one sequence per document.

    Raises:
        UserError: As `read_tokenizer` does.
    """
    path = path or f"{prefix}{TOKENIZER_SUFFIX}"
    if read_tokenizer(prefix, path) is None:
        return None
    splitter = json.loads(Path(path).read_bytes()).get(SENTENCES_KEY)
    return splitter if isinstance(splitter, dict) else None


def metadata_json(identity: TokenizerFingerprint, sentences: SplitterDescription | None) -> bytes:
    """Content of the file.

    Args:
        identity: The tokenizer.
        sentences: The sentence splitter; None for one sequence per document.
    """
    if sentences is None:
        return identity.to_json()
    content = {**json.loads(identity.to_json()), SENTENCES_KEY: sentences}
    return f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode()


def tokenizer_mismatch(
    prefix: str, identity: TokenizerFingerprint, path: str | None = None
) -> Iterator[Problem]:
    """Problems of a pair that was made with another tokenizer, or whose record is unreadable."""
    try:
        recorded = read_tokenizer(prefix, path)
    except UserError as error:
        yield from error.problems
        return
    if recorded is not None and not recorded.same_as(identity):
        yield Problem("tokenizer-mismatch", prefix=prefix, found=recorded, identity=identity)


def merged_metadata(prefixes: Sequence[str]) -> bytes | None:
    """Content of the file for a pair merged from others; None if one of them has no record.

    The sentence splitter is recorded if it is the same for all.

    Raises:
        UserError: If two of them were made with different tokenizers.
    """
    records = {prefix: read_tokenizer(prefix) for prefix in prefixes}
    known = {prefix: identity for prefix, identity in records.items() if identity is not None}
    for prefix, identity in known.items():
        first, other = next(iter(known.items()))
        if not identity.same_as(other):
            raise user_error(
                "merging-different-tokenizers",
                prefix=prefix,
                identity=identity,
                first=first,
                other=other,
            )
    if len(known) < len(records):
        return None
    splitters = [read_sentence_splitter(prefix) for prefix in prefixes]
    same = all(splitter == splitters[0] for splitter in splitters)
    return metadata_json(next(iter(known.values())), splitters[0] if same else None)
