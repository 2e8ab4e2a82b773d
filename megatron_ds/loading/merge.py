"""Merges the weights of several checkpoints of one model: mean, moving average, emulated decay.

The merged weights form a source that is read tensor by tensor: memory holds one tensor of one
checkpoint at a time, and an fp64 sum. Knows no format. Imports no torch before weights are opened.
Source of the decay's weights: Tian et al. 2025, "WSM", theorem 3.1.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from megatron_ds.config.fields import option_field, option_group, when
from megatron_ds.config.options.checkpoint import split_location
from megatron_ds.config.problems import Problem, raise_if_any
from megatron_ds.conversion.foreign.recognition import location_problems
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.loading.locations import staged_location
from megatron_ds.loading.programs.convert_options import ENGINES_HELP, engine_problems, names_of
from megatron_ds.schedules import DECAY_FACTORS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
    from megatron_ds.engine.states.state_reader import Columns, TensorReader

OnTensor = Callable[[str, int], None]
"""Called with name and bytes of each tensor that has been written."""
BLOCK = 2**20
"""Elements that are summed at once."""


@dataclass(frozen=True)
class MergeOptions:
    """How the weights of several checkpoints are merged."""

    merge_method: str = option_field("mean", choices=("mean", "ema", "wsm"))
    """mean; ema, the exponential moving average; or wsm, which emulates a decay of the learning
    rate over the steps of the checkpoints (warmup-stable and merge)."""
    merge_decay: float = option_field(0.9, minimum=0, maximum=1, only_with=when(merge_method="ema"))
    """What the moving average keeps of its value at each further checkpoint."""
    merge_decay_style: str = option_field(
        "linear", choices=tuple(DECAY_FACTORS), only_with=when(merge_method="wsm")
    )
    """Emulated decay; linear is the mean."""

    def weights(self, iterations: Sequence[int]) -> list[float]:
        """The weight of each checkpoint, from the oldest to the newest; their sum may be any.

        With "wsm", the steps from one checkpoint to the next count as they do in a decay that
        begins at the first one and ends a mean distance after the last one: with the sum of the
        weights after them.

        Args:
            iterations: Iteration of each checkpoint. If they are unknown, 0, 1, 2, ...
        """
        count = len(iterations)
        if self.merge_method == "mean":
            return [1.0] * count
        if self.merge_method == "ema":
            powers = [self.merge_decay**later for later in reversed(range(count))]
            return [powers[0], *((1.0 - self.merge_decay) * power for power in powers[1:])]
        decay = DECAY_FACTORS[self.merge_decay_style]
        first = iterations[0]
        last = iterations[-1]
        length = (last - first) * count / (count - 1)
        factors = [*(decay((iteration - first) / length) for iteration in iterations), 0.0]
        return [before - after for before, after in itertools.pairwise(factors)]


@dataclass(frozen=True)
class Options:
    """Merges the weights of several checkpoints of one model, of any layouts and formats.

    They are sorted by their iterations, if all have one; otherwise --load has the oldest first. The
    output folder appears complete or not at all. Sums are in fp64, and rounded once.
    """

    PROGRAM: ClassVar[str] = "merge_checkpoints.py"

    load: tuple[str, ...] = option_field((), nargs="*", metavar="FOLDER", required=True)
    """checkpoints: folders or URLs that tools/convert_checkpoint.py reads; FORMAT:FOLDER names the
    format."""
    save: str = option_field("", metavar="FOLDER", required=True)
    """New folder of the merged weights."""
    target_format: str = option_field(
        "native", flag="to", choices=("native", "hf"), synonyms={"huggingface": "hf"}
    )
    """Format of --save."""
    engines: tuple[str, ...] = option_field(
        (),
        flag="for",
        nargs="*",
        metavar="ENGINE",
        only_with=when(target_format="hf"),
        help=ENGINES_HELP,
    )
    merging: MergeOptions = option_group(
        MergeOptions(),
        flags={
            "merge_method": "method",
            "merge_decay": "decay",
            "merge_decay_style": "decay-style",
        },
    )
    dtype: str | None = option_field(None, choices=("fp32", "bf16", "fp16"))
    """Type of the weights (default: as they are); fp32 merges the master weights of runs."""
    checkpoint_staging_dir: str | None = option_field(None, metavar="FOLDER")
    """Folder for the files of URLs (default: below the folder for temporary files)."""

    def problems(self) -> Iterator[Problem]:
        for location in self.load:
            yield from location_problems(location)
        yield from engine_problems(self.engines, self.target_format)
        if len(self.load) == 1:
            yield Problem("one-checkpoint-to-merge", "load")

    def write(
        self, source: SourceCheckpoint, warn: Callable[[str], None], on_tensor: OnTensor
    ) -> None:
        """Writes merged weights to the new folder.

        Raises:
            UserError: If the folder has files already, or the format lacks a part of the model.
            OSError: If the disk fails.
        """
        from megatron_ds.conversion.registry import write
        from megatron_ds.conversion.source import WriteOptions

        options = WriteOptions(engines=names_of(self.engines), warn=warn)
        write(source, Path(self.save), self.target_format, options, on_tensor)

    def open(self, warn: Callable[[str], None]) -> SourceCheckpoint:
        """The merged weights in the type of the output.

        Raises:
            UserError: If a checkpoint is damaged, or the models differ.
        """
        import torch

        from megatron_ds.conversion.native import DTYPES
        from megatron_ds.conversion.source import ReadOptions

        reading = ReadOptions(warn, masters=self.dtype == "fp32")
        sources = open_all(self.load, reading, self.checkpoint_staging_dir)
        if self.dtype is None:
            return merge_sources(sources, self.merging)
        sources = [source.to(torch.float64) for source in sources]  # so that a sum is rounded once
        return merge_sources(sources, self.merging).to(DTYPES[self.dtype])


def open_all(
    locations: Sequence[str], reading: ReadOptions, staging_dir: str | None
) -> list[SourceCheckpoint]:
    """Opens checkpoints, which are downloaded if they are URLs.

    Raises:
        UserError: If one is damaged.
    """
    from megatron_ds.conversion.registry import open_source

    sources = []
    for location in locations:
        name, folder = split_location(staged_location(location, staging_dir, reading.warn))
        sources.append(open_source(Path(folder), name, reading))
    return sources


def merge_sources(sources: Sequence[SourceCheckpoint], options: MergeOptions) -> SourceCheckpoint:
    """The merged weights of one or several sources, read on demand.

    Raises:
        UserError: If the models differ, with every difference.
    """
    import torch

    if len(sources) == 1:
        return sources[0]
    known = [source.iteration for source in sources if source.iteration is not None]
    iterations = sorted(known)
    if len(known) == len(sources):
        order = sorted(range(len(sources)), key=lambda index: known[index])
        sources = [sources[index] for index in order]
    if len(known) < len(sources) or iterations[0] == iterations[-1]:
        iterations = [*range(len(sources))]
    vocab_size = min(source.settings.model.vocab_size for source in sources)
    sources = [
        source.with_vocab(vocab_size)
        if source.settings.may_have_padding and source.settings.model.vocab_size > vocab_size
        else source
        for source in sources
    ]
    raise_if_any([*_differences(sources)])
    weights = options.weights(iterations)
    first = sources[0]
    tensors = {}
    for name in first.tensors:
        parts = [source.tensors[name] for source in sources]
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        load = partial(_weighted_sum, parts, weights, dtype)
        tensors[name] = dataclasses.replace(parts[0], dtype=dtype, load=load)
    is_one = len({source.precision for source in sources}) == 1
    precision = first.precision if is_one else None
    named = dataclasses.replace(first, format="merged", run=None, notes=(), merged=tuple(sources))
    return dataclasses.replace(named, tensors=tensors, precision=precision)


def _differences(sources: Sequence[SourceCheckpoint]) -> Iterator[Problem]:
    """Options of the models that are not the first one's."""
    options = []
    for source in sources:
        model = source.settings.model
        moe = source.settings.moe
        values = dict(ModelSettings.of(model, moe, None, None).fixed)
        if model.is_rotary:
            values.pop("max_position_embeddings", None)  # has no weights
        options.append(values)
    for source, values in zip(sources[1:], options[1:], strict=True):
        for name in dict.fromkeys((*options[0], *values)):
            before = options[0].get(name, "absent")
            now = values.get(name, "absent")
            if before != now:
                texts = {"name": name, "now": now, "first": sources[0].path, "saved": before}
                yield Problem("merge-model-differs", path=source.path, **texts)


def _weighted_sum(
    parts: Sequence[TensorReader],
    weights: Sequence[float],
    dtype: torch.dtype,
    rows: range,
    columns: Columns | None,
) -> Tensor:
    """Rows of a merged tensor; as numpy.average of fp64 values, rounded."""
    import torch

    total = torch.empty(0)
    for part, weight in zip(parts, weights, strict=True):
        values = part.load(rows, columns).detach()  # files may have parameters
        if not total.numel():
            total = torch.zeros(values.shape, dtype=torch.float64)
        blocks = (tensor.reshape(-1).split(BLOCK) for tensor in (total, values))
        for block, addend in zip(*blocks, strict=True):
            block += addend.double() * weight
    return total.div_(sum(weights)).to(dtype)
