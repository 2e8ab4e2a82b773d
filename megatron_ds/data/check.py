"""What can be told of a run's data before anything is built: files, shares, ids.

Owns the sentences about data that does not fit its run. Knows flags and files; no ranks, no cache
and no torch, and writes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from megatron_ds.config import DataConfig, flag_of
from megatron_ds.data.indexed import IndexedDataset, Tokens
from megatron_ds.data.made_by import of_another
from megatron_ds.data.sample_index import parse_split, split_bounds
from megatron_ds.tokenizer.identity import Identity

DEFAULT_SPLIT = "969,30,1"
NAMES = ("train", "valid", "test")
PROBED_BLOCKS = 64
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
    identity: Identity | None = None,
) -> Iterator[str]:
    """Why the data flags and their files cannot feed the run, a line each.

    num_samples: samples that the run takes of each part. vocab_size: number of the tokenizer's ids.
    identity: the tokenizer's, to be held against what lies beside the data. What is None is not
    known, and what depends on it is not judged.
    """
    shares: Sequence[float] | None = None
    if config.data_path:
        try:
            shares = parse_split(config.split or DEFAULT_SPLIT)
            yield from no_training(config, shares)
        except ValueError as error:
            yield str(error)
    samples = dict(zip(NAMES, num_samples or (0, 0, 0), strict=True))
    for field in ("data_path", *(f"{name}_data_path" for name in NAMES)):
        flag, paths = flag_of(field), getattr(config, field) or ()
        try:
            prefixes = paths if len(paths) < 2 else parse_blend(paths, flag)[1]
        except ValueError as error:
            yield str(error)
            continue
        if field == "data_path":
            cut = shares
            fed = [name for name, share in zip(NAMES, shares or (), strict=False) if share]
        else:
            cut, fed = None, [field.removesuffix("_data_path")]
        needed = {name: samples[name] for name in fed if samples[name]}
        for prefix in dict.fromkeys(prefixes):
            problems = _file_problems(config, prefix, vocab_size, identity, needed, cut)
            yield from (f"{flag} {problem}" for problem in problems)


def _file_problems(
    config: DataConfig,
    prefix: str,
    vocab_size: int | None,
    identity: Identity | None,
    needed: dict[str, int],
    shares: Sequence[float] | None,
) -> Iterator[str]:
    """needed: samples by part. shares: of --split, for files that it cuts."""
    missing = list(_missing(prefix))
    if missing:
        yield from missing
        return
    try:
        file = IndexedDataset(prefix)
    except (ValueError, OSError) as error:
        yield f"{prefix}: {error}"
        return
    other = [] if identity is None else list(of_another(prefix, identity))
    yield from other
    if vocab_size is not None and not other:
        yield from wrong_ids(file, vocab_size)
    for name, samples in needed.items():
        yield from (
            f"{prefix}: {words}" for words in no_documents(config, name, file, samples, shares)
        )


def parse_blend(paths: Sequence[str], flag: str) -> tuple[list[float] | None, list[str]]:
    """Normalised weights and prefixes of `WEIGHT PREFIX WEIGHT PREFIX ...`; weight 0 drops out.

    `PREFIX PREFIX ...`, where no prefix is a number, has no weights: each file gives according to
    its size. Raises ValueError for anything else.
    """
    given = f"{flag} {' '.join(paths)}"
    if not any(_is_number(path) for path in paths):
        return None, list(paths)
    if len(paths) % 2:
        raise ValueError(f"{given}: must be prefixes alone, or WEIGHT PREFIX WEIGHT PREFIX ...")
    weights = [_weight(text, given) for text in paths[::2]]
    kept = [(weight, prefix) for weight, prefix in zip(weights, paths[1::2], strict=True) if weight]
    try:
        total = math.fsum(weight for weight, _ in kept)
    except OverflowError:
        raise ValueError(f"{given}: the weights' sum is no number") from None
    if total <= 0:
        raise ValueError(f"{given}: all weights are 0")
    return [weight / total for weight, _ in kept], [prefix for _, prefix in kept]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _weight(text: str, given: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"{given}: the weight {text!r} must be a number of at least 0")
    return weight


def no_training(config: DataConfig, shares: Sequence[float]) -> Iterator[str]:
    """--split may leave validation and test without a share, not the training."""
    if not shares[0]:
        yield f"--split {config.split}: leaves no documents for training"


def wrong_ids(file: IndexedDataset, vocab_size: int) -> Iterator[str]:
    """What shows that a token file was made with another tokenizer. No proof that it was not: only
    a part of its tokens is looked at."""
    limit = int(np.iinfo(file.dtype).max)  # type: ignore[type-var]
    if limit < vocab_size - 1:
        yield (
            f"{file.prefix}: its .bin holds {8 * file.dtype.itemsize}-bit tokens ({file.dtype}), "
            f"which cannot reach a vocabulary of {vocab_size}: it was made with another tokenizer"
        )
    probed = _probe(file.tokens)
    for token in (int(probed.min()), int(probed.max())) if probed.size else ():  # type: ignore[type-var]
        if not 0 <= token < vocab_size:
            yield (
                f"{file.prefix}: its .bin holds the token {token}, but the tokenizer's ids are 0 "
                f"to {vocab_size - 1}: it was made with another tokenizer, or is damaged"
            )


def no_documents(
    config: DataConfig,
    name: str,
    file: IndexedDataset,
    samples: int,
    shares: Sequence[float] | None,
) -> Iterator[str]:
    """Whether a part of the data that is to give samples holds no token. shares: of --split, for
    files that it cuts."""
    first, end = part_bounds(file, name, shares)
    if file.lengths[first:end].any():
        return
    what = f"{samples} {name} samples are asked of {file.prefix}"
    remedy = "give more text"
    if name != "train":
        remedy += ", or none are read with --eval-iters 0"
    if shares is None:
        yield f"{what}, which holds no tokens: {remedy}"
    else:
        yield (
            f"{what}, but --split {config.split or DEFAULT_SPLIT} leaves {name} none of its "
            f"{len(file)} documents: choose another --split (0 for no {name} part), or {remedy}"
        )


def part_bounds(file: IndexedDataset, name: str, shares: Sequence[float] | None) -> tuple[int, int]:
    """First and one-past-last of a file's documents that belong to a part."""
    return (0, len(file)) if shares is None else split_bounds(shares, len(file))[NAMES.index(name)]


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


