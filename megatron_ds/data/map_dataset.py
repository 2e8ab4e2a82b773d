"""A program's own dataset, or a mock one, as the samples of a run, shuffled in each epoch.

Knows no ranks and no torch.
"""

from __future__ import annotations

import numpy as np

from megatron_ds.config.problems import user_error
from megatron_ds.data.blend.blend_history import BlendHistory, SourceId, resume_history
from megatron_ds.data.blend.blend_schedule import FAIR, order_version
from megatron_ds.data.blend.blended_dataset import SingleSourceOrder
from megatron_ds.data.build_datasets import BlendProgress, Datasets
from megatron_ds.data.dataset_request import BuildDataset, DatasetRequest, MapStyle
from megatron_ds.data.gpt_dataset import SampleArray, TokenDataset
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.sample_index import IntArray
from megatron_ds.tokenizer import Tokenizer

MOCK_ITEMS = 100_000
"""Items of a mock dataset, as in Megatron."""


class MockDataset:
    """Random tokens, which seed, split and index determine. Implements `MapStyle`."""

    def __init__(self, request: DatasetRequest) -> None:
        self._request = request

    def __len__(self) -> int:
        return MOCK_ITEMS

    def __getitem__(self, index: int) -> SampleArray:
        request = self._request
        rng = np.random.default_rng([request.seed, *request.split.encode(), index])
        size = request.seq_length + 1
        return rng.integers(request.tokenizer.vocab_size, size=size, dtype=np.int32)


class MapDataset(TokenDataset):
    """The items of a dataset, shuffled in each epoch."""

    vocab_size: int | None = None  # the ids of each item are checked here
    cache: TokenCache | None = None

    def __init__(self, items: MapStyle, request: DatasetRequest) -> None:
        self.seq_length = request.seq_length
        self._items, self._request = items, request
        self._epoch: tuple[int, IntArray] = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._request.samples

    def __getitem__(self, position: int) -> SampleArray:
        row = np.empty(self.seq_length + 1, dtype=np.int32)
        self.read_into(position, row)
        return row

    def read_into(self, position: int, row: SampleArray) -> None:
        index = self._index(position)
        sample, limit = np.asarray(self._items[index]), self._request.tokenizer.vocab_size
        if sample.shape != row.shape or sample.dtype.kind not in "iu":
            shown, needed = f"{sample.dtype} {list(sample.shape)}", f"integers {list(row.shape)}"
            raise user_error("dataset-item-of-other-shape", index=index, found=shown, needed=needed)
        if not -limit <= sample.min() <= sample.max() < limit:
            token = next(one for one in sample.tolist() if not -limit <= one < limit)
            raise user_error(
                "dataset-item-outside-vocabulary", index=index, token=token, size=limit
            )
        row[:] = sample

    def sample_id(self, position: int) -> str:
        return f"item {self._index(position)}"

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._items))
        if self._epoch[0] != epoch:
            shuffle = np.random.RandomState((self._request.seed + epoch) % (1 << 32))
            self._epoch = epoch, shuffle.permutation(len(self._items))
        return int(self._epoch[1][offset])


def build_own_datasets(
    build: BuildDataset,
    *,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    tokenizer: Tokenizer,
    history: BlendHistory | None,
    consumed: int,
) -> Datasets:
    """The datasets of a run whose program brings its own.

    Args:
        build: Builds the dataset of a split.
        seq_length: Tokens per sample, without the last label.
        seed: Seed of the shuffles.
        num_samples: Samples that the run needs of train, valid and test.
        tokenizer: The run's tokenizer.
        history: What the run that is resumed has read.
        consumed: Its consumed samples.

    Raises:
        UserError: If there is no training data, or it has another number of items or tokens than
            in the run that is resumed.
    """
    built: dict[str, MapDataset] = {}
    for split, samples in zip(("train", "validation", "test"), num_samples, strict=True):
        request = DatasetRequest(split, samples, seq_length, seed, tokenizer)
        items = build(request) if samples else None
        if items is not None and len(items):
            built[split] = MapDataset(items, request)
        elif samples and split == "train":
            raise user_error("no-training-data")
    progress = None
    if "train" in built:
        source = SourceId("", "", (0, len(built["train"]._items)))
        now = resume_history(history, [source], [1.0], order_version(FAIR), consumed, seq_length)
        if history is not None and now != history:
            raise user_error("dataset-changed", items=source.documents[1], tokens=seq_length)
        progress = BlendProgress(now, SingleSourceOrder(num_samples[0]))

    def named(split: str) -> dict[str, TokenDataset]:
        return {"": built[split]} if split in built else {}

    train, valid, test = built.get("train"), named("validation"), named("test")
    return Datasets(train, valid, test, progress=progress, has_masks=True)
