"""Checks of the training data before anything is built: files, tokenizer, token ids, splits.

Owns the messages about data that does not fit its run. Knows flags and files, but no ranks, cache
or torch, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from megatron_ds.config import DataConfig, flag_of
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.blend.blend_spec import SPLITS, DatasetGroup, DocumentSelection, read_groups
from megatron_ds.data.blend.usage_report import join_limited
from megatron_ds.data.remote.token_cache import RemoteTokens, TokenCache, is_url
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset, Tokens
from megatron_ds.data.token_files.tokenizer_metadata import tokenizer_mismatch
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

MAX_BLOCKS_PER_FILE = 64
MAX_BLOCKS = 4096
"""Blocks of all files together; every file has at least one."""
REMOTE_BLOCKS = 4
"""Blocks of a file by URL; reading one may be a download."""
BLOCK_TOKENS = 4096
"""Tokens of a block. Token ids are checked in blocks that are spread evenly over a file."""
CHECKED_DOCUMENTS = 64
"""First documents of a file whose last token is checked."""
MAX_NAMED_FILES = 3
"""Most files that a warning names."""


class DataFiles:
    """Dataset groups and token files of a run, shared by the checks and the datasets.

    Args:
        config: The data flags.
        cache: For the files of URLs; None for one that the flags name.

    Attributes:
        groups: Dataset groups of the flags.
        problems: Problems of the flags and of the files that list groups.
        prefixes: Prefixes of all token files, without duplicates.
        probed_blocks: Blocks of each file whose token ids are checked: fewer if there are many.
        cache: The cache.
        opens_all: Whether all indexes are built at the start, also of very large blends.
        checked_vocab_size: Vocabulary size against which the token ids of all files were checked.
    """

    def __init__(self, config: DataConfig, cache: TokenCache | None = None) -> None:
        self.config = config
        self.cache = cache or TokenCache(
            config.object_storage_cache_path, config.object_storage_cache_gb
        )
        self.groups, self.problems = read_groups(config)
        sources = (source for group in self.groups for source in group.sources)
        self.prefixes = list(dict.fromkeys(source.prefix for source in sources))
        blocks = MAX_BLOCKS // max(1, len(self.prefixes))
        self.probed_blocks = max(1, min(MAX_BLOCKS_PER_FILE, blocks))
        self.opens_all = False
        self.checked_vocab_size: int | None = None
        self._opened: dict[str, IndexedDataset] = {}

    @property
    def train_prefixes(self) -> list[str]:
        """Prefixes of the training data."""
        groups = [group.sources for group in self.groups if group.split == "train"]
        return list(dict.fromkeys(source.prefix for sources in groups for source in sources))

    def open(self, prefix: str) -> IndexedDataset:
        """Opens a token file, or returns it if it is open.

        Raises:
            UserError: If it is damaged.
        """
        if prefix not in self._opened:
            self._opened[prefix] = IndexedDataset(prefix, cache=self.cache)
        return self._opened[prefix]

    def identities(self, *, reads: bool = False) -> Iterator[tuple[str, str]]:
        """Identities of the sources of the data and their files, which may be in any folder.

        Args:
            reads: Identify files by blocks of their contents too, and not only by their sizes.
        """
        for group in self.groups:
            for index, source in enumerate(group.sources, 1):
                name, weight = os.path.basename(source.prefix), source.given_weight
                value = f"{name}, weight {weight}, documents {source.documents.text}"
                yield f"source {index} of {group.flag} ({group.split} {group.name})", value
        if path := self.config.exclude_documents:
            yield "--exclude-documents", xxhash.xxh3_64(Path(path).read_bytes()).hexdigest()
        for index, prefix in enumerate(self.prefixes, 1):
            file = self.open(prefix)
            value = f"{file.sizes[0]} and {file.sizes[1]} bytes"
            if file.version:  # of a store, which has given all hosts the same content with it
                value = f"{value}, version {file.version}"
            elif reads:
                value = f"{value} with content {self._content_digest(prefix)}"
            yield f"{os.path.basename(prefix)} (.bin and .idx, file {index})", value

    def _content_digest(self, prefix: str) -> str:
        """A digest of the blocks of a file that the checks read, and of the ends of its index."""
        file = self.open(prefix)
        ends = file.lengths[:BLOCK_TOKENS], file.lengths[-BLOCK_TOKENS:]
        parts = (*ends, _probe(file, self.probed_blocks))
        return xxhash.xxh3_64(b"".join(part.tobytes() for part in parts)).hexdigest()

    def with_text(self, group: DatasetGroup) -> DatasetGroup:
        """The group without the files that --split leaves without validation or test documents.

        Raises:
            UserError: If a file is damaged.
        """
        empty = [
            source
            for source in group.sources
            if group.split != "train"
            and source.documents.may_be_empty
            and not _has_tokens(self.open(source.prefix), source.documents)
        ]
        return group.without(empty) if empty else group


def data_problems(
    files: DataFiles,
    num_samples: tuple[int, int, int] | None,
    vocab_size: int | None,
    fingerprint: TokenizerFingerprint | None = None,
) -> Iterator[Problem]:
    """Checks the data flags and the token files.

    What depends on a value that is None is not checked.

    Args:
        files: The data flags and their files, which are opened here.
        num_samples: Samples that the run needs of train, valid and test.
        vocab_size: Vocabulary size of the tokenizer.
        fingerprint: Compared with the tokenizer recorded with each pair of files.
    """
    yield from files.problems
    files.cache.find(files.prefixes)
    yield from files.cache.space_problems(files.prefixes)
    samples = dict(zip(SPLITS, num_samples or (0, 0, 0), strict=True))
    uses: dict[tuple[str, str], dict[tuple[str, int, DocumentSelection], None]] = {}
    for group in files.groups:
        for source in group.sources:
            needed = uses.setdefault((group.flag, source.prefix), {})
            if samples[group.split]:
                needed[group.split, samples[group.split], source.documents] = None
    for (flag, prefix), needed in uses.items():
        for problem in _file_problems(files, prefix, vocab_size, fingerprint, needed):
            yield problem.with_prefix(f"{flag} ")
    files.checked_vocab_size = vocab_size


def _file_problems(
    files: DataFiles,
    prefix: str,
    vocab_size: int | None,
    fingerprint: TokenizerFingerprint | None,
    needed: Iterable[tuple[str, int, DocumentSelection]],
) -> Iterator[Problem]:
    """Checks one pair.

    Args:
        files: Opens the pair.
        prefix: Path of the pair.
        vocab_size: As for `data_problems`.
        fingerprint: As for `data_problems`.
        needed: Splits that read the file, their samples, and the documents that they read.
    """
    try:
        if missing := list(_missing_files(prefix, files.cache)):
            yield from missing
            return
        file = files.open(prefix)
    except UserError as error:
        yield from (problem.with_prefix(f"{prefix}: ") for problem in error.problems)
        return
    mismatch = (
        []
        if fingerprint is None
        else list(tokenizer_mismatch(prefix, fingerprint, file.tokenizer_path))
    )
    yield from mismatch
    if vocab_size is not None and not mismatch:
        yield from out_of_vocabulary(file, vocab_size, files.probed_blocks)
    for split, samples, documents in needed:
        if split != "train" and documents.may_be_empty:
            continue  # then it is not evaluated
        for problem in empty_selection(split, file, samples, documents):
            yield problem.with_prefix(f"{prefix}: ")


def out_of_vocabulary(
    file: IndexedDataset, vocab_size: int, probed_blocks: int
) -> Iterator[Problem]:
    """Checks a sample of a file's token ids against the vocabulary.

    Args:
        file: The token file.
        vocab_size: Vocabulary size of the tokenizer.
        probed_blocks: Number of blocks to read.
    """
    limits = np.iinfo(file.dtype)  # type: ignore[type-var]
    if limits.max < vocab_size - 1:
        yield Problem("token-dtype-too-small", file=file, limits=limits, vocab_size=vocab_size)
    probed = _probe(file, probed_blocks)
    for token in (int(probed.min()), int(probed.max())) if probed.size else ():  # type: ignore[type-var]
        if not 0 <= token < vocab_size:
            last = vocab_size - 1
            yield Problem("data-token-outside-vocabulary", file=file, token=token, last=last)


def empty_selection(
    split: str, file: IndexedDataset, samples: int, documents: DocumentSelection
) -> Iterator[Problem]:
    """Checks that the documents of a split, which needs samples, have tokens."""
    if _has_tokens(file, documents):
        return
    remedy = "add text" if split == "train" else "add text, or disable it with --eval-iters 0"
    yield Problem(
        "split-without-tokens",
        samples=samples,
        split=split,
        prefix=file.prefix,
        empty_message=documents.empty_message(split, len(file)),
        remedy=remedy,
    )


def _has_tokens(file: IndexedDataset, documents: DocumentSelection) -> bool:
    first, end = documents.range_of(len(file))
    return bool(file.lengths[first:end].any())


def _missing_files(prefix: str, cache: TokenCache) -> Iterator[Problem]:
    """Checks that both files exist; suggests the prefix that was probably meant.

    Raises:
        UserError: If the store of a URL does not answer.
    """
    exists: Callable[[str], bool] = cache.exists if is_url(prefix) else os.path.exists
    is_file: Callable[[str], bool] = cache.exists if is_url(prefix) else os.path.isfile
    stem, suffix = os.path.splitext(prefix)
    document = f"{prefix}_text_document"
    hint = ""
    if all(exists(f"{prefix}{end}") for end in (".bin", ".idx")):
        return
    if suffix in (".bin", ".idx") and is_file(prefix):
        hint = f" (give the prefix only: {stem})"
    elif is_file(f"{document}.idx"):
        hint = f" (did you mean {document}?)"
    for suffix in (".bin", ".idx"):
        if not exists(prefix + suffix):
            yield Problem("data-file-missing", prefix=prefix, path=prefix + suffix, hint=hint)


def _probe(file: IndexedDataset, blocks: int) -> Tokens:
    """All tokens of a small file; otherwise evenly spread blocks."""
    tokens = file.tokens
    if isinstance(tokens, RemoteTokens):
        blocks = min(blocks, REMOTE_BLOCKS)
    if tokens.size <= blocks * BLOCK_TOKENS:
        return tokens[:]
    starts = np.linspace(0, tokens.size - BLOCK_TOKENS, blocks, dtype=np.int64)
    if isinstance(tokens, RemoteTokens):
        return np.concatenate([tokens[at : at + BLOCK_TOKENS] for at in starts.tolist()])
    item = file.dtype.itemsize
    # Mapped memory would be read ahead: with thousands of files, megabytes around each block.
    with open(f"{file.prefix}.bin", "rb", buffering=0) as content:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        parts = [os.pread(content.fileno(), BLOCK_TOKENS * item, at * item) for at in starts]
    return np.frombuffer(b"".join(parts), dtype=file.dtype)


def data_warnings(
    files: DataFiles, samples: Sequence[int], eod: int | None, bos: int | None = None
) -> Iterator[Problem]:
    """Warns about splits without text, missing begin tokens, and flags that need end tokens.

    Args:
        files: The data flags and their files, for which `data_problems` has found no problems.
        samples: Samples that the run needs of train, valid and test.
        eod: End-of-document token of the tokenizer; None if unknown.
        bos: Token with which documents begin; None if there is none.
    """
    needed = dict(zip(SPLITS, samples, strict=True))
    for group in files.groups:
        kept = {source.prefix for source in files.with_text(group).sources}
        empty = [source.prefix for source in group.sources if source.prefix not in kept]
        if needed[group.split] and empty:
            text, named = group.sources[0].documents.text, join_limited(empty, MAX_NAMED_FILES)
            yield Problem("split-not-evaluated", text=text, split=group.split, named=named)
    without_bos = [] if bos is None else [one for one in files.prefixes if _lacks(files, one, bos)]
    if without_bos:
        named = join_limited(without_bos, MAX_NAMED_FILES)
        yield Problem("data-without-bos", named=named, checked=CHECKED_DOCUMENTS, bos=bos)
    eod_fields = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    fields = [name for name in eod_fields if getattr(files.config, name)]
    if not fields or eod is None or files.config.marks_ends:
        return
    without_eod = [prefix for prefix in files.prefixes if _lacks(files, prefix, eod)]
    if without_eod:
        yield Problem(
            "data-without-eod",
            *fields,
            flags=", ".join(map(flag_of, fields)),
            have="has" if len(fields) == 1 else "have",
            named=join_limited(without_eod, MAX_NAMED_FILES),
            checked=CHECKED_DOCUMENTS,
            eod=eod,
        )


def _lacks(files: DataFiles, prefix: str, token: int) -> bool:
    """Whether neither the ends of the first documents nor the sampled blocks have a token."""
    try:
        file = files.open(prefix)
    except UserError:
        return False
    # Documents without tokens have no last token.
    starts, ends = file.document_index[:-1], file.document_index[1:]
    last = (ends[ends > starts] - 1)[:CHECKED_DOCUMENTS]
    last = last[file.lengths[last] > 0]
    if not last.size:
        return False
    tokens = [int(file.get(int(sequence))[end]) for sequence in last for end in (0, -1)]
    return token not in tokens and not bool((_probe(file, files.probed_blocks) == token).any())
