"""A program's own dataset, or a mock one, as the samples of a run, shuffled in each epoch.

Knows no ranks and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import user_error
from megatron_ds.data.blend.blend_history import BlendHistory, SourceId, resume_history
from megatron_ds.data.blend.blend_schedule import FAIR, order_version
from megatron_ds.data.blend.blended_dataset import SingleSourceOrder
from megatron_ds.data.build_datasets import BlendProgress, Datasets
from megatron_ds.data.own.dataset_request import BuildDataset, DatasetRequest, MapStyle
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.sample import IdArray, Mark, MarkArray
from megatron_ds.data.sample_index import IntArray
from megatron_ds.data.token_dataset import TokenDataset
from megatron_ds.tokenizer import Tokenizer

MOCK_ITEMS = 100_000
"""Items of a mock dataset, as in Megatron."""
IGNORE_INDEX = -100
"""Label without loss, as torch's cross entropy ignores it."""
IDS = "input_ids"
LABELS = "labels"
LOSS_MASK = "loss_mask"
Values = npt.NDArray[Any]


class MockDataset:
    """Random tokens, which seed, split and index determine. Implements `MapStyle`."""

    def __init__(self, request: DatasetRequest) -> None:
        self._request = request

    def __len__(self) -> int:
        return MOCK_ITEMS

    def __getitem__(self, index: int) -> IdArray:
        request = self._request
        rng = np.random.default_rng([request.seed, *request.split.encode(), index])
        size = request.seq_length + 1
        return rng.integers(request.tokenizer.vocab_size, size=size, dtype=np.int32)


class MapDataset(TokenDataset):
    """The items of a dataset, in any form of `MapStyle`, shuffled in each epoch."""

    vocab_size: int | None = None  # the ids of each item are checked here
    cache: TokenCache | None = None
    marks = Mark.NO_LOSS

    def __init__(self, items: MapStyle, request: DatasetRequest) -> None:
        self.seq_length = request.seq_length
        self._items = items
        self._request = request
        self._epoch: tuple[int, IntArray] = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._request.samples

    def __getitem__(self, position: int) -> IdArray:
        ids = np.empty(self.seq_length + 1, dtype=np.int32)
        self.read_into(position, ids)
        return ids

    def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        index = self._index(position)
        values, has_loss = self._parts(index, self._items[index])
        ids[:] = values
        if marks is not None:
            marks[~has_loss] = Mark.NO_LOSS

    def _parts(self, index: int, item: Any) -> tuple[Values, npt.NDArray[np.bool_]]:
        """The token ids of an item, and whether each has a loss as a label."""
        if isinstance(item, Mapping):
            return self._of_mapping(index, item)
        if _is_pair(item):
            return self._ids(index, item[0]), self._mask(index, item[1])
        # The inverted id of a token without loss is negative.
        values = self._integers(index, item)
        ids = np.where(values < 0, ~values, values)
        self._check_ids(index, ids, values)
        return ids, values >= 0

    def _of_mapping(
        self, index: int, item: Mapping[str, Any]
    ) -> tuple[Values, npt.NDArray[np.bool_]]:
        if item.keys() == {IDS, LOSS_MASK}:
            return self._ids(index, item[IDS]), self._mask(index, item[LOSS_MASK])
        if item.keys() != {IDS, LABELS}:
            keys = ", ".join(map(str, item))
            raise user_error("dataset-item-of-other-keys", index=index, keys=keys)
        ids = self._ids(index, item[IDS])
        labels = self._integers(index, item[LABELS])
        has_loss = labels != IGNORE_INDEX
        different = np.flatnonzero(has_loss & (labels != ids))
        if different.size:
            at = int(different[0])
            values = {"label": int(labels[at]), "token": int(ids[at])}
            raise user_error("dataset-labels-differ", index=index, at=at, **values)
        return ids, has_loss

    def _mask(self, index: int, weights: Any) -> npt.NDArray[np.bool_]:
        """The loss mask of an item."""
        values = self._array(index, weights, "biuf", "zeros and ones")
        other = values[(values != 0) & (values != 1)]
        if other.size:
            raise user_error("dataset-mask-of-other-values", index=index, value=other[0].item())
        mask: npt.NDArray[np.bool_] = values != 0
        return mask

    def _ids(self, index: int, ids: Any) -> Values:
        """The token ids of an item that says apart which have a loss."""
        values = self._integers(index, ids)
        self._check_ids(index, values, values)
        return values

    def _integers(self, index: int, values: Any) -> Values:
        return self._array(index, values, "iu", "integers")

    def _array(self, index: int, values: Any, kinds: str, name: str) -> Values:
        """An array [seq_length + 1] of numbers.

        Args:
            index: Index of the item.
            values: A list, an array or a tensor.
            kinds: Kinds of numpy's types that are accepted.
            name: Name of the numbers in error messages.
        """
        try:
            array = np.asarray(values)
            description = f"{array.dtype} {list(array.shape)}"
        except ValueError:  # lists of different lengths
            array = np.empty(0)
            description = "lists of different lengths"
        if array.shape != (self.seq_length + 1,) or array.dtype.kind not in kinds:
            shapes = {"found": description, "needed": f"{name} [{self.seq_length + 1}]"}
            raise user_error("dataset-item-of-other-shape", index=index, **shapes)
        return array

    def _check_ids(self, index: int, ids: Values, values: Values) -> None:
        """Checks that token ids are in the vocabulary.

        Args:
            index: Index of the item.
            ids: Its token ids.
            values: Description of the item's values in error messages.
        """
        limit = self._request.tokenizer.vocab_size
        wrong = values[(ids < 0) | (ids >= limit)]
        if wrong.size:
            token = wrong[0].item()
            raise user_error(
                "dataset-item-outside-vocabulary", index=index, token=token, size=limit
            )

    def sample_id(self, position: int) -> str:
        return f"item {self._index(position)}"

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._items))
        if self._epoch[0] != epoch:
            self._epoch = epoch, epoch_order(self._request.seed, epoch, len(self._items))
        return int(self._epoch[1][offset])


def epoch_order(seed: int, epoch: int, size: int) -> IntArray:
    """The items of an epoch in the order in which they are read.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        size: Number of items.
    """
    return np.random.RandomState((seed + epoch) % (1 << 32)).permutation(size)


def _is_pair(item: Any) -> bool:
    """Whether an item is a pair of sequences, not of ids."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    return isinstance(item[0], Sequence) or np.ndim(item[0]) > 0


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
        history: Data that the resumed run has read.
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

    train = built.get("train")
    return Datasets(train, named("validation"), named("test"), progress=progress)
