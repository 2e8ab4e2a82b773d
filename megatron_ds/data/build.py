"""From the data flags to the three datasets: which files, which part of each, which cached indexes.

Knows flags, files and the index cache; no ranks, and no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_ds.config import DataConfig
from megatron_ds.data.blend import BlendedDataset
from megatron_ds.data.blend_order import blend_order
from megatron_ds.data.cache import ArrayCache, Arrays
from megatron_ds.data.check import (
    DEFAULT_SPLIT,
    NAMES,
    no_documents,
    no_training,
    parse_blend,
    part_bounds,
    wrong_ids,
)
from megatron_ds.data.gpt_dataset import GPTDataset, TokenDataset
from megatron_ds.data.indexed import IndexedDataset
from megatron_ds.data.sample_index import (
    SampleIndexes,
    blend_requests,
    build_indexes,
    parse_split,
)

FORMAT = 1
"""Raised when the same inputs begin to give other indexes."""


@dataclass(frozen=True)
class Share:
    """What one token file gives to a part. epochs: passes over its documents of the part."""

    part: str
    prefix: str
    weight: float
    samples: int
    epochs: float

    def __str__(self) -> str:
        return (
            f"{self.part}: {self.prefix}, weight {self.weight:.6g}: {self.samples} samples, "
            f"{self.epochs:.3g} epochs"
        )


@dataclass(frozen=True)
class Datasets:
    """What a run reads. None: no samples were asked for, or the user gave this part no data."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None
    shares: tuple[Share, ...] = ()


def build_datasets(
    config: DataConfig,
    *,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    tokenizer_fingerprint: str,
    vocab_size: int,
    fallback_cache: str | None = None,
) -> Datasets:
    """The datasets of training, validation and test, their indexes cached on disk.

    num_samples: samples that the run will take of each; a dataset holds at least so many. Every
    process may call this at the same time. fallback_cache: folder for the indexes if
    --data-cache-path is not given and the folder of the data cannot be written.

    Validation or test that the user gave no data (a share of 0 in --split, or --train-data-path
    without --valid-data-path) is None. Raises ValueError if data was meant for a part but none
    falls to it, if training has none, and for files that are not what they should be.
    """
    builder = _Builder(
        config=config,
        seq_length=seq_length,
        seed=seed,
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=vocab_size,
        fallback_cache=fallback_cache,
    )
    split = parse_split(config.split or DEFAULT_SPLIT)
    alone = (config.train_data_path, config.valid_data_path, config.test_data_path)
    built: list[TokenDataset | None] = []
    for part, (name, samples) in enumerate(zip(NAMES, num_samples, strict=True)):
        paths, shares = (config.data_path, split) if config.data_path else (alone[part], None)
        given = bool(paths) and (shares is None or shares[part] > 0)
        if samples and not given and part == 0:
            _refuse(no_training(config, split))
            raise ValueError("--train-data-path (or --data-path) is required")
        if not samples or not given or not paths:
            built.append(None)
            continue
        built.append(builder.dataset(name, paths, shares, samples))
    train, valid, test = built
    return Datasets(train, valid, test, tuple(builder.shares))


@dataclass(frozen=True)
class _Builder:
    config: DataConfig
    seq_length: int
    seed: int
    tokenizer_fingerprint: str
    vocab_size: int
    fallback_cache: str | None
    shares: list[Share] = field(default_factory=list)
    """Of what was built so far."""

    def dataset(
        self, name: str, paths: Sequence[str], shares: Sequence[float] | None, samples: int
    ) -> TokenDataset:
        if len(paths) == 1:
            alone, tokens = self._single(name, paths[0], shares, samples)
            self._note(name, paths[0], 1.0, samples, tokens)
            return alone
        weights, prefixes = parse_blend(paths, "--data-path")
        if weights is None:
            sizes = [self._tokens(name, prefix, shares) for prefix in prefixes]
            weights = [size / sum(sizes) for size in sizes]
        requests = blend_requests(weights, samples)
        sources = [
            self._single(name, prefix, shares, request)
            for prefix, request in zip(prefixes, requests, strict=True)
        ]
        order = blend_order(weights, samples, self._cache(prefixes[0]))
        taken = order.taken(len(order)).tolist()
        for prefix, weight, count, (_, tokens) in zip(
            prefixes, weights, taken, sources, strict=True
        ):
            self._note(name, prefix, weight, count, tokens)
        return BlendedDataset([one for one, _ in sources], order)

    def _tokens(self, name: str, prefix: str, shares: Sequence[float] | None) -> int:
        """Tokens of a file's documents that belong to the part, which must be some."""
        file = IndexedDataset(prefix)
        _refuse(no_documents(self.config, name, file, 1, shares))
        first, end = part_bounds(file, name, shares)
        return int(file.lengths[first:end].sum(dtype=np.int64))

    def _note(self, part: str, prefix: str, weight: float, samples: int, tokens: int) -> None:
        epochs = samples * self.seq_length / tokens
        self.shares.append(Share(part, prefix, weight, samples, epochs))

    def _single(
        self, name: str, prefix: str, shares: Sequence[float] | None, samples: int
    ) -> tuple[GPTDataset, int]:
        """The samples of one file, and the tokens of its documents that belong to the part."""
        file = IndexedDataset(prefix)
        _refuse(wrong_ids(file, self.vocab_size))
        if self.config.mmap_warmup:
            file.warm_up()
        _refuse(no_documents(self.config, name, file, samples, shares))
        first, end = part_bounds(file, name, shares)
        lengths = file.lengths
        decides = {
            "format": FORMAT,
            "sequences": len(file),
            "lengths sha256": hashlib.sha256(lengths.tobytes()).hexdigest(),
            "split": self.config.split or DEFAULT_SPLIT if shares is not None else None,
            "documents": [first, end],
            "samples": samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "tokenizer": self.tokenizer_fingerprint,
        }

        def make() -> Arrays:
            try:
                made = build_indexes(
                    lengths, np.arange(first, end), samples, self.seq_length, self.seed
                )
            except (MemoryError, OverflowError, ValueError) as error:
                raise ValueError(
                    f"{prefix}: {samples} {name} samples need an index that cannot be made "
                    f"({error}): ask for fewer samples"
                ) from error
            return {
                "documents": made.documents,
                "samples": made.samples,
                "shuffle": made.shuffle,
            }

        arrays = self._cache(prefix).get(f"{Path(prefix).name}-{name}", decides, make)
        indexes = SampleIndexes(arrays["documents"], arrays["samples"], arrays["shuffle"])
        dataset = GPTDataset(file, indexes, self.seq_length, self.vocab_size)
        return dataset, int(lengths[first:end].sum(dtype=np.int64))

    def _cache(self, prefix: str) -> ArrayCache:
        if self.config.data_cache_path:
            return ArrayCache([Path(self.config.data_cache_path)])
        folders = [Path(prefix).parent / "index-cache"]
        if self.fallback_cache:
            folders.append(Path(self.fallback_cache))
        return ArrayCache(folders)


def _refuse(problems: Iterator[str]) -> None:
    """Raises ValueError for the first problem, if there is one."""
    problem = next(problems, None)
    if problem is not None:
        raise ValueError(problem)