def _probe(tokens: Tokens) -> Tokens:
    """Some of the tokens: all of a small file, else blocks from its beginning to its end."""
    if tokens.size <= PROBED_BLOCKS * PROBED_TOKENS:
        return tokens
    starts = np.linspace(0, tokens.size - PROBED_TOKENS, PROBED_BLOCKS, dtype=np.int64)
    return np.concatenate([tokens[start : start + PROBED_TOKENS] for start in starts])


def data_remarks(config: DataConfig, eod: int | None) -> Iterator[str]:
    """What the flags on documents' ends lack in the data. eod: the tokenizer's; None: not known.

    Files that cannot be read are passed over: `data_problems` tells of them.
    """
    fields = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    flags = [flag_of(name) for name in fields if getattr(config, name)]
    if not flags or eod is None:
        return
    endless = [prefix for prefix in _prefixes(config) if _is_endless(prefix, eod)]
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
    found: dict[str, None] = {}
    for field in ("data_path", *(f"{name}_data_path" for name in NAMES)):
        paths = getattr(config, field) or ()
        with suppress(ValueError):
            prefixes = paths if len(paths) < 2 else parse_blend(paths, flag_of(field))[1]
            found.update(dict.fromkeys(prefixes))
    return list(found)


def _is_endless(prefix: str, eod: int) -> bool:
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
    return eod not in tokens and not bool((_probe(file.tokens) == eod).any())
