"""Checks of the training data before anything is built: files, tokenizer, token ids, splits.

Owns the messages about data that does not fit its run. Knows flags and files, but no ranks, cache
or torch, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from megatron_ds.config import DataConfig, flag_of
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.blend.blend_spec import (
    SPLITS,
    BlendSource,
    DatasetGroup,
    DocumentSelection,
    read_groups,
)
from megatron_ds.data.blend.usage_report import join_limited
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.token_files.kinds import missing_problems, open_token_file
from megatron_ds.data.token_files.token_file import BLOCK_TOKENS, TokenFile
from megatron_ds.data.token_files.tokenizer_metadata import tokenizer_mismatch
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint

MAX_BLOCKS_PER_FILE = 64
"""Token ids are checked in blocks that are spread evenly over a file."""
MAX_BLOCKS = 4096
"""Blocks of all files together; every file has at least one."""
CHECKED_DOCUMENTS = 64
"""First documents of a file whose last token is checked."""
MAX_NAMED_FILES = 3
"""Most files that a warning names."""


class DataFiles:
    """Dataset groups and token files of a run, shared by the checks and the datasets.

    Args:
        config: The data flags.
        cache: Cache of files at URLs; None for the cache that the flags name.

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
        self._opened: dict[str, TokenFile] = {}

    @property
    def train_prefixes(self) -> list[str]:
        """Prefixes of the training data."""
        groups = [group.sources for group in self.groups if group.split == "train"]
        return list(dict.fromkeys(source.prefix for sources in groups for source in sources))

    def open(self, prefix: str) -> TokenFile:
        """Opens a token file, or returns it if it is open.

        Raises:
            UserError: If it is damaged.
        """
        if prefix not in self._opened:
            self._opened[prefix] = open_token_file(prefix, self.cache)
        return self._opened[prefix]

    def identities(self, *, reads: bool = False) -> Iterator[tuple[str, str]]:
        """Identities of the sources of the data and their files, which may be in any folder.

        Args:
            reads: Identify files by blocks of their contents too, and not only by their sizes.
        """
        for group in self.groups:
            for index, source in enumerate(group.sources, 1):
                name = os.path.basename(source.prefix)
                weight = source.given_weight
                value = f"{name}, weight {weight}, documents {source.documents.text}"
                yield f"source {index} of {group.flag} ({group.split} {group.name})", value
        if path := self.config.exclude_documents:
            yield "--exclude-documents", xxhash.xxh3_64(Path(path).read_bytes()).hexdigest()
        for index, prefix in enumerate(self.prefixes, 1):
            file = self.open(prefix)
            value = f"{' and '.join(map(str, file.sizes))} bytes"
            if file.version:  # of a store, which has given all hosts the same content with it
                value = f"{value}, version {file.version}"
            elif reads:
                value = f"{value} with content {self._content_digest(prefix)}"
            yield f"{os.path.basename(prefix)} ({file.file_names}, file {index})", value

    def _content_digest(self, prefix: str) -> str:
        """A digest of the blocks of a file that the checks read, and of the ends of its index."""
        file = self.open(prefix)
        ends = file.lengths[:BLOCK_TOKENS], file.lengths[-BLOCK_TOKENS:]
        parts = (*ends, file.probe(self.probed_blocks))
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
    """Checks one token file.

    Args:
        files: Opens the file.
        prefix: Its path or URL.
        vocab_size: See `data_problems`.
        fingerprint: See `data_problems`.
        needed: Splits that read the file, their samples, and the documents that they read.
    """
    try:
        if missing := list(missing_problems(prefix, files.cache)):
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


def out_of_vocabulary(file: TokenFile, vocab_size: int, probed_blocks: int) -> Iterator[Problem]:
    """Checks a sample of a file's token ids against the vocabulary.

    Args:
        file: The token file.
        vocab_size: Vocabulary size of the tokenizer.
        probed_blocks: Number of blocks to read.
    """
    limits = np.iinfo(file.dtype)  # type: ignore[type-var]
    if limits.max < vocab_size - 1:
        yield Problem("token-dtype-too-small", file=file, limits=limits, vocab_size=vocab_size)
    probed = file.probe(probed_blocks)
    for token in (int(probed.min()), int(probed.max())) if probed.size else ():  # type: ignore[type-var]
        if not 0 <= token < vocab_size:
            last = vocab_size - 1
            yield Problem("data-token-outside-vocabulary", file=file, token=token, last=last)


