"""What can be told of a run's data before anything is built: files, shares, ids.

Owns the sentences about data that does not fit its run. Knows flags and files; no ranks, no cache
and no torch, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_ds.config import DataConfig, flag_of
from megatron_ds.data.blend_spec import NAMES, DocumentSelection, read_groups
from megatron_ds.data.indexed_dataset import IndexedDataset, Tokens
from megatron_ds.data.tokenizer_metadata import tokenizer_mismatch
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

PROBED_BLOCKS = 64
PROBED_IN_ALL = 4096
"""Blocks of all files together, beyond one of each."""
PROBED_TOKENS = 4096
"""Tokens of a block: a token file is looked at in so many blocks of this size, evenly spread."""
DOCUMENTS_LOOKED_AT = 64
"""First documents of a file whose last token is looked at."""
FILES_NAMED = 3
"""Of those to which a remark applies."""


def data_problems(
    config: DataConfig,
    num_samples: tuple[int, int, int] | None,
    vocab_size: int | None,
    identity: TokenizerFingerprint | None = None,
) -> Iterator[str]:
    """Why the data flags and their files cannot feed the run, a line each.

    num_samples: samples that the run takes of each part. vocab_size: number of the tokenizer's ids.
    identity: the tokenizer's, to be held against what lies beside the data. What is None is not
    known, and what depends on it is not judged.
    """
    groups, problems = read_groups(config)
    yield from problems
    samples = dict(zip(NAMES, num_samples or (0, 0, 0), strict=True))
    uses: dict[tuple[str, str], list[tuple[str, DocumentSelection]]] = {}
    for group in groups:
        for source in group.sources:
            uses.setdefault((group.flag, source.prefix), []).append((group.part, source.cut))
    blocks = blocks_to_sample(len({prefix for _, prefix in uses}))
    for (flag, prefix), parts in uses.items():
        needed = [(part, samples[part], cut) for part, cut in parts if samples[part]]
        for problem in _file_problems(prefix, vocab_size, identity, needed, blocks):
            yield f"{flag} {problem}"


def _file_problems(
    prefix: str,
    vocab_size: int | None,
    identity: TokenizerFingerprint | None,
    needed: Sequence[tuple[str, int, DocumentSelection]],
    blocks: int,
) -> Iterator[str]:
    """needed: parts that read the file, their samples, and the documents that they read."""
    missing = list(_missing(prefix))
    if missing:
        yield from missing
        return
    try:
        file = IndexedDataset(prefix)
    except (ValueError, OSError) as error:
        yield f"{prefix}: {error}"
        return
    other = [] if identity is None else list(tokenizer_mismatch(prefix, identity))
    yield from other
    if vocab_size is not None and not other:
        yield from out_of_vocabulary(file, vocab_size, blocks)
    for part, samples, cut in dict.fromkeys(needed):
        yield from (f"{prefix}: {words}" for words in empty_selection(part, file, samples, cut))


def blocks_to_sample(files: int) -> int:
    """Blocks of each file that are looked at: fewer if there are many files."""
    return max(1, min(PROBED_BLOCKS, PROBED_IN_ALL // max(1, files)))


def out_of_vocabulary(
    file: IndexedDataset, vocab_size: int, blocks: int = PROBED_BLOCKS
) -> Iterator[str]:
    """What shows that a token file was made with another tokenizer. No proof that it was not: only
    `blocks` blocks of its tokens are looked at."""
    limit = int(np.iinfo(file.dtype).max)  # type: ignore[type-var]
    if limit < vocab_size - 1:
        yield (
            f"{file.prefix}: its .bin holds {8 * file.dtype.itemsize}-bit tokens ({file.dtype}), "
            f"which cannot reach a vocabulary of {vocab_size}: it was made with another tokenizer"
        )
    probed = _probe(file.tokens, blocks)
    for token in (int(probed.min()), int(probed.max())) if probed.size else ():  # type: ignore[type-var]
        if not 0 <= token < vocab_size:
            yield (
                f"{file.prefix}: its .bin holds the token {token}, but the tokenizer's ids are 0 "
                f"to {vocab_size - 1}: it was made with another tokenizer, or is damaged"
            )


def empty_selection(
    part: str, file: IndexedDataset, samples: int, cut: DocumentSelection
) -> Iterator[str]:
    """Whether the documents that are to give a part's samples hold no token."""
    first, end = cut.bounds(len(file))
    if file.lengths[first:end].any():
        return
    remedy = "give more text"
    if part != "train":
        remedy += ", or none are read with --eval-iters 0"
    asked = f"{samples} {part} samples are asked of {file.prefix}"
    yield f"{asked}, {cut.empty_message(part, len(file))}{remedy}"


def _missing(prefix: str) -> Iterator[str]:
    """A prefix's files that are not there, with the prefix that was likely meant."""
    stem, suffix = os.path.splitext(prefix)
    document = f"{prefix}_text_document"
    hint = ""
    if suffix in (".bin", ".idx") and os.path.isfile(prefix):
        hint = f" (give the prefix alone: {stem})"
    elif os.path.isfile(f"{document}.idx"):
        hint = f" (did you mean {document}?)"
    for suffix in (".bin", ".idx"):
        if not os.path.exists(prefix + suffix):
            yield f"{prefix}: there is no file {prefix + suffix}{hint}"


def _probe(tokens: Tokens, blocks: int) -> Tokens:
    """Some of the tokens: all of a small file, else blocks from its beginning to its end."""
    if tokens.size <= blocks * PROBED_TOKENS:
        return tokens
    starts = np.linspace(0, tokens.size - PROBED_TOKENS, blocks, dtype=np.int64)
    return np.concatenate([tokens[start : start + PROBED_TOKENS] for start in starts])


def data_warnings(config: DataConfig, eod: int | None) -> Iterator[str]:
    """What the flags on documents' ends lack in the data. eod: the tokenizer's; None: not known.

    Files that cannot be read are passed over: `data_problems` tells of them.
    """
    fields = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    flags = [flag_of(name) for name in fields if getattr(config, name)]
    if not flags or eod is None:
        return
    prefixes = _prefixes(config)
    blocks = blocks_to_sample(len(prefixes))
    endless = [prefix for prefix in prefixes if _has_no_eod(prefix, eod, blocks)]
    if endless:
        named = ", ".join(endless[:FILES_NAMED])
        if len(endless) > FILES_NAMED:
            named += f" and {len(endless) - FILES_NAMED} more"
        have = "has" if len(flags) == 1 else "have"
        yield (
            f"{', '.join(flags)} {have} no effect on {named}: none of the first "
            f"{DOCUMENTS_LOOKED_AT} documents ends with the end-of-document token {eod}; "
            "preprocess with --append-eod"
        )


def _prefixes(config: DataConfig) -> list[str]:
    """All token files, each once."""
    groups, _ = read_groups(config)
    return list(dict.fromkeys(source.prefix for group in groups for source in group.sources))


def _has_no_eod(prefix: str, eod: int, blocks: int) -> bool:
    """Whether the end-of-document token is neither at the end of the first documents of a file nor
    anywhere else that is looked at."""
    try:
        file = IndexedDataset(prefix)
    except (ValueError, OSError):
        return False
    # A document without tokens ends nowhere.
    starts, ends = file.document_index[:-1], file.document_index[1:]
    last = (ends[ends > starts] - 1)[:DOCUMENTS_LOOKED_AT]
    last = last[file.lengths[last] > 0]
    if not last.size:
        return False
    tokens = [int(file.get(int(sequence))[-1]) for sequence in last]
    return eod not in tokens and not bool((_probe(file.tokens, blocks) == eod).any())