def empty_selection(
    split: str, file: TokenFile, samples: int, documents: DocumentSelection
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


def _has_tokens(file: TokenFile, documents: DocumentSelection) -> bool:
    first, end = documents.range_of(len(file))
    return bool(file.lengths[first:end].any())


def boundary_problems(options: DataConfig, eod: int | None) -> Iterator[Problem]:
    """Checks that the tokenizer has an end-of-document token.

    Args:
        options: The data flags.
        eod: The token; None if the tokenizer has none.
    """
    if options.needs_eod and eod is None:
        fields = options.boundary_fields
        yield Problem("tokenizer-without-eod", *fields, flags=", ".join(map(flag_of, fields)))


def data_warnings(
    files: DataFiles,
    samples: Sequence[int],
    eod: int | None,
    bos: int | None = None,
    seq_length: int = 0,
) -> Iterator[Problem]:
    """Warns about splits without text, training data of less than a sample, missing begin tokens,
    and flags that need end tokens.

    Args:
        files: The data flags and their files, for which `data_problems` has found no problems.
        samples: Samples that the run needs of train, valid and test.
        eod: End-of-document token of the tokenizer; None if unknown.
        bos: Token with which documents begin; None without such a token.
        seq_length: Tokens of a sample.
    """
    needed = dict(zip(SPLITS, samples, strict=True))
    for group in files.groups:
        kept = {source.prefix for source in files.with_text(group).sources}
        empty = [source.prefix for source in group.sources if source.prefix not in kept]
        if needed[group.split] and empty:
            text = group.sources[0].documents.text
            named = join_limited(empty, MAX_NAMED_FILES)
            yield Problem("split-not-evaluated", text=text, split=group.split, named=named)
        for source in group.sources if group.split == "train" else ():
            if 0 < (tokens := _tokens_up_to(files, source, seq_length)) < seq_length:
                values = {"prefix": source.prefix, "seq_length": seq_length}
                yield Problem("data-shorter-than-sample", tokens=tokens, **values)
    without_bos = [] if bos is None else [one for one in files.prefixes if _lacks(files, one, bos)]
    if without_bos:
        named = join_limited(without_bos, MAX_NAMED_FILES)
        yield Problem("data-without-bos", named=named, checked=CHECKED_DOCUMENTS, bos=bos)
    if eod is None or not files.config.needs_eod:
        return
    fields = files.config.boundary_fields
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


def loss_span_problems(files: DataFiles) -> Iterator[Problem]:
    """Checks the flags for data in which only some tokens have a loss, such as conversations.

    Args:
        files: The data flags and their files, for which `data_problems` has found no problems.
    """
    options = files.config
    named = join_limited(_with_loss_spans(files), MAX_NAMED_FILES)
    if named and options.fim_data:
        yield Problem("loss-spans-with-fim", named=named)
    if named and options.needs_eod:
        flags = ", ".join(map(flag_of, options.boundary_fields))
        yield Problem("conversations-by-eod", named=named, flags=flags)


def loss_span_warnings(files: DataFiles, *, is_per_token: bool) -> Iterator[Problem]:
    """Warns about conversations that see each other, or that count unequally.

    Args:
        files: As in `loss_span_problems`.
        is_per_token: Whether each token of a step counts alike.
    """
    named = join_limited(_with_loss_spans(files), MAX_NAMED_FILES)
    if named and not files.config.reset_attention_mask:
        yield Problem("conversations-not-separated", named=named)
    if named and not is_per_token:
        yield Problem("answers-count-unequally", named=named)


def _with_loss_spans(files: DataFiles) -> list[str]:
    """Prefixes of the token files in which not all tokens have a loss."""
    prefixes = []
    for prefix in files.prefixes:
        with suppress(UserError):  # reported by data_problems
            if files.open(prefix).loss_spans is not None:
                prefixes.append(prefix)
    return prefixes


def _tokens_up_to(files: DataFiles, source: BlendSource, limit: int) -> int:
    """Tokens of a source's documents; of many, at least `limit`. 0 if the file is damaged."""
    try:
        file = files.open(source.prefix)
    except UserError:
        return 0
    first, end = source.documents.range_of(len(file))
    lengths = file.lengths[first:end]
    return int(lengths[lengths > 0][:limit].sum(dtype=np.int64))


def _lacks(files: DataFiles, prefix: str, token: int) -> bool:
    """Whether neither the ends of the first documents nor the sampled blocks have a token."""
    try:
        file = files.open(prefix)
    except UserError:
        return False
    # Documents without tokens have no last token.
    starts = file.document_index[:-1]
    ends = file.document_index[1:]
    last = (ends[ends > starts] - 1)[:CHECKED_DOCUMENTS]
    last = last[file.lengths[last] > 0]
    if not last.size:
        return False
    tokens = [int(file.get(int(sequence))[end]) for sequence in last for end in (0, -1)]
    return token not in tokens and not bool((file.probe(files.probed_blocks) == token).any())
